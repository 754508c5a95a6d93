"""Models as users write them, of torch's own modules: what `bench/small_steps.py` measures and the planner traces."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEQ_LEN = 1024


class PlainBlock(nn.Module):
    """Of GPT-2: LayerNorm, one matrix for queries, keys and values, GELU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(_attention(self.heads, *self.qkv(self.norm1(x)).chunk(3, -1)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainNorm(nn.Module):
    """RMSNorm of single operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype) * self.weight


class GatedBlock(nn.Module):
    """Of Llama, without rotary positions: RMSNorm, SwiGLU, no biases."""

    def __init__(self, width: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = PlainNorm(width), PlainNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.out(_attention(self.heads, self.q(y), self.k(y), self.v(y)))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class PlainModel(nn.Module):
    """Embedding, blocks, norm, head and cross-entropy in float32."""

    def __init__(self, vocab: int, width: int, blocks: list[nn.Module], norm: nn.Module, positions: int = 0) -> None:
        super().__init__()
        self.embedding, self.blocks, self.norm = nn.Embedding(vocab, width), nn.ModuleList(blocks), norm
        self.positions = nn.Embedding(positions, width) if positions else None
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        return F.cross_entropy(logits, targets.flatten(), reduction="sum"), torch.tensor(targets.numel())


def _attention(heads: int, *projected: Tensor) -> Tensor:
    batch, seq_len, width = projected[0].shape
    q, k, v = (x.view(batch, seq_len, heads, width // heads).transpose(1, 2) for x in projected)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, seq_len, width)


def gpt_124m() -> nn.Module:
    return _gpt(768, 12, 12)


def gpt_350m() -> nn.Module:
    return _gpt(1024, 24, 16)


def gated_800m() -> nn.Module:
    blocks: list[nn.Module] = [GatedBlock(2048, 16, 5504) for _ in range(12)]
    return PlainModel(32_000, 2048, blocks, PlainNorm(2048))


def _gpt(width: int, layers: int, heads: int) -> nn.Module:
    blocks: list[nn.Module] = [PlainBlock(width, heads) for _ in range(layers)]
    return PlainModel(50_304, width, blocks, nn.LayerNorm(width), SEQ_LEN)


def batch(rows: int, step: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, 32_000, (rows, SEQ_LEN), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens, "targets": tokens}
