"""Small modules of many kinds, that have no table of splits: each returns (sum of losses, number of targets)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Tensor]
WIDTH, HEADS, LENGTH, VOCAB = 32, 4, 16, 96


def rows_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def words(rows: int, step: int = 0) -> Batch:
    ids = torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=rows_of(step))
    return {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


def images(rows: int, step: int = 0) -> Batch:
    x = torch.randn(rows, 3, 16, 16, generator=rows_of(step))
    return {"x": x, "y": x[:, 0].mean((1, 2)).gt(0).long()}


def pictures(rows: int, step: int = 0) -> Batch:
    x = torch.randn(rows, 3, 16, 16, generator=rows_of(step))
    return {"x": x, "y": x.flip(-1)}


def pairs(rows: int, step: int = 0) -> Batch:
    both = torch.randint(0, VOCAB, (2, rows, LENGTH), generator=rows_of(step))
    return {"query": both[0], "item": both[1]}


class FusedBlock(nn.Module):
    """GPT's, with q, k and v in one linear."""

    def __init__(self, dropout: float = 0.1):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(width, dim=-1)
        q, k, v = (t.view(rows, length, HEADS, width // HEADS).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).contiguous().view(rows, length, width)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))


class PlainGPT(nn.Module):
    def __init__(self, layers: int = 2, dropout: float = 0.1, vocab: int = VOCAB):
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocab, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(FusedBlock(dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), reduction="sum"), torch.tensor(
            targets.numel()
        )


class RMS(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class GatedBlock(nn.Module):
    """Llama's, with grouped keys, rotary positions and scores by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.groups = WIDTH // HEADS, 2
        keys = WIDTH // self.groups
        self.norm1, self.norm2 = RMS(), RMS()
        self.q, self.k = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, keys, bias=False)
        self.v, self.o = nn.Linear(WIDTH, keys, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up, self.down = nn.Linear(WIDTH, 6 * WIDTH, bias=False), nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        rows, length, _ = x.shape
        y = self.norm1(x)
        q, k, v = (t.view(rows, length, -1, self.head_dim).transpose(1, 2) for t in (self.q(y), self.k(y), self.v(y)))
        q, k = (
            t * cos + torch.cat((-t[..., self.head_dim // 2 :], t[..., : self.head_dim // 2]), -1) * sin for t in (q, k)
        )
        k, v = (t[:, :, None].expand(-1, -1, self.groups, -1, -1).reshape(rows, HEADS, length, -1) for t in (k, v))
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(self.head_dim)
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32))
        x = x + self.o((weights.to(x.dtype) @ v).transpose(1, 2).reshape(rows, length, -1))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class PlainLlama(nn.Module):
    def __init__(self, layers: int = 2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(GatedBlock() for _ in range(layers))
        self.norm, self.head = RMS(), nn.Linear(WIDTH, VOCAB, bias=False)
        dim = WIDTH // HEADS
        self.register_buffer("rates", 1e4 ** (-torch.arange(0, dim, 2) / dim), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        length = tokens.shape[1]
        angles = torch.arange(length, device=tokens.device)[:, None] * self.rates
        angles = torch.cat((angles, angles), -1)
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype), mask)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), reduction="sum"), (targets >= 0).sum()


class MixerBlock(nn.Module):
    def __init__(self, tokens: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.channels = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, layers: int = 2):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.blocks = nn.ModuleList(MixerBlock(16) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)), y, reduction="sum"), torch.tensor(len(y))


class ViT(nn.Module):
    """A class token, learned positions, and torch's own encoder layers."""

    def __init__(self, layers: int = 2):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 17, WIDTH) / 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, F.gelu, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x[:, 0]), y, reduction="sum"), torch.tensor(len(y))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH), nn.Tanh())

    def forward(self, ids: Tensor) -> Tensor:
        return F.normalize(self.layers(self.embed(ids).mean(1)), dim=-1)


class TwoTower(nn.Module):
    """Retrieval: a score for each pair, and a loss by pair."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.items = Tower(), Tower()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, query: Tensor, item: Tensor) -> tuple[Tensor, Tensor]:
        scores = (self.queries(query) * self.items(item)).sum(-1) * self.scale.exp()
        return F.softplus(-scores).sum(), torch.tensor(len(query))


class UNetStage(nn.Module):
    def __init__(self, before: int, after: int):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(4, after), nn.GroupNorm(4, after)
        self.skip = nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm1(self.conv1(x)))
        return F.silu(self.norm2(self.conv2(y)) + self.skip(x))


class UNet(nn.Module):
    """Skips cross the whole network: pipeline stages hand them on."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([UNetStage(3, 8), UNetStage(8, 16)])
        self.middle = UNetStage(16, 16)
        self.up = nn.ModuleList([UNetStage(32, 16), UNetStage(24, 8)])
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        skips = []
        for stage in self.down:
            x = stage(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for stage in self.up:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = stage(torch.cat((x, skips.pop()), 1))
        return F.mse_loss(self.out(x), y, reduction="sum"), torch.tensor(y.numel())


class RecurrentBlock(nn.Module):
    """A selective state-space block, token after token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inputs, self.gates = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.conv = nn.Conv1d(2 * WIDTH, 2 * WIDTH, 3, groups=2 * WIDTH, padding=2)
        self.decay = nn.Parameter(torch.linspace(-1, 1, 2 * WIDTH))
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        u = F.silu(self.conv(self.inputs(y).transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        step = torch.sigmoid(self.gates(y))
        state, states = torch.zeros_like(u[:, 0]), []
        for t in range(x.shape[1]):
            state = state * torch.exp(-step[:, t] * self.decay.exp()) + step[:, t] * u[:, t]
            states.append(state)
        return x + self.out(torch.stack(states, 1) * F.silu(u))


class StateSpace(nn.Module):
    def __init__(self, layers: int = 2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(RecurrentBlock() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="sum"), torch.tensor(
            targets.numel()
        )


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Batch]]] = {
    "gpt": (PlainGPT, words),
    "llama": (PlainLlama, words),
    "mixer": (Mixer, images),
    "vit": (ViT, images),
    "two-tower": (TwoTower, pairs),
    "u-net": (UNet, pictures),
    "state-space": (StateSpace, words),
}


def build(name: str) -> tuple[Any, Callable[[int, int], Batch]]:
    """A module in float64, and its batches."""
    torch.manual_seed(0)
    factory, batch = MODULES[name]

    def double(rows: int, step: int) -> Batch:
        return {key: value.double() if value.is_floating_point() else value for key, value in batch(rows, step).items()}

    return factory().double(), double
