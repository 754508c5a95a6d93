"""Every layout of experts equals one device: folded over dp, cp and tp, with balance losses, capacity and imbalance."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from collective_cost_check import check_together
from torch import Tensor, nn

from echelon import models
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.models import model_config
from echelon.models.model_config import ModelConfig
from echelon.models.moe_config import MoEConfig
from echelon.moe.gates.gate import Gate
from echelon.verification.verifier import Verifier, verify
from echelon.verification.verify_case import VerifyCase

SMALL = {"layers": 2, "width": 32, "ffn": 48, "max_seq_len": 64}
MIXTRAL = replace(model_config.find_model("moe-tiny"), **SMALL, moe=MoEConfig(experts=8, k=2, ffn=24, gate="mixtral"))
SWITCH = replace(
    model_config.find_model("switch-tiny"),
    **SMALL,
    dropout=0.1,
    moe=MoEConfig(experts=4, k=1, ffn=24, gate="switch", activation="relu", every=2),
)
"""drops what finds no room, and has a layer without experts: the first stage of two has none"""
SHARED = replace(
    model_config.find_model("qwen-moe-tiny"), **SMALL, moe=MoEConfig(experts=8, k=3, ffn=16, gate="qwen", shared_ffn=24)
)

LAYOUTS = (
    "dp=2,ep=2",
    "dp=4,ep=4",
    "dp=4,ep=2,etp=2",
    "dp=2,tp=2,ep=2",
    "dp=2,tp=2,ep=4",
    *(f"dp=4,ep=2,zero={zero},accumulate=2" for zero in (1, 2, 3)),
    "dp=2,ep=2,zero=3,recompute=full",
    "dp=2,pp=2,ep=2,accumulate=2",
    "cp=2,ep=2",
    "dp=2,cp=2,cp_kind=ulysses,ep=4,zero=1",
    "tp=2,cp=2,ep=4,recompute=full",
    "tp=2",
    "cp=3,cp_kind=gather",
    "tp=2,pp=2,ep=2,schedule=zb-v,vpp=2,accumulate=2",
    "cp=2,pp=2,ep=2,accumulate=2",
    "dp=2,pp=2,ep=2,zero=0,accumulate=2",
    "dp=4,shard=2,ep=2,etp=2",
    "dp=8,shard=4,ep=2,accumulate=2",
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", [MIXTRAL, SWITCH, SHARED], ids=lambda model: model.name)
def test_experts_equal_one_device(pool: RankPool, model: ModelConfig, layout: str) -> None:
    model = replace(model, layers=4) if "zb-v" in layout else model
    verdict = Verifier(pool, VerifyCase(model=model, steps=2, seq_len=33)).verify_layout(Layout.parse(layout))
    assert verdict.passed, f"{verdict.first_difference} {verdict.trouble}"


DROPPING = replace(
    MIXTRAL,
    dropout=0.1,
    moe=MoEConfig(
        experts=8,
        k=3,
        ffn=16,
        shared_ffn=16,
        gate="deepseek-v3",
        options=(("num_groups", 4), ("group_limit", 2)),
        dropout=0.4,
    ),
)
"""dropout inside its experts, whose masks must not depend on where they are"""

OVER_NODES = (
    "dp=2,ep=2",
    "dp=4,ep=2,etp=2",
    "dp=4,ep=4,ep_inner=2",
    "dp=8,ep=4,etp=2,ep_inner=4,zero=3",
    "dp=4,tp=2,ep=4,ep_inner=2,zero=1",
    "cp=2,tp=2,ep=4,ep_inner=2,recompute=full",
    "dp=4,pp=2,ep=4,ep_inner=2,schedule=zb-v,vpp=2,accumulate=2",
)


@pytest.mark.parametrize("layout", OVER_NODES)
def test_dropout_with_hierarchical_all_to_all_equals_one_device(pool: RankPool, layout: str) -> None:
    model = replace(DROPPING, layers=4) if "zb-v" in layout else DROPPING
    verdict = Verifier(pool, VerifyCase(model=model, steps=2, seq_len=33)).verify_layout(Layout.parse(layout))
    assert verdict.passed, f"{verdict.first_difference} {verdict.trouble}"


def test_padded_expert_parts_drop_as_full_experts_do(pool: RankPool) -> None:
    """They did not: the second part of seven units began at the wrong one."""
    model = replace(MIXTRAL, moe=MoEConfig(experts=4, k=2, ffn=7, gate="mixtral", dropout=0.4))
    verdict = Verifier(pool, VerifyCase(model=model, steps=2, seq_len=17)).verify_layout(Layout.parse("dp=2,etp=2"))
    assert verdict.passed, f"{verdict.first_difference} {verdict.trouble}"


def test_a_node_that_receives_no_token(pool: RankPool) -> None:
    """It crashed: no row at all had no number of columns."""
    verdict = Verifier(pool, VerifyCase(model=SWITCH, steps=2, seq_len=3)).verify_layout(
        Layout.parse("tp=2,cp=2,cp_kind=gather,ep=4,ep_inner=2")
    )
    assert verdict.passed, f"{verdict.first_difference} {verdict.trouble}"


def test_one_replica_of_the_experts_dispatches_in_chunks_and_the_other_does_not(pool: RankPool) -> None:
    """It hung: rounds went by the experts' weights without calling them, so that only one copy gathered its shards."""
    report = verify("moe-tiny", "dp=2,tp=4,ep=4,zero=3,accumulate=2", pool=pool, steps=3)
    assert report.passed, [verdict.trouble or verdict.first_difference for verdict in report.verdicts]


