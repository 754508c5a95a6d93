"""Hugging Face's Llama in a plain training loop: autocast, compiled on a GPU, fused AdamW, clipping."""

from __future__ import annotations

import importlib
from typing import Any, cast

import torch
from torch import Tensor

from echelon.bench.measurement import Measurement
from echelon.bench.step_timing import StepFunction, random_tokens, training_step


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
    tokens, _ = random_tokens(measurement)

    def loss() -> Tensor:
        with torch.autocast(measurement.device, dtype=torch.bfloat16, enabled=measurement.precision == "bf16"):
            return cast(Tensor, run(input_ids=tokens, labels=tokens).loss)

    return training_step(model, loss)
