"""Plans for long sequences, and for many ranks of tp: what the search finds, and what it says about it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from time import process_time

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from echelon.cli import app
from echelon.layout import Layout
from echelon.models.attention import CoreAttention
from echelon.models.pipeline_model import PipelineLayer, PipelineModel
from echelon.planning.cluster import cluster
from echelon.planning.cost.count_work import count_work
from echelon.planning.cost.step_time import microbatch_time
from echelon.planning.explain.explain_kinds import kind_reasons
from echelon.planning.explain.reasons import explain_plan
from echelon.planning.model.model_sources import resolve_shape
from echelon.planning.model.trace_module import trace_module
from echelon.planning.priced_plan import price
from echelon.planning.scenario import PlanRequest
from echelon.planning.search.layout_families import all_layouts, can_split_sequence, cp_kinds, tp_kinds
from echelon.planning.search.layout_search import search_plans

LONG = 131072


def request(model="llama-8b", devices="64xh100", batch=64, seq_len=LONG, **options):
    return PlanRequest(
        shape=resolve_shape(model), cluster=cluster.parse_cluster(devices), batch=batch, seq_len=seq_len, **options
    )


# -- what is found ----------------------------------------------------------------------------------------------------


def test_cp_is_chosen_for_a_sequence_that_fits_no_other_way():
    assert search_plans(request(devices="16xh100", batch=1, seq_len=2**19, fixed={"cp": 1}), top=1) == []
    best = search_plans(request(devices="16xh100", batch=1, seq_len=2**19), top=1)[0]
    assert best.layout.cp > 1
    assert best.fits
    assert best.runnable


def test_cp_is_chosen_for_a_long_sequence_if_faster():
    """On one node of H200 it fits flat tp too, which sends more."""
    cut, flat = (search_plans(request(devices="8xh200", batch=8, fixed=keys), top=1)[0] for keys in ({}, {"cp": 1}))
    assert cut.layout.cp > 1
    assert cut.seconds < 0.97 * flat.seconds


def test_short_sequences_get_no_cp():
    """Neither where there are enough of them, nor in the sequences that most people train on."""
    assert not any(layout.cp > 1 for layout in all_layouts(request(batch=64, seq_len=8192)))
    assert search_plans(request(batch=512, seq_len=4096), top=1)[0].layout.cp == 1


def test_fewer_sequences_than_devices_allow_shorter_slices():
    few, many = request(batch=8, seq_len=8192), request(batch=64, seq_len=8192)
    assert (can_split_sequence(few, 8), can_split_sequence(few, 16), can_split_sequence(many, 2)) == (
        True,
        False,
        False,
    )
    assert not can_split_sequence(request(batch=8, seq_len=8190), 4)


@pytest.mark.parametrize("kind", ["ring", "gather", "ulysses", "ring-ulysses"])
def test_a_fixed_cp_kind_stays(kind):
    plans = search_plans(request(fixed={"cp_kind": kind, "cp": 8}), top=3)
    assert plans
    assert {plan.layout.cp_kind for plan in plans} == {kind}


@pytest.mark.parametrize(("kind", "tp", "depth"), [("2d", 4, 1), ("2.5d", 8, 2), ("3d", 8, 1)])
def test_a_fixed_grid_is_found(kind, tp, depth):
    asked = request(devices="8xh100", batch=64, seq_len=4096, fixed={"tp_kind": kind, "tp": tp, "depth": depth})
    plans = search_plans(asked, top=2)
    assert {(plan.layout.tp_kind, plan.layout.depth) for plan in plans} == {(kind, depth)}


def test_zero_shards_over_cp_alone():
    best = search_plans(request(devices="8xh200", batch=1, fixed={"cp": 8}), top=1)[0]
    assert (best.layout.dp, best.layout.zero > 0) == (1, True)


def test_one_fast_search():
    """The bar is 2 s of one core for 70B on 1,024 devices; the machine of a test may be slow and busy."""
    begun = process_time()
    assert search_plans(request("llama-70b", "1024xh100", 1024, 8192), top=1)
    assert process_time() - begun < 6


# -- which kinds there are --------------------------------------------------------------------------------------------


def test_heads_decide_the_cp_kinds():
    """Of 70B's 64 heads a rank of tp=8 has 8: 16 ranks cannot exchange them, and a node has no room beside tp=8."""
    asked = request("llama-70b", "1024xh100", 32)
    assert cp_kinds(asked, 8, 16) == [("ring", 1), ("gather", 1), ("ring-ulysses", 2)]
    assert cp_kinds(asked, 8, 8) == [("ring", 1), ("gather", 1), ("ulysses", 8), ("ring-ulysses", 2)]
    assert cp_kinds(asked, 2, 8)[-2:] == [("ring-ulysses", 2), ("ring-ulysses", 4)]
    assert cp_kinds(asked, 8, 1) == [("ring", 1)]


