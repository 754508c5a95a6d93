"""Simpler ways as the planner prices them: single-controller DataParallel above all."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from echelon.cli import app
from echelon.layout import Layout
from echelon.planning.calibrate.calibration import constants_for
from echelon.planning.cluster import cluster
from echelon.planning.cost.recompute_cost import microbatch_saved_bytes
from echelon.planning.explain.baselines import NOT_RUN, price_baselines, price_data_parallel
from echelon.planning.model.model_sources import resolve_shape
from echelon.planning.priced_plan import price
from echelon.planning.scenario import PlanRequest, Scenario

MODEL, VOCAB, SEQ_LEN, MICROBATCH, FORWARDS = "gpt2-1.5b", 50257, 1024, 4, 3


def scenario(layout: str, model: str = MODEL, devices: str = "8xa100-80") -> Scenario:
    found = cluster.parse_cluster(devices)
    return Scenario(shape=resolve_shape(model), cluster=found, layout=Layout.parse(layout), seq_len=SEQ_LEN)


def request(devices: str = "8xa100-80", batch: int = 128, model: str = MODEL) -> PlanRequest:
    found = cluster.parse_cluster(devices)
    return PlanRequest(shape=resolve_shape(model), cluster=found, batch=batch, seq_len=SEQ_LEN)


CASE = scenario(f"dp=8,microbatch={MICROBATCH},accumulate={FORWARDS}")


def test_every_forward_copies_the_model_out_and_gathers_logits_and_gradients() -> None:
    """The formulas of the note, written out once more."""
    ddp, single, c = price(CASE), price_data_parallel(CASE), constants_for(CASE)
    link = CASE.cluster.intra_node
    bandwidth = link.bandwidth * c.intra_node
    tokens, weights = MICROBATCH * SEQ_LEN, 2 * CASE.shape.parameters
    copied = weights / bandwidth + link.latency * math.ceil(weights / 10 / 2**20)
    assert single.times["replicate"] == pytest.approx(FORWARDS * copied)
    assert single.times["reduce"] == pytest.approx(FORWARDS * copied)
    assert single.times["scatter"] == pytest.approx(FORWARDS * 7 * 8 * tokens / bandwidth)
    assert single.times["gather"] == pytest.approx(FORWARDS * 2 * 7 * 2 * tokens * VOCAB / bandwidth)
    assert "dp" not in single.times
    for cause in ("products", "attention", "passing", "head", "update"):
        assert single.times[cause] == ddp.times[cause]
    assert single.seconds == pytest.approx(sum(single.times.values()))
    assert single.seconds > ddp.seconds


def test_one_interpreter_launches_the_kernels_of_all_devices() -> None:
    """A model so small that the host sets the pace: eight devices take eight times as long to launch."""
    # Two microbatches: one of one device would be launched as one graph.
    one, eight = (price_data_parallel(scenario(f"dp={n},microbatch=1,accumulate=2", "gpt-tiny")) for n in (1, 8))
    own = price(scenario("dp=1,microbatch=1,accumulate=2", "gpt-tiny"))
    assert one.times["launches"] == pytest.approx(own.times["launches"])
    forward = own.times["launches"] / 2
    assert eight.times["launches"] == pytest.approx(9 * forward, rel=0.05), "backward has a thread for each device"


def test_one_device_copies_nothing() -> None:
    times = price_data_parallel(scenario("dp=1,microbatch=4")).times
    assert not times.keys() & {"scatter", "replicate", "gather", "reduce"}


def test_the_first_device_holds_the_logits_of_all() -> None:
    gathered = 8 * MICROBATCH * SEQ_LEN * VOCAB * 12
    own, single = price(CASE).memory.parts, price_data_parallel(CASE).memory.parts
    assert single["logits"] == gathered
    assert single["activations"] == pytest.approx(microbatch_saved_bytes(CASE), rel=1e-6)
    for name in ("parameters", "master", "optimizer", "gradients", "reserve"):
        assert single[name] == own[name]
    small = replace(CASE, layout=Layout.parse("dp=8,microbatch=1"))
    assert price_data_parallel(small).memory.total >= price(small).memory.total


def test_baselines_are_the_best_of_their_kind_and_slower_than_a_plan() -> None:
    found = {baseline.name: baseline for baseline in price_baselines(request())}
    assert list(found) == ["one device", "DataParallel", "DDP", "naive layer split"]
    seconds = {name: baseline.plan.seconds for name, baseline in found.items()}
    assert seconds["DDP"] < seconds["DataParallel"] < seconds["one device"]
    assert seconds["DDP"] < 0.2 * seconds["naive layer split"]
    assert [name for name, baseline in found.items() if not baseline.runnable] == ["DataParallel"]
    other = price_data_parallel(request().scenario(Layout.parse("dp=8,microbatch=1,accumulate=16")))
    assert seconds["DataParallel"] < other.seconds, "a smaller microbatch copies the model more often"


def test_one_process_drives_one_node_and_no_cpu() -> None:
    over_nodes = {baseline.name: baseline.plan for baseline in price_baselines(request("32xa100-80"))}
    assert (over_nodes["DataParallel"].layout.dp, over_nodes["DDP"].layout.dp) == (8, 32)
    uneven = {baseline.name: baseline.plan.layout.dp for baseline in price_baselines(request(batch=60))}
    assert uneven == {"one device": 1, "DataParallel": 6, "naive layer split": 1}, "8 devices do not divide 60"
    assert "DataParallel" not in {baseline.name for baseline in price_baselines(request("8xcpu", model="gpt-tiny"))}


def test_the_command_prices_them_and_says_that_they_do_not_run() -> None:
    options = ["plan", MODEL, "--cluster", "8xa100-80", "--batch", "128", "--seq-len", "1024", "--baselines"]
    shown = json.loads(CliRunner().invoke(app, [*options, "--json"]).output)
    single = next(row for row in shown["baselines"] if row["name"] == "DataParallel")
    assert (single["runnable"], single["reasons"]) == (False, [NOT_RUN])
    assert single["step_s"] > shown["plans"][0]["step_s"]
    assert {"replicate", "reduce", "gather", "scatter"} <= single["time"].keys()
    text = CliRunner().invoke(app, options).output
    assert "DataParallel" in text
    assert NOT_RUN in " ".join(text.split())
    assert "baselines" not in json.loads(CliRunner().invoke(app, [*options[:-1], "--json"]).output)
