"""ZeRO as policies: which modules form units, what each stage moves and holds, in numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from torch import nn

from echelon import models
from echelon.layout import Layout
from echelon.layout.collective import count_collectives
from echelon.layout.placement import LogicalParam, ParamGroupSpec
from echelon.models import model_config
from echelon.models.layer_lists import layer_names
from echelon.parallel.dp import cost as dp_cost
from echelon.parallel.dp import param_grouping, zero

LLAMA = model_config.find_model("llama-tiny")


def linear(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


class Nested(nn.Module):
    """A list inside each element of a list, and a small and a large module beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.stages = nn.ModuleList(nn.ModuleDict({"parts": linear(8, 16, 8)}) for _ in range(2))
        self.towers = nn.ModuleList(linear(8, 16, 8) for _ in range(2))
        self.norm = nn.LayerNorm(8)


def test_the_layers_of_a_transformer_are_its_blocks() -> None:
    model = models.build(LLAMA, "meta")
    assert layer_names(model) == tuple(f"blocks.{i}" for i in range(4))


def test_a_module_of_half_a_layer_is_a_param_group() -> None:
    narrow = models.build(replace(LLAMA, vocab=257), "meta")
    wide = models.build(replace(LLAMA, vocab=4096), "meta")
    assert "embed" not in param_grouping.choose_param_groups(narrow)
    assert tuple(param_grouping.choose_param_groups(wide)) == ("embed", *(f"blocks.{i}" for i in range(4)), "head")


def test_param_groups_are_never_nested() -> None:
    model = Nested()
    for units in (
        param_grouping.choose_param_groups(model),
        param_grouping.choose_param_groups(model, ["towers.*", "towers.0.1", "embed"]),
    ):
        assert not [a for a in units for b in units if a != b and a.startswith(b + ".")]
    assert tuple(param_grouping.choose_param_groups(model, ["towers.*"])) == ("towers.0", "towers.1")


def test_a_model_without_layers_groups_its_children() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.act = nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU()

    assert tuple(param_grouping.choose_param_groups(Plain())) == ("one", "two")


def test_a_module_without_children_is_one_param_group() -> None:
    assert tuple(param_grouping.choose_param_groups(nn.Linear(3, 3))) == ()


def test_param_groups_follow_the_order_of_the_model() -> None:
    model = models.build(LLAMA, "meta")
    assert tuple(param_grouping.choose_param_groups(model, ["head", "blocks.2", "blocks.0*"])) == (
        "blocks.0",
        "blocks.2",
        "head",
    )


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"no module matches the unit pattern \(block\.\*, tail\); the model has embed"
    ):
        param_grouping.choose_param_groups(models.build(LLAMA, "meta"), ["block.*", "tail", "head"])


def test_a_list_of_modules_is_refused_as_a_param_group() -> None:
    """It has no forward, so nothing would ever gather its parameters."""
    with pytest.raises(ValueError, match=r"a list of modules is never called.*\(blocks\); use blocks\.\*"):
        param_grouping.choose_param_groups(models.build(LLAMA, "meta"), ["blocks"])


@pytest.mark.parametrize(
    ("layout", "shards", "replicas", "scatter", "free"),
    [
        ("dp=4", 1, 4, False, False),
        ("dp=4,zero=1", 4, 1, False, False),
        ("dp=4,zero=2", 4, 1, True, False),
        ("dp=4,zero=3", 4, 1, True, True),
        ("dp=4,shard=2", 2, 2, True, True),
        ("dp=4,shard=2,zero=1", 2, 2, False, False),
        ("dp=1,zero=3", 1, 1, False, False),
        ("dp=2,shard=1,zero=3", 1, 2, False, False),
    ],
)
def test_each_stage_is_a_policy(layout: str, shards: int, replicas: int, scatter: bool, free: bool) -> None:
    policy = zero.sharding_policy(Layout.parse(layout))
    assert (policy.num_shards, policy.num_replicas) == (shards, replicas)
    assert (policy.reduce_scatter_every_microbatch, policy.reshards_params) == (scatter, free)


