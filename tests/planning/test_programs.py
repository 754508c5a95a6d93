"""Plans for other programs than Echelon: what may be asked, which layouts they get, and that no command runs them."""

from __future__ import annotations

import json
import math

import pytest
from typer.testing import CliRunner

import echelon as ec
from echelon.cli import app
from echelon.planning.calibrate.programs import (
    FITTED_PROFILES,
    LAYOUT_VALUES,
    OWN_PROGRAMS,
    PLANNED_PROGRAMS,
    PROGRAMS,
)
from echelon.planning.planner import find_plans, train_command
from echelon.planning.show import plan_labels

COMMAND = ["plan", "llama-1b", "--cluster", "8xh100", "--batch", "64", "--top", "2"]


def test_the_command_prices_another_program():
    result = CliRunner().invoke(app, [*COMMAND, "--program", "megatron", "--json"])
    assert result.exit_code == 0, result.output
    best = json.loads(result.stdout)["plans"][0]
    assert (best["program"], best["runnable"], best["extrapolated"]) == ("megatron", False, [])
    assert json.loads(CliRunner().invoke(app, [*COMMAND, "--json"]).stdout)["plans"][0]["program"] == "echelon"


def test_what_another_program_does_is_not_run(tmp_path):
    page = tmp_path / "plan.html"
    result = CliRunner().invoke(app, [*COMMAND, "--program", "deepspeed", "--html", str(page)])
    for text in (" ".join(result.stdout.split()), page.read_text(encoding="utf-8")):
        assert "bf16, by deepspeed" in text
        assert "plan is priced for deepspeed, which Echelon does not run" in text
        assert "torchrun" not in text
        assert '<span class="mark yellow">plan only' not in text
    assert train_command(ec.plan("llama-1b", "8xh100", batch=64, program="deepspeed")[0], "llama-1b") == ""


def test_programs_differ():
    """What was fitted to the runs of a program is its own; what is unknown has the mean of the others."""
    profiles = dict(zip(PROGRAMS, FITTED_PROFILES, strict=True))
    assert len(set(profiles.values())) == len(PROGRAMS)
    measured = [profiles[name] for name in PROGRAMS if name not in (*OWN_PROGRAMS, "unknown")]
    for name in ("speed", "traffic", "overlap", "host"):
        mean = math.prod(getattr(profile, name) for profile in measured) ** (1 / len(measured))
        assert getattr(profiles["unknown"], name) == pytest.approx(mean, rel=0.02)


@pytest.mark.parametrize(("given", "meant"), [("megatronn", "megatron"), ("plain", ""), ("", "")])
def test_an_unknown_name_is_refused_with_the_legal_ones(given, meant):
    result = CliRunner().invoke(app, [*COMMAND, "--program", given, "--objective", "speed"])
    assert result.exit_code == 2
    assert all(word in result.stderr for word in (*PLANNED_PROGRAMS, "objective=speed"))
    assert (f'did you mean "{meant}"?' in result.stderr) == bool(meant)


def test_runs_of_echelon_do_not_correct_other_programs(tmp_path):
    with pytest.raises(ec.ValidationError, match="is incompatible with program=torch"):
        find_plans("llama-1b", "8xh100", program="torch", correct=str(tmp_path))


@pytest.mark.parametrize("program", LAYOUT_VALUES)
def test_other_programs_get_the_layouts_that_they_have(program):
    for plan in ec.plan("llama-70b", "144xgb200", batch=288, program=program, top=20):
        for key, values in LAYOUT_VALUES[program].items():
            assert getattr(plan.layout, key).partition(":")[0] in values
        has_ops = "ops" in LAYOUT_VALUES[program].get("recompute", ())
        assert has_ops or not any("recompute=ops" in reason for reason in plan.reasons)
        assert not any("as 2d" in reason.lower() for reason in plan.reasons)


def test_keys_that_the_user_fixes_are_kept():
    plans = ec.plan("llama-8b", "8xh100", batch=64, program="megatron", fixed="schedule=zb-h1,pp=4", top=2)
    assert {plan.layout.schedule for plan in plans} == {"zb-h1"}


def test_attention_is_that_of_the_runs_that_a_program_was_fitted_to():
    def kernel(program, cluster):
        return ec.plan("llama-1b", cluster, batch=64, program=program, top=1)[0].scenario.attention_kernel

    assert kernel("megatron-2021", "8xa100-80") == kernel("deepspeed", "8xv100") == "fused"
    assert kernel("torch", "8xa100-80") == "flash2"
    assert kernel("torch", "8xh100") == kernel("echelon", "8xa100-80") == "best"


def test_an_unknown_program_is_among_the_others_with_a_wider_interval():
    layout = {"layout": "dp=8,zero=1,accumulate=8", "batch": 64}
    plans = {name: ec.plan("llama-1b", "8xh100", program=name, **layout)[0] for name in PLANNED_PROGRAMS}
    unknown, *others = plans.pop("unknown"), *plans.values()
    seconds = [plan.seconds for plan in others]
    assert min(seconds) < unknown.seconds < max(seconds)
    measured = [plan for plan in others if not plan.extrapolated]
    assert measured
    assert unknown.spread > max(plan.spread for plan in measured)
    assert "by an unknown program" in plan_labels.describe_request(unknown)
