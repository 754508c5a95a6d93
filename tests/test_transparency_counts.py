"""What a strategy says it costs is what it does: collectives and bytes to the last one, memory within one per cent."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from collective_cost_check import SEQ_LEN, check
from torch.utils._python_dispatch import TorchDispatchMode

from echelon import models
from echelon.config.sections import OptimizerConfig
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.models import model_config
from echelon.models.attention_config import MLAConfig
from echelon.models.model_config import ModelConfig
from echelon.parallel.dp import cost as dp_cost
from echelon.pipeline.async_.async_runtime import AsyncRuntime
from echelon.training.engine import Engine, ParallelOptions
from echelon.verification.verify_case import VerifyCase

SMALL = {"layers": 3, "width": 32, "ffn": 48, "max_seq_len": 64}
GPT = replace(model_config.find_model("gpt-tiny"), **SMALL)
LLAMA = replace(model_config.find_model("llama-tiny"), **SMALL)
CONV = model_config.find_model("conv-tiny")

# -- collectives ------------------------------------------------------------------------------------------------------


DP = ("dp=2", "dp=3,accumulate=4", "dp=1", "dp=1,accumulate=2,recompute=full")
ZERO = tuple(f"dp={dp},zero={zero},accumulate={k}" for zero in (1, 2, 3) for dp, k in ((2, 1), (3, 4)))
HSDP = ("dp=4,shard=2", "dp=4,shard=2,zero=1,accumulate=4", "dp=4,shard=2,zero=2,accumulate=2")
RECOMPUTED = ("dp=2,zero=3,recompute=full,accumulate=2",)


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=lambda model: model.name)
@pytest.mark.parametrize("layout", [*DP, *ZERO, *HSDP, *RECOMPUTED])
def test_data_parallel_layouts_issue_the_counted_collectives(pool: RankPool, model: ModelConfig, layout: str) -> None:
    check(pool, model, layout)


SHAPES = (GPT, LLAMA)
TENSOR = tuple(
    f"tp={tp},sp={sp},recompute={recompute},microbatch=2,accumulate={k}"
    for tp, sp, recompute, k in (
        (2, 0, "none", 1),
        (2, 0, "full", 2),
        (2, 1, "none", 2),
        (2, 1, "full", 1),
        (4, 0, "full", 1),
        (4, 1, "none", 1),
        (4, 1, "full", 2),
    )
)


@pytest.mark.parametrize(
    ("layout", "model", "dropout"),
    [(layout, model, [0.0, 0.1][(i + j) % 2]) for i, layout in enumerate(TENSOR) for j, model in enumerate(SHAPES)],
    ids=lambda value: value.name if isinstance(value, ModelConfig) else str(value),
)
def test_tensor_parallel_layouts_issue_the_counted_collectives(
    pool: RankPool, model: ModelConfig, layout: str, dropout: float
) -> None:
    check(pool, replace(model, dropout=dropout), layout)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_both_together_issue_the_counted_collectives(pool: RankPool, zero: int, recompute: str) -> None:
    check(pool, replace(LLAMA, dropout=0.1), f"dp=2,tp=2,zero={zero},recompute={recompute},accumulate=2")


PIPELINES = (
    "pp=3,accumulate=2",
    "pp=2,schedule=zb-h1,accumulate=3,recompute=full",
    "dp=2,pp=2,accumulate=2,zero=0",
    "dp=2,pp=2,accumulate=2,zero=2,schedule=gpipe",
    "dp=2,pp=2,accumulate=2,zero=3,recompute=full",
    "dp=2,pp=2,accumulate=2,zero=3,schedule=zb-h1",
    "tp=2,pp=2,accumulate=2",
    "tp=2,sp=0,pp=2,accumulate=2,schedule=naive",
    "dp=2,tp=2,pp=2,accumulate=2",
    "dp=2,pp=2,accumulate=2,zero=3,schedule=terapipe",
    "tp=2,pp=2,accumulate=2,schedule=terapipe",
)
TWO_CHUNKS = (
    "pp=2,schedule=interleaved,accumulate=2",
    "dp=2,pp=2,schedule=zb-v,accumulate=3,zero=3",
    "dp=2,pp=2,schedule=dualpipe-v,accumulate=3,zero=2",
)


@pytest.mark.parametrize("layout", [*PIPELINES, *TWO_CHUNKS])
def test_pipelines_issue_the_counted_collectives(pool: RankPool, layout: str) -> None:
    model = GPT if "recompute" in layout or "zb-v" in layout else replace(LLAMA, tied=True)
    check(pool, replace(model, layers=4), layout)


CONTEXT = (
    "cp=2,recompute=full,microbatch=2",
    "cp=3,accumulate=2",
    "cp=3,cp_kind=gather,accumulate=2",
    "cp=2,cp_kind=gather,recompute=full",
    "cp=4,cp_kind=ulysses",
    "cp=4,cp_kind=ring-ulysses,ulysses=2,recompute=full",
    "tp=2,cp=2",
    "dp=2,cp=2,zero=3,accumulate=2",
    "dp=2,cp=2",
    "dp=4,shard=2,cp=2",
    "pp=2,cp=2,accumulate=2",
    "tp=4,tp_kind=2d,cp=2,microbatch=2",
)


@pytest.mark.parametrize("layout", CONTEXT)
def test_context_parallel_layouts_issue_the_counted_collectives(pool: RankPool, layout: str) -> None:
    check(pool, LLAMA if "cp=2" in layout else replace(GPT, dropout=0.1), layout)


@pytest.mark.parametrize("layout", ["cp=3", "cp=3,cp_kind=gather", "cp=4,cp_kind=ring-ulysses,ulysses=2"])
def test_full_attention_issues_the_counted_collectives(pool: RankPool, layout: str) -> None:
    check(pool, replace(LLAMA, causal=False), layout)


LATENT = replace(model_config.find_model("deepseek-tiny"), **{**SMALL, "layers": 2}, moe=None)
DIRECT = replace(LATENT, mla=MLAConfig(kv_rank=10, rope_dim=4, nope_dim=6, value_dim=8))
"""queries are made of the hidden vector itself"""
NARROW = (
    (LATENT, "tp=2,microbatch=2,accumulate=2"),
    (LATENT, "tp=2,sp=0,recompute=full"),
    (DIRECT, "tp=2,recompute=full"),
    (DIRECT, "tp=4,sp=0"),
    (LATENT, "cp=3"),
    (LATENT, "cp=2,cp_kind=gather,recompute=full"),
    (DIRECT, "cp=4,cp_kind=ulysses"),
    (LATENT, "tp=2,cp=4,cp_kind=ring-ulysses,ulysses=2"),
    (DIRECT, "dp=2,tp=2,pp=2,accumulate=2,zero=3"),
)


@pytest.mark.parametrize(("model", "layout"), NARROW, ids=lambda value: value if isinstance(value, str) else "")
def test_latent_attention_issues_the_counted_collectives(pool: RankPool, model: ModelConfig, layout: str) -> None:
    """Narrow vectors enter its region; keys are wider than values, which are padded to them where both travel."""
    check(pool, model, layout)


def test_heads_wider_than_their_share_of_the_model_issue_the_counted_collectives(pool: RankPool) -> None:
    check(pool, replace(LLAMA, explicit_head_dim=12), "tp=2,cp=2,cp_kind=ulysses")


SQUARE, CUBE = "tp=4,tp_kind=2d", "tp=8,tp_kind=3d"
GRIDS = (
    f"{SQUARE},microbatch=3,accumulate=2",
    f"{SQUARE},microbatch=2,recompute=full",
    "tp=8,tp_kind=2.5d,depth=2,microbatch=5",
    f"{CUBE},microbatch=5,recompute=full",
    f"dp=2,{SQUARE},zero=3,microbatch=2,accumulate=2",
    f"pp=2,{SQUARE},microbatch=3,accumulate=2",
)


@pytest.mark.parametrize("layout", GRIDS)
def test_grids_issue_the_counted_collectives(pool: RankPool, layout: str) -> None:
    """Sizes that a side does not divide, and for every second layout key-value heads fewer than it."""
    model = replace(LLAMA, width=28, heads=2, kv_heads=1, tied=True) if GRIDS.index(layout) % 2 else GPT
    check(pool, replace(model, layers=2, ffn=45, dropout=0.1), layout)


ASYNCHRONOUS = (
    "pp=3,schedule=pipedream,accumulate=3",
    "dp=2,pp=2,schedule=pipedream-vsync,accumulate=3,zero=0",
    "dp=2,pp=2,schedule=pipedream,accumulate=3,zero=1",
    "dp=2,pp=2,schedule=2bw,accumulate=3,zero=1",
    "tp=2,pp=2,schedule=2bw,accumulate=3",
    "tp=2,pp=2,schedule=pipedream,accumulate=3,recompute=full",
)


@pytest.mark.parametrize("layout", ASYNCHRONOUS)
def test_asynchronous_pipelines_issue_the_counted_collectives(pool: RankPool, layout: str) -> None:
    """A step in the middle of the stream: the pipeline is full before it and after it."""
    check(pool, replace(LLAMA, tied=False, layers=4), layout)


def test_gradients_of_replicated_kv_heads_are_summed_once_a_step(pool: RankPool) -> None:
    found = check(pool, LLAMA, "dp=2,tp=4,zero=2,accumulate=2")
    pairs = [sum(n for (kind, group, _), n in each.issued.items() if len(group) == 2) for each in found]
    assert all(pairs)


@pytest.mark.parametrize("layout", ["dp=2,accumulate=2", "dp=3,zero=1", "dp=2,zero=3,accumulate=2"])
def test_batch_statistics_issue_the_counted_collectives(pool: RankPool, layout: str) -> None:
    check(pool, CONV, layout + ",microbatch=2")


@pytest.mark.parametrize("prefetch", [0, 2])
def test_without_resharding_parameters_are_gathered_once_a_microbatch(pool: RankPool, prefetch: int) -> None:
    check(pool, LLAMA, "dp=2,zero=3,accumulate=2", reshard_after_forward=False, prefetch=prefetch)


@pytest.mark.parametrize("layout", ["dp=2,zero=3,tp=2", "dp=2"])
def test_bytes_follow_the_type_of_elements(pool: RankPool, layout: str) -> None:
    single = check(pool, LLAMA, layout)[0].issued
    double = check(pool, LLAMA, layout, compute_dtype=torch.float64, master_dtype=torch.float64)[0].issued
    scalars = (8, 16)  # loss, count and norm are float64 always
    assert sorted(size for _, _, size in double if size not in scalars) == sorted(
        2 * size for _, _, size in single if size not in scalars
    )


# -- memory -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    measured: dict[str, int]
    claimed: dict[str, int]
    found_by_gc: int
    """bytes of all storages that came to life with the engine, whoever holds them"""
    parameters: int
    """unique parameters of the whole model"""


def hold(model: ModelConfig, text: str, rule: OptimizerConfig, run: bool, compute: torch.dtype) -> Held:
    """On a rank: the bytes that lie there between steps."""
    layout = Layout.parse(text)
    before = {pointer for pointer, _ in _storages()}
    engine = Engine(models.build(model, "meta"), layout, rule, options=ParallelOptions(compute_dtype=compute))
    if run:
        engine.step(VerifyCase(model=model, seq_len=SEQ_LEN).batch(0, layout.batch))
    else:  # a type that not every CPU multiplies: only the optimizer's states are made
        engine.optimizer.step(rule.lr, torch.tensor(1.0, dtype=torch.float64), torch.tensor(True))
        engine.parallel.sharded_model.after_update()
    policy, units = engine.parallel.policy, engine.parallel.sharded_model.param_groups
    full = {
        (u.unsharded_param.untyped_storage().data_ptr(), u.unsharded_param.untyped_storage().nbytes()) for u in units
    }
    held = [tensor for u in units for tensor in u.master.tensors()]
    masters = {(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in held}
    tensors = [t for u in units for t in (u.grad, u.grads.tensor) if t is not None]
    gradients = {(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors}
    measured = {
        "parameters": sum(size for _, size in full),
        "master": sum(size for _, size in masters - full),
        "gradients": sum(size for _, size in gradients),
        "optimizer": sum(t.untyped_storage().nbytes() for t in engine.optimizer.states()),
        "versions": 0,
    }
    claimed = dp_cost.state_bytes(
        [unit.spec for unit in units],
        policy,
        compute_bytes=compute.itemsize,
        master_bytes=torch.float32.itemsize,
        moments={"adamw": 2, "sgd": 1 if rule.momentum else 0}[rule.name],
    )
    new = sum(size for pointer, size in set(_storages()) if pointer not in before)
    return Held(measured, claimed, new, model.parameters)


def _storages() -> list[tuple[int, int]]:
    gc.collect()
    found = [value for value in gc.get_objects() if isinstance(value, torch.Tensor) and not value.is_meta]
    return [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in found]


ADAMW, SGD, PLAIN_SGD = OptimizerConfig(), OptimizerConfig(name="sgd", momentum=0.9), OptimizerConfig(name="sgd")
RULES = {"adamw": ADAMW, "sgd with momentum": SGD, "sgd": PLAIN_SGD}
MEMORY = (
    *(f"dp=3,zero={zero}" for zero in range(4)),
    *(f"dp=4,shard=2,zero={zero}" for zero in (1, 2, 3)),
    "tp=2",
    *(f"dp=2,tp=2,zero={zero},accumulate=2" for zero in (1, 3)),
)


@pytest.mark.parametrize(
    ("layout", "compute"),
    [*((layout, torch.bfloat16) for layout in MEMORY), ("dp=3,zero=1", torch.float32), ("dp=3,zero=3", torch.float32)],
)
def test_states_take_the_predicted_bytes(pool: RankPool, layout: str, compute: torch.dtype) -> None:
    _check_memory(pool, layout, ADAMW, compute)


@pytest.mark.parametrize("rule", RULES)
def test_moments_are_those_of_the_rule(pool: RankPool, rule: str) -> None:
    held = _check_memory(pool, "dp=2,zero=1", RULES[rule], torch.float32)
    assert bool(held[0].measured["optimizer"]) == (rule != "sgd")


def _check_memory(pool: RankPool, layout: str, rule: OptimizerConfig, compute: torch.dtype) -> list[Held]:
    world = Layout.parse(layout).world
    held = pool.run(hold, world, LLAMA, layout, rule, compute == torch.float32, compute)
    for each in held:
        for category, claimed in each.claimed.items():
            assert each.measured[category] == pytest.approx(claimed, rel=0.01), category
        # Nothing else of any size is kept: no gathered copy, no `.grad`, no buffer of a collective.
        assert each.found_by_gc == pytest.approx(sum(each.claimed.values()), rel=0.01)
    return held


def hold_versions(model: ModelConfig, text: str) -> tuple[int, int]:
    """On a rank, in the middle of a stream: bytes of the old versions that are kept, and what the cost says."""
    layout = Layout.parse(text)
    engine = Engine(models.build(model, "meta"), layout, ADAMW)
    for step in range(2 + -(-2 * layout.pp // layout.accumulate)):  # a version of every microbatch in flight
        engine.step(VerifyCase(model=model, seq_len=SEQ_LEN).batch(step, layout.batch))
    assert engine.pipeline is not None
    runtime = engine.pipeline.runtime
    assert isinstance(runtime, AsyncRuntime)
    kept = [next(iter(unit.values())) for version in runtime.weight_versions.stashed.values() for unit in version]
    now = {unit.unsharded_param.untyped_storage().data_ptr() for unit in engine.parallel.sharded_model.param_groups}
    old = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    claimed = dp_cost.state_bytes(
        [unit.spec for unit in engine.parallel.sharded_model.param_groups],
        engine.parallel.policy,
        compute_bytes=4,
        master_bytes=4,
        moments=2,
        num_versions=engine.pipeline.num_weight_versions,
    )
    return sum(size for pointer, size in old.items() if pointer not in now), claimed["versions"]


@pytest.mark.parametrize(("pp", "accumulate"), [(3, 4), (8, 1)])
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-vsync", "2bw"])
def test_weight_versions_take_the_predicted_bytes(pool: RankPool, schedule: str, pp: int, accumulate: int) -> None:
    model, layout = replace(LLAMA, tied=False, layers=pp), f"pp={pp},accumulate={accumulate},schedule={schedule}"
    found = pool.run(hold_versions, pp, model, layout)
    assert all(measured == claimed for measured, claimed in found), found
    assert found[0][1] > 0


def test_states_take_the_bytes_of_the_zero_formulas(pool: RankPool) -> None:
    """bf16 weights, fp32 gradients (g = 4), fp32 master and Adam states, P parameters on N ranks.

    Others keep a whole fp32 master beside the weights, and count 2 bytes more: here 2 of its 4 are the weights.
    """
    n, g = 4, 4
    expected = {
        0: lambda p: (12 + g) * p,
        1: lambda p: (2 + g) * p + 10 * p / n,
        2: lambda p: 2 * p + (10 + g) * p / n,
        3: lambda p: (12 + g) * p / n,
    }
    for zero, formula in expected.items():
        for each in pool.run(hold, n, LLAMA, f"dp={n},zero={zero}", ADAMW, False, torch.bfloat16):
            assert sum(each.claimed.values()) == pytest.approx(formula(each.parameters), rel=0.01), f"zero={zero}"
            assert sum(each.measured.values()) == pytest.approx(formula(each.parameters), rel=0.01), f"zero={zero}"


# -- zero 3 frees what it does not use --------------------------------------------------------------------------------


class WatchUnits(TorchDispatchMode):
    """Looks at every operator which units are whole."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.units = engine.parallel.sharded_model.param_groups
        self.most: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        whole = {unit.spec.name for unit in self.units if unit.unsharded_param.untyped_storage().nbytes()}
        if len(whole) > len(self.most):
            self.most = whole
        return func(*args, **(kwargs or {}))


