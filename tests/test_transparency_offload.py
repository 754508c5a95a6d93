"""What lives off the device changes nothing: every kind of offload, alone and with the layouts people use, in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
from collective_cost_check import check

from echelon.config.sections import OptimizerConfig
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.models import model_config
from echelon.verification.verifier import TOLERANCE, Verifier
from echelon.verification.verify_case import VerifyCase

SMALL = {"layers": 2, "width": 32, "ffn": 48, "max_seq_len": 64}
RULES = {"adamw": OptimizerConfig(lr=1e-2), "sgd": OptimizerConfig(name="sgd", lr=1e-1, momentum=0.9)}


@pytest.fixture(scope="module")
def provers(pool: RankPool) -> dict[str, Verifier]:
    cases = {
        "gpt": VerifyCase(
            model=replace(model_config.find_model("gpt-tiny"), dropout=0.1, **SMALL), optimizer=RULES["sgd"]
        ),
        "llama": VerifyCase(model=replace(model_config.find_model("llama-tiny"), **SMALL), optimizer=RULES["adamw"]),
    }
    deep = replace(cases["llama"].model, layers=4)
    cases["deep"] = replace(cases["llama"], model=replace(deep, dropout=0.1))
    cases["moe"] = VerifyCase(model=replace(model_config.find_model("moe-tiny"), layers=2), optimizer=RULES["adamw"])
    return {name: Verifier(pool, case) for name, case in cases.items()}


LAYOUTS = (
    ("llama", "dp=1,offload=optimizer"),
    ("gpt", "dp=1,accumulate=2,offload=optimizer"),
    ("gpt", "dp=2,offload=optimizer"),
    ("llama", "dp=2,zero=1,accumulate=2,offload=optimizer"),
    ("gpt", "dp=2,zero=2,offload=optimizer"),
    ("llama", "dp=2,zero=3,accumulate=2,recompute=full,offload=optimizer"),
    ("llama", "tp=2,accumulate=2,offload=optimizer"),
    ("gpt", "pp=2,accumulate=2,offload=optimizer"),
    ("llama", "dp=1,offload=params"),
    ("gpt", "dp=1,accumulate=2,recompute=full,offload=params"),
    ("llama", "dp=2,zero=0,accumulate=2,offload=params"),
    ("gpt", "dp=2,zero=1,offload=params"),
    ("llama", "dp=2,zero=3,accumulate=2,offload=optimizer+params"),
    ("gpt", "tp=2,offload=params"),
    ("llama", "pp=2,accumulate=2,offload=params"),
    ("deep", "dp=1,offload=activations"),
    ("deep", "dp=1,accumulate=2,recompute=full,offload=optimizer+activations"),
    ("deep", "dp=2,zero=3,offload=params+activations"),
    ("deep", "tp=2,recompute=ops,offload=activations"),
    ("deep", "pp=2,accumulate=3,offload=optimizer+activations"),
    ("deep", "pp=2,accumulate=2,schedule=zb-v,offload=activations"),
    ("deep", "cp=2,offload=activations"),
    ("deep", "dp=1,recompute=selective,offload=activations"),
    ("deep", "dp=1,accumulate=2,recompute=every:2,offload=params+activations"),
    ("deep", "pp=2,accumulate=2,recompute=sqrt,offload=activations"),
    ("deep", "dp=2,zero=3,recompute=budget:1GiB,offload=params"),
    ("llama", "dp=1,offload=disk"),
    ("gpt", "dp=2,zero=1,accumulate=2,offload=optimizer+disk"),
    ("gpt", "pp=2,accumulate=2,offload=params+disk"),
    ("deep", "dp=2,zero=3,offload=params+activations+disk"),
    ("moe", "dp=2,ep=2,offload=optimizer+activations"),
    ("moe", "dp=2,zero=1,accumulate=2,offload=params"),
    ("llama", "dp=2,pp=2,zero=2,accumulate=2,schedule=zb-h1,offload=params"),
)


@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=lambda value: value)
def test_a_layout_that_offloads_equals_one_device(provers: dict[str, Verifier], model: str, layout: str) -> None:
    verdict = provers[model].verify_layout(Layout.parse(layout))
    assert verdict.passed, verdict
    assert verdict.max_error <= TOLERANCE


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,zero=1,accumulate=2,offload=optimizer",
        "dp=2,zero=1,offload=params",
        "dp=2,accumulate=2,offload=params",
        "dp=2,pp=2,zero=1,accumulate=2,offload=params",
    ],
)
def test_offloaded_groups_are_gathered_and_reduced_as_counted(pool: RankPool, layout: str) -> None:
    check(pool, replace(model_config.find_model("llama-tiny"), **SMALL), layout)


def test_a_tied_weight_of_two_stages_is_reduced_as_counted(pool: RankPool) -> None:
    """The first and the last stage are on one rank, and each has gradients of the embedding."""
    tied = replace(model_config.find_model("llama-tiny"), **{**SMALL, "layers": 4}, tied=True)
    check(pool, tied, "dp=2,pp=2,zero=0,accumulate=2,schedule=zb-v,offload=params")


def test_verify_detects_a_dropped_reduction(pool: RankPool) -> None:
    case = VerifyCase(model=replace(model_config.find_model("llama-tiny"), **SMALL), optimizer=RULES["adamw"])
    for layout in ("dp=2,accumulate=2,offload=optimizer", "dp=2,accumulate=2,offload=params"):
        verdict = Verifier(pool, case, "dp:all_reduce").verify_layout(Layout.parse(layout))
        assert not verdict.passed
        assert verdict.axis == "dp"