def units(shards: int) -> tuple[ParamGroupSpec, ...]:
    """A root of 10 elements and three layers of 7."""

    def unit(name: str, *numbers: int) -> ParamGroupSpec:
        entries = [LogicalParam(name=f"{name}{i}", names=(f"{name}{i}",), shape=(n,)) for i, n in enumerate(numbers)]
        return ParamGroupSpec(name=name, params=tuple(entries), num_shards=shards, stays_unsharded=not name)

    return unit("", 6, 4), unit("a", 4, 3), unit("b", 4, 3), unit("c", 7)


EXPECTED = {
    # (kind, axis, bytes): times in a step of 2 microbatches; values of 2 bytes, gradients of 4
    "dp=2": {("all_reduce", "replica", 40): 1, ("all_reduce", "replica", 28): 3},
    "dp=2,zero=1": {
        ("all_gather", "shard", 20): 1,
        ("all_gather", "shard", 16): 3,
        ("reduce_scatter", "shard", 40): 1,
        ("reduce_scatter", "shard", 32): 3,
    },
    "dp=2,zero=2": {
        ("all_gather", "shard", 20): 1,
        ("all_gather", "shard", 16): 3,
        ("reduce_scatter", "shard", 40): 2,
        ("reduce_scatter", "shard", 32): 6,
    },
    # The root and the last layer are gathered once a microbatch, the other two for forward and for backward.
    "dp=2,zero=3": {
        ("all_gather", "shard", 20): 2,
        ("all_gather", "shard", 16): 2 * (2 + 2 + 1),
        ("reduce_scatter", "shard", 40): 2,
        ("reduce_scatter", "shard", 32): 6,
    },
    "dp=4,shard=2,zero=1": {
        ("all_gather", "shard", 20): 1,
        ("all_gather", "shard", 16): 3,
        ("reduce_scatter", "shard", 40): 1,
        ("reduce_scatter", "shard", 32): 3,
        ("all_reduce", "replica", 20): 1,
        ("all_reduce", "replica", 16): 3,
    },
    "dp=1": {},
}


@pytest.mark.parametrize("layout", EXPECTED)
def test_collectives_of_a_step(layout: str) -> None:
    policy = zero.sharding_policy(Layout.parse(layout))
    found = dp_cost.collectives(units(policy.num_shards), policy, accumulate=2, compute_bytes=2, reduce_bytes=4)
    assert count_collectives(found) == EXPECTED[layout]


def test_a_recomputed_layer_is_gathered_once_more_in_every_microbatch() -> None:
    """Forward, recomputation, backward; the last layer stays from one to the other, recomputed or not."""
    policy = zero.sharding_policy(Layout.parse("dp=2,zero=3"))
    recomputed = [unit.name for unit in units(2)]
    issued = dp_cost.collectives(units(2), policy, accumulate=4, compute_bytes=2, reduce_bytes=4, recomputed=recomputed)
    assert count_collectives(issued)["all_gather", "shard", 16] == 4 * (3 + 3 + 1)


def test_without_resharding_a_microbatch_gathers_once() -> None:
    policy = zero.sharding_policy(Layout.parse("dp=2,zero=3"), reshard_after_forward=False)
    found = count_collectives(dp_cost.collectives(units(2), policy, accumulate=2, compute_bytes=2, reduce_bytes=4))
    assert (found["all_gather", "shard", 20], found["all_gather", "shard", 16]) == (2, 6)