def watch(model: ModelConfig, text: str, **choices: Any) -> tuple[set[str], list[int]]:
    """On a rank: the largest set of units that were whole at once, and the bytes left whole after each step."""
    layout = Layout.parse(text)
    engine = Engine(models.build(model, "meta"), layout, options=ParallelOptions(**choices))
    case, after = VerifyCase(model=model, seq_len=SEQ_LEN), []
    with WatchUnits(engine) as watched:
        for step in range(2):
            engine.step(case.batch(step, layout.batch))
            after.append(
                sum(
                    unit.unsharded_param.untyped_storage().nbytes()
                    for unit in engine.parallel.sharded_model.param_groups
                )
            )
    return watched.most, after


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_zero_3_holds_one_block_and_the_prefetched_groups(pool: RankPool, prefetch: int, recompute: str) -> None:
    deep = replace(LLAMA, layers=6)
    layout = f"dp=2,zero=3,accumulate=2,recompute={recompute}"
    for most, after in pool.run(watch, 2, deep, layout, prefetch=prefetch):
        assert after == [0, 0]
        kept = most & {"", "embed", "head"}
        assert len(kept) == 3
        assert len(most - kept) == 1 + prefetch, most


def test_without_resharding_all_groups_stay_unsharded_until_backward(pool: RankPool) -> None:
    for most, after in pool.run(watch, 2, LLAMA, "dp=2,zero=3", reshard_after_forward=False):
        assert after == [0, 0]
        assert most == {"", "embed", "blocks.0", "blocks.1", "blocks.2", "head"}