@pytest.mark.parametrize("gate", ["noisy-top-k", "gshard", "expert-choice", "deepseek-v2", "hierarchical"])
@pytest.mark.filterwarnings("ignore:gate")
def test_every_kind_of_gate_decides_as_on_one_device(pool: RankPool, gate: str) -> None:
    """Noisy gates, a random second expert, expert choice: every rank decides on full sequences alike."""
    options = (("num_groups", 2), ("group_limit", 1)) if gate == "deepseek-v2" else ()
    k = 4 if gate == "hierarchical" else 2
    mixture = MoEConfig(experts=8, k=k, ffn=16, gate=gate, options=options)
    prover = Verifier(pool, VerifyCase(model=replace(MIXTRAL, causal=False, moe=mixture), steps=2, seq_len=33))
    for layout in ("dp=2,ep=2", "cp=2,ep=2", "tp=2,ep=2", "dp=2,cp=2,ep=4,ep_inner=2"):
        verdict = prover.verify_layout(Layout.parse(layout))
        assert verdict.passed, f"{layout}: {verdict.first_difference} {verdict.trouble}"


# -- one expert gets everything ---------------------------------------------------------------------------------------


def crowded() -> nn.Module:
    """Every token goes to the second expert; six others never see one."""
    mixture = MoEConfig(experts=8, k=1, ffn=16, gate="loss-free", dropout=0.2)
    model = models.build(replace(MIXTRAL, moe=mixture), dtype=torch.float64, seed=3)
    for module in model.modules():
        if isinstance(module, Gate):
            module.bias[1] = 1e6
    return model


def batch(rows: int, seed: int) -> dict[str, Tensor]:
    return VerifyCase(model=MIXTRAL, seq_len=33, seed=seed).batch(0, rows)


def test_an_expert_that_gets_everything_and_experts_that_get_nothing(pool: RankPool) -> None:
    """On four ranks one gets more than it has room for, and works it off in rounds."""
    layouts = "dp=2,ep=2; dp=8,ep=4,zero=3; dp=2,tp=2,ep=4,recompute=full; dp=4,ep=4,ep_inner=2; dp=4,ep=2,etp=2"
    report = verify(crowded, layouts, batch=batch, pool=pool, steps=2)
    assert report.passed, [verdict.trouble or verdict.first_difference for verdict in report.verdicts]


LEFT_OUT = [
    ("dp=2,ep=2", "ep*etp:all_to_all"),
    ("dp=4,ep=4,ep_inner=2", "ep*etp/2:all_to_all"),
    ("dp=4,ep=4,ep_inner=2", "ep*etp%2:all_to_all"),
    ("dp=4,ep=2", "edp:all_reduce"),
    ("dp=4,ep=2,zero=1", "edp:reduce_scatter"),
    ("dp=4,ep=2,zero=3", "edp:all_gather"),
    ("dp=4,shard=2,ep=2,etp=2", "ep*etp:all_to_all"),
    ("dp=8,shard=4,ep=2", "ereplica:all_reduce"),
    ("dp=8,shard=4,ep=2", "eshard:reduce_scatter"),
]


@pytest.mark.parametrize(("layout", "leave_out"), LEFT_OUT)
def test_verify_detects_a_dropped_transfer(pool: RankPool, layout: str, leave_out: str) -> None:
    verdict = Verifier(pool, VerifyCase(model=MIXTRAL, steps=2, seq_len=33), leave_out).verify_layout(
        Layout.parse(layout)
    )
    assert not verdict.passed


# -- what is sent -----------------------------------------------------------------------------------------------------

ONE = replace(MIXTRAL, moe=MoEConfig(experts=8, k=1, ffn=16, gate="loss-free", dropout=0.2))
"""a token goes to one node, whatever the gate decides"""
COUNTED = [
    (MIXTRAL, "dp=2,ep=2"),
    (SHARED, "dp=4,ep=2,etp=2,accumulate=2,zero=1"),
    (MIXTRAL, "dp=2,tp=2,ep=4,microbatch=2"),
    (SHARED, "cp=2,tp=2,ep=2,recompute=full"),
    (SHARED, "cp=2,cp_kind=gather"),
    (DROPPING, "dp=4,ep=4,zero=3,recompute=full"),
    (ONE, "dp=4,ep=4,ep_inner=2"),
    (ONE, "dp=2,cp=2,ep=4,ep_inner=2,recompute=full"),
    (ONE, "dp=4,tp=2,ep=4,etp=2,ep_inner=4,accumulate=2"),
    (MIXTRAL, "dp=2,pp=2,ep=2,accumulate=2"),
    (MIXTRAL, "dp=8,shard=4,ep=2,accumulate=2"),
    (MIXTRAL, "dp=8,shard=4,zero=1,ep=2,etp=2"),
]


@pytest.mark.parametrize(("model", "layout"), COUNTED)
def test_experts_issue_the_counted_collectives(pool: RankPool, model: ModelConfig, layout: str) -> None:
    check_together(pool, model, layout)


@pytest.mark.parametrize("gate", ["noisy-top-k", "hierarchical"])
def test_gates_issue_the_counted_collectives(pool: RankPool, gate: str) -> None:
    mixture = MoEConfig(experts=8, k=4 if gate == "hierarchical" else 2, ffn=16, gate=gate)
    check_together(pool, replace(MIXTRAL, moe=mixture), "cp=2,tp=2,ep=2,recompute=full")