def test_grids_are_tried_for_large_tp():
    asked = request("llama-70b", "72xgb200", 64, 8192)
    assert tp_kinds(asked, 8) == [("1d", 1)]
    assert tp_kinds(asked, 16) == [("1d", 1), ("2d", 1), ("2.5d", 4)]
    assert ("3d", 1) in tp_kinds(asked, 64)


class Plain(nn.Module):
    """Custom attention without a CoreAttention."""

    def __init__(self, **inside: nn.Module):
        super().__init__()
        self.embed, self.layers = nn.Embedding(64, 32), nn.ModuleList([nn.Linear(32, 32) for _ in range(2)])
        for name, module in inside.items():
            self.add_module(name, module)

    def forward(self, tokens, positions=None):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x.sum(), tokens.numel()


def test_only_models_that_support_cp_get_it():
    inputs = {"tokens": torch.zeros(2, 16, dtype=torch.int64)}
    assert not trace_module(Plain(), inputs).support.cp
    assert trace_module(Plain(core=CoreAttention()), inputs).support.cp


class Declared(Plain):
    """Says how tp splits it, and where a pipeline may cut it."""

    def __init__(self):
        super().__init__()
        self.split = {"layers.0": "column", "layers.1": "row"}

    def pipeline_model(self):
        def run(name, x, shared, **_):
            return self.get_submodule(name)(x)

        embed = PipelineLayer("embed", ("embed",), lambda x, shared, tokens, **_: self.embed(tokens))
        names = ("layers.0", "layers.1")
        return PipelineModel((embed, *(PipelineLayer(name, (name,), partial(run, name)) for name in names)))


class ReadsValues(Plain):
    """Branches on the values of its input, which a trace for the solver does not have."""

    def forward(self, tokens, positions=None):
        return super().forward(tokens if bool((tokens >= 0).all()) else -tokens, positions)


@pytest.mark.parametrize("declared", [False, True])
def test_only_models_that_declare_tp_and_pp_get_them(declared):
    """A plan with tp=2 was marked as runnable, and `train` refused it."""
    inputs = {"tokens": torch.zeros(2, 16, dtype=torch.int64)}
    shape = trace_module(Declared() if declared else ReadsValues(), inputs)
    assert (shape.support.tp, shape.support.pp) == (declared, declared)
    asked = PlanRequest(shape=shape, cluster=cluster.parse_cluster("8xh100"), batch=64, seq_len=16)
    layouts = list(all_layouts(asked))
    assert any(layout.dp > 1 for layout in layouts)
    for axis in ("tp", "pp"):
        assert any(getattr(layout, axis) > 1 for layout in layouts) == declared
        fixed = replace(asked, fixed={axis: 2})
        assert {fixed.scenario(layout).runnable for layout in all_layouts(fixed)} == {declared}


def test_a_module_that_declares_nothing_is_split_by_the_solver():
    shape = trace_module(Plain(), {"tokens": torch.zeros(2, 16, dtype=torch.int64)})
    assert (shape.support.tp, shape.support.pp) == (True, True)
    asked = PlanRequest(shape=shape, cluster=cluster.parse_cluster("8xh100"), batch=64, seq_len=16)
    fixed = replace(asked, fixed={"tp": 2})
    assert {fixed.scenario(layout).runnable for layout in all_layouts(fixed)} == {True}


def test_a_module_without_a_head_is_planned():
    """The share of its head's edges was a division by zero."""
    shape = trace_module(Plain(), {"tokens": torch.zeros(2, 16, dtype=torch.int64)})
    assert shape.vocab == 0
    asked = PlanRequest(shape=shape, cluster=cluster.parse_cluster("8xh100"), batch=64, seq_len=16)
    assert search_plans(asked, top=1)[0].seconds > 0


# -- what is said -----------------------------------------------------------------------------------------------------


def test_the_reasons_compare_the_kinds_with_numbers():
    asked = request(fixed={"microbatch": 1})
    plan = explain_plan(asked, search_plans(asked, top=1))
    text = " ".join(plan.reasons)
    for kind in ("ring", "gather", "ulysses", "ring-ulysses"):
        assert f" {kind}" in text
    assert f"cp={plan.layout.cp} as" in text
    assert "KiB a token and layer" in text
    assert "exposed" in text
    assert "attention overlaps it: a hop takes" in text


