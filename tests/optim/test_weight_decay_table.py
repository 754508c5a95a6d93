"""Which parameter decays and with which learning rate: every family against a table written by hand.

`verify` takes both from the rule that the engine takes them from. The table takes neither from code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_engines import batch_of, float64, tiny, whole
from torch import Tensor, nn

from echelon import models
from echelon.config.sections import OptimizerConfig
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.models.attention_config import MLAConfig
from echelon.models.model_config import ModelConfig
from echelon.models.moe_config import MoEConfig
from echelon.models.vision import cnn
from echelon.training.engine import Engine
from echelon.training.loss_normalizer import LossNormalizer

LR, DECAY = 0.5, 0.25

# N is the index of a layer. Matrices decay, embeddings and stacks of experts among them; norms and biases do not.
GPT = "embed.weight positions.weight head.weight"
GPT_BLOCK = """blocks.N.attn.q.weight blocks.N.attn.k.weight blocks.N.attn.v.weight blocks.N.attn.o.weight
    blocks.N.mlp.up.weight blocks.N.mlp.down.weight"""
GPT_NOT = """norm.weight norm.bias blocks.N.norm1.weight blocks.N.norm1.bias blocks.N.norm2.weight blocks.N.norm2.bias
    blocks.N.attn.q.bias blocks.N.attn.k.bias blocks.N.attn.v.bias blocks.N.attn.o.bias
    blocks.N.mlp.up.bias blocks.N.mlp.down.bias"""
LLAMA = """embed.weight head.weight
    blocks.N.attn.q.weight blocks.N.attn.k.weight blocks.N.attn.v.weight blocks.N.attn.o.weight"""
MLP = "blocks.N.mlp.gate.weight blocks.N.mlp.up.weight blocks.N.mlp.down.weight"
ROUTED = "blocks.N.mlp.gate.weight blocks.N.mlp.experts.up blocks.N.mlp.experts.down"
SHARED = "blocks.N.mlp.shared.gate.weight blocks.N.mlp.shared.up.weight blocks.N.mlp.shared.down.weight"
LLAMA_NOT = "norm.weight blocks.N.norm1.weight blocks.N.norm2.weight"
LATENT = """embed.weight head.weight blocks.N.attn.q_down.weight blocks.N.attn.kv_down.weight
    blocks.N.attn.heads.q.weight blocks.N.attn.heads.kv.weight blocks.N.attn.o.weight"""

TABLE: Mapping[str, tuple[str, str]] = {
    "gpt": (f"{GPT} {GPT_BLOCK}", GPT_NOT),
    "gpt tied": (f"embed.weight positions.weight {GPT_BLOCK}", GPT_NOT),
    "gpt switch": (f"{GPT} {GPT_BLOCK} {ROUTED}", GPT_NOT),
    "llama": (f"{LLAMA} {MLP}", LLAMA_NOT),
    "llama with biases": (
        f"{LLAMA} {MLP}",
        f"{LLAMA_NOT} blocks.N.attn.q.bias blocks.N.attn.k.bias blocks.N.attn.v.bias",
    ),
    "llama with QK norm": (f"{LLAMA} {MLP}", f"{LLAMA_NOT} blocks.N.attn.q_norm.weight blocks.N.attn.k_norm.weight"),
    "mixtral": (f"{LLAMA} {ROUTED}", LLAMA_NOT),
    "noisy-top-k": (f"{LLAMA} {ROUTED} blocks.N.mlp.gate.noise_weight", LLAMA_NOT),
    "hierarchical": (
        f"{LLAMA} {ROUTED} blocks.N.mlp.gate.noise_weight blocks.N.mlp.gate.group_weight "
        "blocks.N.mlp.gate.group_noise_weight",
        LLAMA_NOT,
    ),
    # The bias of the gate is a buffer: the optimizer never sees it.
    "deepseek": (
        f"{LATENT} {MLP} {ROUTED} {SHARED}",
        f"{LLAMA_NOT} blocks.N.attn.q_norm.weight blocks.N.attn.kv_norm.weight",
    ),
    "conv": ("blocks.N.conv.weight head.weight", "blocks.N.norm.weight blocks.N.norm.bias head.bias"),
    "alexnet": ("features.N.weight head.N.weight", "features.N.bias head.N.bias"),
    "custom": (
        "table.weight places net.0.weight net.3.weight heads",
        "scale net.0.bias net.1.weight net.1.bias net.2.weight net.2.bias net.3.bias",
    ),
}
FROZEN = {"custom": "frozen.weight frozen.bias"}


class Custom(nn.Module):
    """A user's model: an embedding, learned positions, LayerNorm, GroupNorm, biases, a scalar, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.places = nn.Parameter(torch.randn(1, 6, 8))
        self.scale = nn.Parameter(torch.ones(()))
        self.net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GroupNorm(2, 6), nn.Linear(8, 8))
        self.heads = nn.Parameter(torch.randn(2, 8, 4))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, int]:
        x = self.frozen(self.net(self.table(tokens) + self.places)) * self.scale
        return torch.einsum("btd,hde->bthe", x, self.heads).square().sum(), tokens.numel()


