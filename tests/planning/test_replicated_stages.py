"""PipeDream's optimizer on the planner's own times, and whether a layout runs what it chooses."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from echelon.cli import app
from echelon.layout import Layout
from echelon.layout.rules import find_issues
from echelon.planning.calibrate.calibration import constants_for
from echelon.planning.cluster import cluster
from echelon.planning.cost.count_work import count_work
from echelon.planning.cost.step_time import microbatch_time
from echelon.planning.explain.replicated_stages import NOT_RUN, predicted_profile, replicated_stages
from echelon.planning.model.model_sources import resolve_shape
from echelon.planning.priced_plan import price
from echelon.planning.scenario import Scenario


def scenario(model: str, devices: str, layout: str, seq_len: int = 1024) -> Scenario:
    found = cluster.parse_cluster(devices)
    return Scenario(shape=resolve_shape(model), cluster=found, layout=Layout.parse(layout), seq_len=seq_len)


UNEVEN = ("llama-8b", "3xh100", "pp=3,schedule=pipedream,accumulate=6")


def test_a_profile_is_the_planned_microbatch() -> None:
    case = scenario(*UNEVEN)
    profile, m = predicted_profile(case), microbatch_time(count_work(case), constants_for(case))
    assert sum(link.forward_s for link in profile.links) == pytest.approx(float(m.forward + m.head), rel=0.02)
    assert sum(profile.layer_seconds) == pytest.approx(float(m.forward + m.backward + 3 * m.head), rel=0.02)
    assert sum(link.parameter_bytes for link in profile.links) == pytest.approx(2 * case.shape.parameters, rel=1e-4)
    assert profile.links[0].activation_bytes == 1024 * 4096 * 2


def test_uneven_replicas_are_planned_and_not_run() -> None:
    chosen = replicated_stages(price(scenario(*UNEVEN)))
    assert chosen is not None
    assert chosen.pipeline.replicas == (1, 2)
    assert chosen.layout == ""
    assert chosen.to_json()["runnable"] is False
    assert str(chosen).endswith(
        f"2 stages on 1, 2 ranks: a microbatch every {chosen.pipeline.seconds:.3g} s at best. Plan only: {NOT_RUN}."
    )


def test_layers_that_wait_for_the_host_are_as_long_as_their_launches() -> None:
    """Of a short microbatch on an A100: the profile has the time of a layer with its launches, the head its own."""
    case = scenario("llama-1b", "3xa100-80", "pp=3,schedule=pipedream,accumulate=6", seq_len=512)
    profile, m = predicted_profile(case), microbatch_time(count_work(case), constants_for(case))
    layer, layers = profile.layer_seconds[1], len(profile.links) - 2
    assert layer == pytest.approx(float(m.forward + m.backward) / layers, rel=0.02)
    assert layer > 1.2 * float(m.forward_device + m.backward_device) / layers
    chosen = replicated_stages(price(case))
    assert chosen is not None
    assert chosen.pipeline.replicas == (2, 1)


def test_equal_replicas_are_a_layout_that_runs() -> None:
    layout = "dp=4,tp=2,pp=2,schedule=pipedream,accumulate=16"
    chosen = replicated_stages(price(scenario("llama-8b", "16xh100:eth", layout, seq_len=4096)))
    assert chosen is not None
    assert chosen.pipeline.is_uniform
    assert chosen.layout == "dp=4,pp=2,schedule=pipedream", "of pairs of devices"
    assert find_issues(Layout.parse(f"{chosen.layout},tp=2,accumulate=16")) == []
    assert chosen.to_json() | {"runnable": True, "reasons": [], "layout": chosen.layout} == chosen.to_json()


@pytest.mark.parametrize(
    "case",
    [
        ("llama-1b", "3xa100-80", "pp=3,accumulate=6"),
        ("llama-1b", "4xa100-80", "dp=4"),
        ("llama-1b", "4096xh100", "dp=512,pp=8,schedule=pipedream,accumulate=8"),
    ],
    ids=str,
)
def test_other_schedules_and_searches_that_would_take_long_have_none(case: tuple[str, str, str]) -> None:
    assert replicated_stages(price(scenario(*case))) is None


def test_the_command_reports_it() -> None:
    model, devices, layout = UNEVEN
    options = ["--batch", "6", "--seq-len", "1024", "--layout", layout]
    shown = json.loads(CliRunner().invoke(app, ["plan", model, "--cluster", devices, *options, "--json"]).output)
    assert shown["replicated_stages"]["replicas"] == [1, 2]
    assert (shown["replicated_stages"]["runnable"], shown["replicated_stages"]["reasons"]) == (False, [NOT_RUN])
    assert NOT_RUN in shown["plans"][0]["reasons"][-1]
    text = CliRunner().invoke(app, ["plan", model, "--cluster", devices, *options]).output
    assert "Plan only: train runs every stage" in " ".join(text.split())
