"""Latent attention: as the paper writes it, whatever its queries are made of, and on many devices as on one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.models import ModelConfig, build, find_model, reduced_config
from echelon.models.attention import AttentionContext, rope_angles
from echelon.models.attention_config import MLAConfig
from echelon.models.mla import LatentAttention
from echelon.models.tp_splits import get_tp_split
from echelon.verification.verifier import LayoutVerdict, Verifier
from echelon.verification.verify_case import VerifyCase

LATENT = MLAConfig(query_rank=20, kv_rank=14, rope_dim=6, nope_dim=10, value_dim=8)
DIRECT = replace(LATENT, query_rank=0)
MIXED = replace(find_model("deepseek-tiny"), layers=2)
DENSE = replace(MIXED, moe=None)
QWEN = replace(reduced_config(find_model("qwen3-30b-a3b")), layers=2, moe=None)
WIDTH, HEADS, TOKENS = 32, 4, 11


def attention(latent: MLAConfig, dropout: float = 0.0) -> LatentAttention:
    torch.manual_seed(0)
    made = LatentAttention(WIDTH, HEADS, latent, epsilon=1e-6, dropout=dropout).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def seen(latent: MLAConfig) -> AttentionContext:
    place = torch.arange(TOKENS)[None]
    return AttentionContext(place, rope=rope_angles(place, latent.rope_dim, 1e4, torch.float64))


def hidden() -> Tensor:
    return torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def close(a: Tensor, b: Tensor) -> bool:
    a, b = a.detach(), b.detach()
    return bool((a - b).abs().max() <= 1e-12 * max(1.0, float(b.abs().max())))


def by_hand(made: LatentAttention, x: Tensor) -> Tensor:
    """Token by token and head by head; pairs that turn are complex numbers."""
    latent, half = made.config, made.config.rope_dim // 2
    rate = 1e4 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(TOKENS, dtype=torch.float64)[:, None] * rate
    turn = torch.polar(torch.ones_like(angle), angle)

    def norm(v: Tensor, weight: Tensor) -> Tensor:
        return v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def turned(v: Tensor) -> Tensor:
        return torch.view_as_real(torch.complex(v[:, :half], v[:, half:]) * turn).flatten(1)

    down = x @ made.kv_down.weight.T
    kv = norm(down[:, : latent.kv_rank], made.kv_norm.weight)
    key = turned(down[:, latent.kv_rank :])
    source = norm(x @ made.q_down.weight.T, made.q_norm.weight) if latent.query_rank else x
    out = torch.zeros(TOKENS, WIDTH, dtype=torch.float64)
    for head in range(HEADS):
        q = source @ made.heads.q.weight.unflatten(0, (HEADS, -1))[head].T
        up = kv @ made.heads.kv.weight.unflatten(0, (HEADS, -1))[head].T
        k, v = up[:, : latent.nope_dim], up[:, latent.nope_dim :]
        scores = (q[:, : latent.nope_dim] @ k.T + turned(q[:, latent.nope_dim :]) @ key.T) / latent.head_dim**0.5
        scores += torch.full((TOKENS, TOKENS), -torch.inf, dtype=torch.float64).triu(1)
        out += scores.softmax(-1) @ v @ made.o.weight.unflatten(1, (HEADS, -1))[:, head].T
    return out


@pytest.mark.parametrize("latent", [LATENT, DIRECT], ids=["narrow queries", "direct queries"])
def test_it_is_what_the_paper_says(latent: MLAConfig) -> None:
    made, x = attention(latent), hidden()
    wanted = torch.stack([by_hand(made, row) for row in x])
    assert close(made(x, seen(latent)), wanted)
    assert sum(p.numel() for p in made.parameters()) == latent.parameters(WIDTH, HEADS)


def test_the_path_with_dropout_computes_the_same() -> None:
    """Values are narrower than queries there too."""
    x = hidden()
    assert close(attention(LATENT, 1e-18).train()(x, seen(LATENT)), attention(LATENT)(x, seen(LATENT)))


def test_heads_are_read_from_the_projections() -> None:
    whole, x = attention(LATENT), hidden()
    parts = []
    for half in range(2):
        part = attention(LATENT)
        for module, dim in ((part.heads.q, 0), (part.heads.kv, 0), (part.o, 1)):
            module.weight = nn.Parameter(module.weight.chunk(2, dim)[half])
        parts.append(part(x, seen(LATENT)))
    assert close(parts[0] + parts[1], whole(x, seen(LATENT)))


@pytest.mark.parametrize("latent", [LATENT, DIRECT], ids=["narrow queries", "direct queries"])
def test_parameters_and_flops(latent: MLAConfig) -> None:
    config = replace(DENSE, mla=latent)
    model = build(config, "meta")
    assert config.parameters == sum(p.numel() for p in model.parameters())
    # Scores of 16 elements a head, values of 8; half of them by causality; three times by backward.
    assert config.flops_per_token(100) == 6 * config.matmul_parameters + 3 * 2 * 4 * (16 + 8) * 100
    assert (config.head_dim, config.value_dim, config.rope_dim) == (16, 8, 6)
    # Each pattern of the table names a module, and each matrix and norm of attention has a word.
    words = get_tp_split(model)
    mine = [name for name, _ in model.blocks[0].attn.named_parameters()]
    assert {f"blocks.*.attn.{name.removesuffix('.weight')}" for name in mine} <= set(words)


def test_impossible_shapes_are_refused() -> None:
    for change, match in (
        ({"kv_rank": 0, "nope_dim": 0}, r"kv_rank is less than 1 \(kv_rank=0\).*; also nope_dim is less than 1"),
        ({"rope_dim": 5}, r"rotates pairs \(rope_dim=5\)"),
        ({"value_dim": 17}, r"values are wider than queries \(value_dim=17, queries 16\)"),
    ):
        with pytest.raises(ValueError, match=match):
            replace(LATENT, **change)
    for change, match in (
        ({"kv_heads": 2}, r"requires kv_heads = heads \(heads=4, kv_heads=2\)"),
        ({"qk_norm": True}, "qk_norm is incompatible with latent attention"),
        ({"family": "gpt"}, "mla is an option of the llama family"),
    ):
        with pytest.raises(ValueError, match=match):
            replace(DENSE, **change)


# -- many devices -----------------------------------------------------------------------------------------------------


def judge(pool: RankPool, model: ModelConfig, layout: str, leave_out: str = "") -> LayoutVerdict:
    return Verifier(pool, VerifyCase(model=model, steps=2, seq_len=33), leave_out).verify_layout(Layout.parse(layout))


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (MIXED, "tp=2,pp=2"),
        (MIXED, "dp=2,zero=3,ep=2"),
        (MIXED, "tp=2,cp=2,ep=2,recompute=full"),
        (DENSE, "tp=2,sp=0"),
        (replace(DENSE, mla=DIRECT, dropout=0.1), "tp=2,recompute=ops"),
        (DENSE, "cp=2,cp_kind=ring"),
        (DENSE, "cp=2,cp_kind=gather"),
        (DENSE, "cp=2,cp_kind=ulysses"),
        (replace(DENSE, dropout=0.1), "cp=2"),
        (DENSE, "pp=2,schedule=terapipe"),
        (QWEN, "tp=2,sp=0"),
        (replace(QWEN, dropout=0.1), "tp=4"),
    ],
    ids=lambda value: value.name + " dropout" * (value.dropout > 0) if isinstance(value, ModelConfig) else value,
)
def test_many_devices_compute_what_one_does(pool: RankPool, model: ModelConfig, layout: str) -> None:
    verdict = judge(pool, model, layout)
    assert verdict.passed, f"{verdict.first_difference} {verdict.trouble}"


@pytest.mark.parametrize(("model", "name"), [(DENSE, "attn.q_down"), (QWEN, "attn.q_norm")])
def test_parts_of_gradients_are_missed_where_they_are_not_summed(pool: RankPool, model: ModelConfig, name: str) -> None:
    """Narrow products see a rank's own tokens, norms of heads a rank's own heads."""
    verdict = judge(pool, model, "tp=2", "tp:all_reduce")
    assert not verdict.passed
    assert not verdict.trouble
    assert any(entry.endswith(f"{name}.weight") for entry in _parts(model))


def _parts(model: ModelConfig) -> list[str]:
    """Parameters whose gradients tensor parallelism sums."""
    from echelon.parallel.comm.mesh_axis import MeshAxis
    from echelon.parallel.tp.tensor_parallel import shard_modules
    from echelon.parallel.transform_context import logical_params

    built = build(model, "meta")
    axis = MeshAxis("tp", (0, 1), 0, None, frozenset())
    entries, _ = shard_modules(built, logical_params(built), get_tp_split(built), axis, sequence_parallel=True)
    return [entry.name for entry in entries if "tp" in entry.partial_grad_axes]