def _moe(gate: str, **changes: Any) -> MoEConfig:
    return replace(MoEConfig(experts=4, k=2, ffn=8, gate=gate), **changes)


MLA = MLAConfig(query_rank=6, kv_rank=8, rope_dim=4, nope_dim=4, value_dim=4)
GROUPS_OF_TWO = (("num_groups", 2), ("group_limit", 1))
CONFIGS: Mapping[str, Callable[[], ModelConfig]] = {
    "gpt": lambda: tiny("gpt"),
    "gpt tied": lambda: tiny("gpt", tied=True),
    "gpt switch": lambda: tiny("gpt", moe=_moe("switch", k=1, activation="relu", every=2)),
    "llama": tiny,
    "llama with biases": lambda: tiny(qkv_bias=True),
    "llama with QK norm": lambda: tiny(qk_norm=True),
    "mixtral": lambda: tiny(moe=_moe("mixtral")),
    "noisy-top-k": lambda: tiny(moe=_moe("noisy-top-k")),
    "hierarchical": lambda: tiny(moe=_moe("hierarchical")),
    "deepseek": lambda: tiny(
        kv_heads=4, mla=MLA, moe=_moe("deepseek-v3", shared_ffn=8, dense_layers=1, options=GROUPS_OF_TWO)
    ),
    "conv": lambda: ModelConfig(name="conv", family="conv", layers=2, width=4, vocab=5, max_seq_len=8),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "custom":
        return Custom().double()
    model = cnn.alexnet(5, 64, 0.1) if name == "alexnet" else models.build(CONFIGS[name](), dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():  # a bias of zeros would not show that it decays
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.double()


def batch(name: str) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(1)
    if name == "custom":
        return {"tokens": torch.randint(11, (4, 6), generator=source)}
    if name in ("conv", "alexnet"):
        images = torch.randn(4, 3, *[8 if name == "conv" else 64] * 2, dtype=torch.float64, generator=source)
        return {"images": images, "labels": torch.tensor([0, 1, 2, 3])}
    return batch_of(CONFIGS[name](), 4, 8)


def expected_decay(name: str, parameters: list[str]) -> dict[str, float]:
    """The decay of each trainable parameter by the table, which must name each of them once."""
    decayed, vectors, frozen = TABLE[name][0].split(), TABLE[name][1].split(), FROZEN.get(name, "").split()
    kinds = {parameter: re.sub(r"(blocks|features|head)\.\d+\.", r"\1.N.", parameter) for parameter in parameters}
    assert {*kinds.values()} == {*decayed, *vectors, *frozen}
    assert not {*decayed} & {*vectors}
    return {p: DECAY if kind in decayed else 0.0 for p, kind in kinds.items() if kind not in frozen}


class NoGradients(LossNormalizer):
    @property
    def backward_seed(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64)


def step_without_gradient(name: str, layout: str, rule: OptimizerConfig) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All weights before and after a step whose gradients are zero: what is left of an update is the decay."""
    model = build(name)
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    engine = Engine(model, layout, rule, options=float64())
    engine.normalizer.__class__ = NoGradients
    result = engine.step(batch(name))
    assert result.norm == 0
    assert result.count > 0
    return before, whole(engine.parallel, "master")


def check_decay(before: dict[str, Tensor], after: dict[str, Tensor], factors: Mapping[str, float]) -> None:
    assert after.keys() == factors.keys()
    for key, factor in factors.items():
        expected = before[key] * (1 - factor)
        assert torch.allclose(after[key], expected, rtol=1e-12, atol=0), (key, factor)


@pytest.mark.parametrize("name", TABLE)
def test_a_step_without_gradients_shrinks_what_the_table_says(name: str) -> None:
    before, after = step_without_gradient(name, "", OptimizerConfig(lr=LR, weight_decay=DECAY))
    decay = expected_decay(name, list(before))
    check_decay(before, {key: after[key] for key in decay}, {key: LR * decay[key] for key in decay})
    assert all(torch.equal(after[key], before[key]) for key in after.keys() - decay.keys())


RULES: tuple[dict[str, Any], ...] = (
    *({"name": name} for name in ("adamw", "sgd", "lion", "lamb", "adafactor", "sm3", "muon")),
    {"name": "adamw", "in_backward": True},
)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_rule_decays_the_same_parameters(rule: dict[str, Any]) -> None:
    for family in ("gpt", "custom"):
        before, after = step_without_gradient(family, "", OptimizerConfig(lr=LR, weight_decay=DECAY, **rule))
        decay = expected_decay(family, list(before))
        changed = {key for key in decay if not torch.equal(before[key], after[key])}
        assert changed == {key for key in decay if decay[key]}, rule


LAYOUTS = [("gpt", "dp=2,zero=3"), ("gpt tied", "pp=2"), ("deepseek", "tp=2"), ("mixtral", "dp=2,ep=2,zero=1")]


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_ranks_decay_the_same_parameters(pool: RankPool, name: str, layout: str) -> None:
    rule = OptimizerConfig(lr=LR, weight_decay=DECAY)
    for before, after in pool.run(step_without_gradient, Layout.parse(layout).world, name, layout, rule):
        decay = expected_decay(name, list(before))
        check_decay(before, after, {key: LR * decay[key] for key in decay})


# -- groups -----------------------------------------------------------------------------------------------------------

GROUPS = (
    "*:lr=0.5",
    "*norm*:weight_decay=0.125",
    "embed*:lr=0.25,weight_decay=0",
    "blocks.1.*:lr=2",
    "blocks.*.experts.*:weight_decay=0.5",
    "blocks.?.mlp.gate.*:lr=0",
)
GROUP_TABLE: Mapping[str, tuple[float, float]] = {
    # parameter: (times the learning rate, weight decay)
    "embed.weight": (0.25, 0.0),
    "head.weight": (0.5, DECAY),
    "norm.weight": (0.5, 0.125),
    "blocks.0.norm1.weight": (0.5, 0.125),
    "blocks.0.norm2.weight": (0.5, 0.125),
    "blocks.0.attn.q.weight": (0.5, DECAY),
    "blocks.0.attn.k.weight": (0.5, DECAY),
    "blocks.0.attn.v.weight": (0.5, DECAY),
    "blocks.0.attn.o.weight": (0.5, DECAY),
    "blocks.0.attn.q.bias": (0.5, 0.0),
    "blocks.0.attn.k.bias": (0.5, 0.0),
    "blocks.0.attn.v.bias": (0.5, 0.0),
    "blocks.0.mlp.gate.weight": (0.0, DECAY),
    "blocks.0.mlp.experts.up": (0.5, 0.5),
    "blocks.0.mlp.experts.down": (0.5, 0.5),
    "blocks.1.norm1.weight": (2.0, 0.125),
    "blocks.1.norm2.weight": (2.0, 0.125),
    "blocks.1.attn.q.weight": (2.0, DECAY),
    "blocks.1.attn.k.weight": (2.0, DECAY),
    "blocks.1.attn.v.weight": (2.0, DECAY),
    "blocks.1.attn.o.weight": (2.0, DECAY),
    "blocks.1.attn.q.bias": (2.0, 0.0),
    "blocks.1.attn.k.bias": (2.0, 0.0),
    "blocks.1.attn.v.bias": (2.0, 0.0),
    "blocks.1.mlp.gate.weight": (0.0, DECAY),
    "blocks.1.mlp.experts.up": (2.0, 0.5),
    "blocks.1.mlp.experts.down": (2.0, 0.5),
}
GROUPED = tiny(moe=_moe("mixtral"), qkv_bias=True)


def step_with_groups(layout: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Weights before, gradients by torch alone, and weights after one step of SGD with groups."""
    rule = OptimizerConfig(name="sgd", lr=LR, weight_decay=DECAY, groups=GROUPS)
    model, plain = (models.build(GROUPED, dtype=torch.float64).train() for _ in range(2))
    inputs = batch_of(GROUPED, 4, 8)
    total, count = plain(**inputs)
    (total / count).backward()
    before = {key: p.detach().clone() for key, p in plain.named_parameters()}
    gradients = {key: p.grad for key, p in plain.named_parameters() if p.grad is not None}
    engine = Engine(model, layout, rule, options=float64())
    engine.step(inputs)
    return before, gradients, whole(engine.parallel, "master")


def check_groups(before: dict[str, Tensor], gradients: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    assert before.keys() == GROUP_TABLE.keys() == after.keys()
    for key, (factor, decay) in GROUP_TABLE.items():
        expected = before[key] - LR * factor * (gradients[key] + decay * before[key])
        assert torch.allclose(after[key], expected, rtol=1e-12, atol=1e-14), key
        assert torch.equal(after[key], before[key]) == (factor == 0), key


def test_groups_set_learning_rate_and_decay_as_the_table_says() -> None:
    check_groups(*step_with_groups(""))


def test_groups_on_ranks(pool: RankPool) -> None:
    for outcome in pool.run(step_with_groups, 2, "dp=2,zero=3"):
        check_groups(*outcome)