def test_the_reasons_say_why_a_kind_cannot_be():
    asked = request("llama-70b", "1024xh100", 32)
    layout = Layout.parse("dp=8,zero=1,tp=8,cp=16,accumulate=4,recompute=full")
    found = list(kind_reasons(asked, price(asked.scenario(layout))))
    assert found[0].startswith(
        "cp=16 as ring sends 28.2 KiB a token and layer between nodes, and attention overlaps it"
    )
    assert "ulysses cannot be: cp=16 does not divide the 8 heads per tp rank (llama-70b)." in found
    assert any(line.startswith("As gather it would be") and "slower" in line for line in found)


def test_reasons_name_exposed_ring_transfers():
    asked = request("llama-1b", "64xh100:eth", 64, 16384)
    found = list(kind_reasons(asked, price(asked.scenario(Layout.parse("dp=4,cp=16,accumulate=16")))))
    assert "attention overlaps a part of it" in found[0]


def test_a_plan_without_cp_says_nothing_of_its_kinds():
    asked = request("llama-1b", "8xh100", 64, 2048)
    assert list(kind_reasons(asked, search_plans(asked, top=1)[0])) == []


def test_the_reasons_compare_grids_with_flat_tp():
    asked = request("llama-405b", "72xgb200", 64, 8192)
    plan = price(asked.scenario(Layout.parse("tp=16,tp_kind=2d,microbatch=8,accumulate=2")))
    found = list(kind_reasons(asked, plan))
    assert found[0].startswith("tp=16 as 2d sends")
    assert "collectives inside a node" in found[0]
    assert any("1d with sequence parallelism" in line for line in found)
    padded = price(asked.scenario(Layout.parse("tp=16,tp_kind=2d,microbatch=1,accumulate=16")))
    assert "300% of its sequences are padding" in next(kind_reasons(asked, padded))


def test_gemms_overlap_the_steps_of_a_2d_grid():
    """Of q broadcasts of a product all but one run beside another's; what a cube gathers is waited for."""
    square, cube, flat = (
        count_work(
            request(devices="72xgb200", model="gpt3-175b", batch=64, seq_len=8192).scenario(
                Layout.parse(f"tp=64,microbatch=16{kind}")
            )
        )
        for kind in (",tp_kind=2d", ",tp_kind=3d", "")
    )
    assert 0.8 < square.microbatch.tp.overlapped_bytes / square.microbatch.tp.wire_bytes < 7 / 8
    assert cube.microbatch.tp.overlapped_bytes == flat.microbatch.tp.overlapped_bytes == 0
    tp = replace(square.microbatch.tp, overlapped_bytes=0.0)
    exposed = replace(square, microbatch=replace(square.microbatch, tp=tp))
    assert microbatch_time(exposed).tp > 1.3 * microbatch_time(square).tp


def test_reasons_compare_larger_and_smaller_cp():
    asked = request(fixed={"microbatch": 1})
    text = " ".join(
        explain_plan(asked, [price(asked.scenario(Layout.parse("dp=4,zero=1,tp=2,cp=8,accumulate=16")))]).reasons
    )
    assert "cp=16 would be" in text
    assert "cp=4 would need" in text


def test_causes_are_called_by_what_the_kind_does():
    asked = request(devices="64xh100:eth", batch=64, fixed={"microbatch": 1})
    for kind, words in (("gather", "all-gather of keys and values"), ("ulysses", "all-to-all of heads and tokens")):
        plan = price(asked.scenario(Layout.parse(f"dp=4,zero=1,cp=16,cp_kind={kind},accumulate=16,recompute=full")))
        assert words in " ".join(explain_plan(asked, [plan]).reasons)


# -- the command ------------------------------------------------------------------------------------------------------


def test_rotary_models_have_no_longest_sequence():
    arguments = ["plan", "llama-8b", "--cluster", "64xh100", "--batch", "64", "--seq-len", str(LONG), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    plans = json.loads(result.stdout)["plans"]
    assert all(plan["runnable"] and "cp=" in plan["layout"] for plan in plans)
    assert "cp" in plans[0]["time"]
    refused = CliRunner().invoke(app, ["plan", "gpt2-124m", "--cluster", "8xh100", "--seq-len", "2048"])
    assert refused.exit_code == 2
    assert "exceeds the longest sequence of gpt2-124m" in refused.stderr
