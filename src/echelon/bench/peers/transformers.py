"""Hugging Face's Llama in a plain training loop: autocast, compiled on a GPU, fused AdamW, clipping."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from echelon.bench.measurement import Measurement
from echelon.bench.step_timing import StepFunction, random_tokens


def prepare(measurement: Measurement) -> StepFunction:
    transformers = importlib.import_module("transformers")
    ours = measurement.model
    config = transformers.LlamaConfig(
        hidden_size=ours.width,
        num_hidden_layers=ours.layers,
        num_attention_heads=ours.heads,
        num_key_value_heads=ours.kv_heads,
        intermediate_size=ours.ffn,
        vocab_size=ours.vocab,
        max_position_embeddings=measurement.seq_len,
        tie_word_embeddings=ours.tied,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device(measurement.device):
        model: Any = transformers.LlamaForCausalLM(config).train()
    if measurement.recompute == "full":
        model.gradient_checkpointing_enable()
    # Its checkpoints break the compiler's graph, and a small model on a CPU gains nothing by compiling.
    run = torch.compile(model) if measurement.recompute == "none" and measurement.device == "cuda" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens, _ = random_tokens(measurement)

    def step() -> Callable[[], float]:
        optimizer.zero_grad()
        with torch.autocast(measurement.device, dtype=torch.bfloat16, enabled=measurement.precision == "bf16"):
            loss: Tensor = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        return loss.item

    return step
