"""The model, the data and the update rule that both sides of every comparison share."""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.config.sections import OptimizerConfig
from echelon.models import ModelConfig

CONFIG = ModelConfig(
    name="llama-10m",
    family="llama",
    layers=8,
    width=256,
    heads=8,
    kv_heads=4,
    ffn=1024,
    vocab=4096,
    max_seq_len=256,
)
"""9.97 million parameters, untied, no dropout."""

RULE = OptimizerConfig(name="adamw", lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
"""Decoupled decay on matrices only, on both sides."""

CLIP = 1.0
"""Gradients are clipped by their norm on both sides, as in Echelon's default configuration."""

SEED = 0
ROWS_PER_RANK = 2
"""Sequences that a data-parallel rank trains on in a step. Ranks of one tensor-parallel group share theirs."""
BATCHES = 4
"""Different batches, used in turn."""

Batch = dict[str, Tensor]


def batches(rows: int) -> list[Batch]:
    """Global batches of `rows` sequences, the same on every rank."""
    generator = torch.Generator().manual_seed(SEED)
    shape = (rows, CONFIG.max_seq_len + 1)
    found = [torch.randint(CONFIG.vocab, shape, generator=generator) for _ in range(BATCHES)]
    return [{"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()} for text in found]
