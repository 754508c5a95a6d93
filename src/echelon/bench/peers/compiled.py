"""A plain loop as a person writes it in an hour: torch's modules, compiled as a whole, autocast, fused AdamW, clipping.

It needs no installation. Its vocabulary is rounded up to a multiple of 64, as such loops do: the GEMMs of the logits
are several times slower at odd sizes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from echelon.bench.measurement import Measurement
from echelon.bench.step_timing import StepFunction, random_tokens, training_step
from echelon.models.model_config import ModelConfig

VOCAB_MULTIPLE = 64


class PlainGPTBlock(nn.Module):
    """LayerNorm, one matrix for queries, keys and values, GELU, biases."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, config.ffn), nn.Linear(config.ffn, width)

    def forward(self, x: Tensor, _rotation: None) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return out


class PlainLlamaBlock(nn.Module):
    """RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, self.head_dim = config.width, config.head_dim
        self.sizes = [config.heads * self.head_dim, *[config.kv_heads * self.head_dim] * 2]
        self.norm1, self.norm2 = nn.RMSNorm(width, config.epsilon), nn.RMSNorm(width, config.epsilon)
        self.qkv, self.out = nn.Linear(width, sum(self.sizes), bias=False), nn.Linear(self.sizes[0], width, bias=False)
        self.gate_up, self.down = nn.Linear(width, 2 * config.ffn, bias=False), nn.Linear(config.ffn, width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        parts = self.qkv(self.norm1(x)).split(self.sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        q, k = (rotate(part, *rotation) for part in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        out: Tensor = x + self.down(F.silu(gate) * up)
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), -1) * sin.to(x.dtype)


class PlainModel(nn.Module):
    """A decoder that returns its mean loss."""

    def __init__(self, config: ModelConfig, *, recompute: bool = False) -> None:
        """`recompute`: every block is checkpointed."""
        super().__init__()
        is_gpt, self.recompute = config.family == "gpt", recompute
        vocab = -(-config.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        self.config = config
        self.embed = nn.Embedding(vocab, config.width)
        self.positions = nn.Embedding(config.max_seq_len, config.width) if is_gpt else None
        self.blocks = nn.ModuleList(
            (PlainGPTBlock if is_gpt else PlainLlamaBlock)(config) for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width) if is_gpt else nn.RMSNorm(config.width, config.epsilon)
        self.head = nn.Linear(config.width, vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        if config.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        rotation = None
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        else:
            rotation = self._rotation(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, rotation, use_reentrant=False) if self.recompute else block(x, rotation)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    def _rotation(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        size = self.config.head_dim
        rates = self.config.theta ** (-torch.arange(0, size, 2, device=tokens.device) / size)
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), rates).repeat(1, 2)
        return angles.cos(), angles.sin()


def prepare(measurement: Measurement) -> StepFunction:
    config = measurement.model
    if config.family not in ("gpt", "llama") or config.moe is not None or config.mla is not None:
        raise ValueError(f"the plain loop has no such model ({config.name}); use --against none")
    with torch.device(measurement.device):
        model = PlainModel(config, recompute=measurement.recompute == "full")
    tokens, targets = random_tokens(measurement)
    run = torch.compile(model) if measurement.device == "cuda" else model

    def loss() -> Tensor:
        with torch.autocast(measurement.device, dtype=torch.bfloat16, enabled=measurement.precision == "bf16"):
            out: Tensor = run(tokens, targets)
        return out

    return training_step(model, loss)