@pytest.mark.parametrize(
    ("layout", "found"), [("dp=2", {20: 2 * 2, 14: 2 * 3}), ("dp=4,shard=2", {10: 2 * 2, 8: 2 * 3})]
)
def test_replicas_reduce_paged_groups_after_every_stage_of_a_microbatch(layout: str, found: dict[int, int]) -> None:
    """Two stages of the rank use the root group, as with a tied embedding: its gradients leave after each of them."""
    policy = zero.sharding_policy(Layout.parse(layout))
    uses = {"": 2, "a": 1, "b": 1, "c": 1}
    issued = dp_cost.collectives(
        units(policy.num_shards), policy, accumulate=2, compute_bytes=2, reduce_bytes=2, stage_uses=uses, paged=uses
    )
    counts = count_collectives(issued)
    assert {size: count for (op, _, size), count in counts.items() if op == "all_reduce"} == found


BYTES = {
    # 31 elements, 34 when padded to two shards, 17 a shard; two moments of 4 bytes
    "dp=1": {"parameters": 62, "master": 62, "gradients": 62, "optimizer": 248},
    "dp=1,accumulate=2": {"parameters": 62, "master": 62, "gradients": 124, "optimizer": 248},
    "dp=2": {"parameters": 62, "master": 62, "gradients": 124, "optimizer": 248},
    "dp=2,zero=1": {"parameters": 68, "master": 34, "gradients": 136, "optimizer": 136},
    "dp=2,zero=2": {"parameters": 68, "master": 34, "gradients": 68, "optimizer": 136},
    "dp=2,zero=3": {"parameters": 0, "master": 68, "gradients": 68, "optimizer": 136},
}


@pytest.mark.parametrize("layout", BYTES)
def test_bytes_held_between_steps(layout: str) -> None:
    policy = zero.sharding_policy(Layout.parse(layout))
    held = dp_cost.state_bytes(units(policy.num_shards), policy, compute_bytes=2, master_bytes=4, moments=2)
    assert held == {**BYTES[layout], "versions": 0}


def test_master_weights_of_the_compute_dtype_need_no_copy() -> None:
    policy = zero.sharding_policy(Layout.parse("dp=2,zero=1"))
    held = dp_cost.state_bytes(units(2), policy, compute_bytes=4, master_bytes=4, moments=0)
    assert held == {"parameters": 136, "master": 0, "gradients": 136, "optimizer": 0, "versions": 0}


@pytest.mark.parametrize(
    ("layout", "frozen_shards", "bytes_held", "collectives"),
    [
        ("dp=2", 1, {"parameters": 60, "master": 40, "gradients": 80, "optimizer": 160}, {("all_reduce", 80): 1}),
        ("dp=2,zero=1", 1, {"parameters": 60, "master": 20, "gradients": 80, "optimizer": 80}, None),
        ("dp=2,zero=3", 2, {"parameters": 0, "master": 40 + 10, "gradients": 40, "optimizer": 80}, None),
    ],
)
def test_frozen_params_have_neither_gradients_nor_states(
    layout: str, frozen_shards: int, bytes_held: dict[str, int], collectives: dict[tuple[str, int], int] | None
) -> None:
    """20 trainable elements and 10 frozen ones; in bfloat16, with float32 masters and gradients."""
    policy = zero.sharding_policy(Layout.parse(layout))
    entries = [LogicalParam(name=n, names=(n,), shape=(s,), trainable=n == "a") for n, s in (("a", 20), ("w", 10))]
    groups = (
        ParamGroupSpec(name="0", params=(entries[0],), num_shards=policy.num_shards),
        ParamGroupSpec(name="0 (frozen)", params=(entries[1],), num_shards=frozen_shards),
    )
    held = dp_cost.state_bytes(groups, policy, compute_bytes=2, master_bytes=4, moments=2)
    assert {key: held[key] for key in bytes_held} == bytes_held
    sent = list(dp_cost.collectives(groups, policy, accumulate=1, compute_bytes=2, reduce_bytes=4))
    assert sum(item.op != "all_gather" for item in sent) == 1, "the trainable group's gradients alone are reduced"
    if collectives is not None:
        assert {(item.op, item.bytes): item.count for item in sent} == collectives
