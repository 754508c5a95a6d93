"""What failures cost: Young's and Daly's interval, and runs that are simulated failure by failure."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from echelon.cli import app
from echelon.planning import planner
from echelon.planning.explain import failure_cost
from echelon.planning.explain.failure_cost import (
    DAY,
    DEVICE_HOURS,
    HOUR,
    RecoveryTimes,
    checkpoint_interval,
    estimate_recovery,
    expected_goodput,
    predict_goodput,
    simulate_run,
)

RECOVERY = RecoveryTimes(save=2.0, exists=20.0, detect=60.0, replace=120.0, restart=60.0)


def mean(between: float, recovery: RecoveryTimes, seconds: float, runs: int = 20) -> float:
    return sum(simulate_run(between, recovery, seconds, 54 * DAY, seed).useful for seed in range(runs)) / runs


def test_young_and_daly():
    """Daly's table: for short saves it is Young's; it is never below what a save takes to be there."""
    assert checkpoint_interval(10_000.0, replace(RECOVERY, save=0.5, exists=0.0)) == pytest.approx(100.0, rel=0.01)
    assert checkpoint_interval(HOUR, RECOVERY) == pytest.approx((2 * 2 * HOUR) ** 0.5, rel=0.02)
    assert checkpoint_interval(HOUR, replace(RECOVERY, exists=900.0)) == 900.0
    assert checkpoint_interval(1.0, replace(RECOVERY, save=5.0)) == 1.0
    # Of a save that is not short, by hand: sqrt(2 x 50 x 100) is 100, and 50 / 200 is the square of a half.
    long = checkpoint_interval(100.0, replace(RECOVERY, save=50.0, exists=0.0))
    assert long == pytest.approx(100.0 * (1 + 1 / 6 + 1 / 36) - 50.0)


@pytest.mark.parametrize("between", [2 * HOUR, 12 * HOUR])
def test_no_other_interval_is_better(between):
    """By simulation, which knows nothing of the formula."""
    chosen = mean(between, RECOVERY, checkpoint_interval(between, RECOVERY))
    for factor in (0.25, 0.5, 2.0, 4.0):
        assert chosen > mean(between, RECOVERY, factor * checkpoint_interval(between, RECOVERY)) - 5e-4
    assert chosen > mean(between, RECOVERY, 8 * checkpoint_interval(between, RECOVERY)) + 0.01
    assert chosen == pytest.approx(
        expected_goodput(between, RECOVERY, checkpoint_interval(between, RECOVERY)), abs=0.005
    )


def test_shares_are_of_all_the_time():
    found = simulate_run(HOUR, RECOVERY, 100.0, 20 * DAY)
    assert found.useful + found.saving + found.lost + found.down == pytest.approx(1.0)
    assert found.down == pytest.approx(RECOVERY.down / (HOUR + RECOVERY.down), rel=0.15)
    never = simulate_run(1e12, RECOVERY, 100.0, 20 * DAY)
    assert (never.lost, never.down) == (0.0, 0.0)
    assert never.saving == pytest.approx(2.0 / 102.0, rel=1e-3)


def test_a_failure_while_one_is_mended_begins_anew():
    """With more failures than time to mend them, next to nothing is done."""
    assert simulate_run(60.0, RECOVERY, 100.0, 20 * DAY).useful < 0.01


def test_llama_3s_failures_on_16384_devices():
    """The bar: above 95 %, at 419 unexpected interruptions in 54 days."""
    layout = "dp=32,tp=8,cp=2,pp=32,schedule=zb-v,accumulate=64"
    plan = planner.find_plans("llama-405b", "16384xh100", batch=2048, seq_len=8192, layout=layout).plans[0]
    found = predict_goodput(plan)
    assert found.mtbf == pytest.approx(54 * DAY / 419)
    assert 0.95 < found.low <= found.shares.useful <= found.high < 1.0
    assert found.checkpoint_seconds == pytest.approx(found.checkpoint_steps * plan.seconds)
    often = predict_goodput(plan, device_hours=DEVICE_HOURS / 4)
    assert often.shares.useful < found.shares.useful
    assert often.checkpoint_steps < found.checkpoint_steps


def test_who_writes_follows_from_the_layout():
    """Where states are replicated, one of the replicas writes them all: each writer more, and all of it later."""
    one, all_ = (
        estimate_recovery(planner.find_plans("llama-1b", "64xh100", layout=layout).plans[0])
        for layout in ("zero=0", "zero=1")
    )
    assert one.save > all_.save
    assert one.exists > all_.exists


def test_cp_ranks_write_too_where_they_shard_states():
    """Under zero=0 they are replicas, of which one writes."""
    seconds = {
        layout: estimate_recovery(planner.find_plans("llama-1b", "8xh100", layout=layout).plans[0]).save
        for layout in ("dp=8,zero=1", "dp=4,cp=2,zero=1", "dp=8,zero=0", "dp=4,cp=2,zero=0")
    }
    assert seconds["dp=4,cp=2,zero=1"] == seconds["dp=8,zero=1"]
    assert seconds["dp=4,cp=2,zero=0"] == seconds["dp=8,zero=0"] > seconds["dp=8,zero=1"]


def test_the_command():
    run = CliRunner().invoke
    given = ["plan", "llama-1b", "--cluster", "8xh100", "--layout", "dp=8", "--goodput"]
    text = run(app, given).stdout
    assert "train with --set checkpoint.every=" in text
    found = json.loads(run(app, [*given, "--json"]).stdout)["goodput"]
    assert 0.99 < found["goodput"] <= 1.0
    fewer = json.loads(run(app, [*given, "--json", "--device-hours", "100"]).stdout)["goodput"]
    assert fewer["checkpoint_every"] < found["checkpoint_every"]
    refused = run(app, [*given, "--device-hours", "-1"])
    assert refused.exit_code != 0


def test_what_a_recovery_is_made_of():
    """By hand: 12 bytes of each parameter, 64 writers, 8 of them on a node's disk; 3 kinds of numbers in 3 boxes."""
    plan = planner.find_plans("llama-1b", "64xh100", layout="dp=8,tp=8,zero=1").plans[0]
    found, shape = estimate_recovery(plan), plan.scenario.shape
    each = 12 * shape.parameters / 64
    disk = max(each * 8 / 8e9, 12 * shape.parameters / failure_cost.SHARED_STORE_BANDWIDTH)
    boxes = 64 * (shape.num_layers + 2) * 3 * 3
    assert found.save == pytest.approx(failure_cost.SAVE_S + each / 50e9)
    assert found.exists == pytest.approx(disk + failure_cost.COMMIT_S + failure_cost.WRITE_BOX_S * boxes)
    assert found.detect == pytest.approx(max(30.0, 10 * plan.seconds))
    started = failure_cost.START_S + failure_cost.GROUP_S * 64
    assert found.restart == pytest.approx(started + failure_cost.READ_BOX_S * boxes + disk + plan.seconds)
    assert found.down == found.detect + failure_cost.REPLACE_S + found.restart


def test_failures_that_leave_no_time_are_refused():
    for hours, words in (("1e-9", "at least 0.133 device hours"), ("nan", "positive"), ("inf", "positive")):
        command = ["plan", "llama-8b", "--cluster", "8xh100", "--layout", "tp=8", "--device-hours", hours]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2
        assert words in result.output
