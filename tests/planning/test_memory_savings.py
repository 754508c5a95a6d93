"""What each technique would save: by category, with what it costs, and nothing that would do nothing."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from typer.testing import CliRunner

from echelon.cli import app
from echelon.config.sections import OptimizerConfig
from echelon.layout import Layout
from echelon.memory.offload.cost import (
    HOST_UPDATE_BYTES_PER_S,
    LOW_PRECISION_STATE_SECONDS,
    PAGE_BYTES,
    split_into_pages,
)
from echelon.optim import cost
from echelon.optim.update_rule import UpdateRule
from echelon.planning.calibrate.constants import FITTED_CONSTANTS
from echelon.planning.cluster import cluster
from echelon.planning.cluster.device_kinds import GIB
from echelon.planning.cost.count_work import count_work
from echelon.planning.cost.memory_model import stage_memory
from echelon.planning.cost.optimizer_update import paged_group_bytes
from echelon.planning.cost.step_time import step_times
from echelon.planning.memory_options import MemoryOptions
from echelon.planning.model.model_sources import resolve_shape
from echelon.planning.priced_plan import Plan, price
from echelon.planning.scenario import PlanRequest, Scenario
from echelon.planning.search.layout_search import search_plans
from echelon.planning.search.memory_savings import SAVING_CATEGORIES, MemorySaving, memory_savings
from echelon.training.run.auto_layout import settings_with_effect


def plan_of(layout: str, model: str = "llama-8b", devices: str = "1xh200", **options: object) -> Plan:
    found = cluster.parse_cluster(devices)
    return price(
        Scenario(shape=resolve_shape(model), cluster=found, layout=Layout.parse(layout), seq_len=8192, **options)  # type: ignore[arg-type]
    )


def found_of(plan: Plan) -> dict[str, MemorySaving]:
    return {one.technique: one for one in memory_savings(plan)}


def test_recomputation_saves_activations_and_costs_time() -> None:
    found = found_of(plan_of("dp=1"))
    assert "recompute=none" not in found
    for kind in ("ops", "full", "sqrt"):
        one = found[f"recompute={kind}"]
        assert one.saved["activations"] > GIB
        assert one.saved["states"] == one.saved["buffers"] == 0
        assert one.added_seconds > 0
    assert found["recompute=ops"].added_seconds < 0.1 * found["recompute=full"].added_seconds
    # No scores are written out, so there is next to nothing that repeating attention would save.
    assert found["recompute=selective"].total < 0.1 * GIB


def test_optimizers_save_states() -> None:
    plan = plan_of("dp=1,recompute=full")
    found, parameters = found_of(plan), plan.scenario.shape.parameters
    assert found["optimizer.states=bfloat16"].saved["states"] == pytest.approx(4 * parameters)
    assert found["optimizer.states=int8"].saved["states"] == pytest.approx((8 - 2.03) * parameters, rel=0.01)
    assert found["optimizer.name=lion"].saved["states"] == pytest.approx(4 * parameters)
    assert found["optimizer.name=adafactor"].saved["states"] == pytest.approx(8 * parameters, rel=0.01)
    assert found["optimizer.in_backward=true"].saved["gradients"] > 0
    assert all(one.training_effect for name, one in found.items() if name.startswith("optimizer"))
    assert found["precision.master=none"].saved["states"] == pytest.approx(2 * parameters)


def test_offload_savings_assume_all_states_leave() -> None:
    """Where everything fits nothing would leave by itself, and nothing would be said of it."""
    plan = plan_of("dp=1,recompute=full", model="llama-1b")
    assert plan.fits
    found, parameters = found_of(plan), plan.scenario.shape.parameters
    assert found["offload=optimizer"].saved["states"] == pytest.approx(10 * parameters, rel=0.01)
    assert found["offload=params"].saved["states"] > 11 * parameters
    assert found["offload=optimizer"].added_seconds > 0


@pytest.mark.parametrize(
    ("layout", "needed"),
    [
        ("dp=1,offload=optimizer", 4 + 8 + 2),
        ("dp=1,accumulate=4,offload=optimizer", 4 + 8),
        ("dp=1,accumulate=4,offload=params", 4 + 8 + 2 + 4),
        ("dp=1,accumulate=4,offload=params+disk", 4),
    ],
)
def test_the_host_holds_full_master_weights(layout: str, needed: int) -> None:
    """Bytes of a parameter: master, moments, a gradient that comes early, or parameters and the sum of gradients.

    What a device saves was taken for what the host needs: a device has only the half of a master that its parameters
    leave out, and plans fitted that `train` refused."""
    plan = plan_of(f"{layout},recompute=full", model="llama-1b", host_share=1.0)
    parameters = plan.scenario.shape.parameters
    less = replace(plan.scenario.cluster, host_memory=int((needed - 1) * parameters))
    beyond = price(replace(plan.scenario, cluster=less)).memory.parts["beyond the host"]
    assert beyond == pytest.approx(parameters, rel=0.01)
    assert "beyond the host" not in plan.memory.parts


@pytest.mark.parametrize(
    ("layout", "rule", "seconds"),
    [
        ("accumulate=64,offload=optimizer", {}, 34 / HOST_UPDATE_BYTES_PER_S),
        ("offload=optimizer", {}, 52 / HOST_UPDATE_BYTES_PER_S),  # its gradient comes early, in two bytes
        (
            "microbatch=4,accumulate=4,offload=params",
            {},
            52 / HOST_UPDATE_BYTES_PER_S,
        ),  # and this one is added up there
        (
            "accumulate=64,offload=optimizer",
            {"states": "int8"},
            22.0625 / HOST_UPDATE_BYTES_PER_S + LOW_PRECISION_STATE_SECONDS["int8"],
        ),
        (
            "accumulate=64,offload=optimizer",
            {"states": "bfloat16"},
            26 / HOST_UPDATE_BYTES_PER_S + LOW_PRECISION_STATE_SECONDS["bfloat16"],
        ),
    ],
)
def test_time_of_the_hosts_update(layout: str, rule: dict[str, str], seconds: float) -> None:
    """With many microbatches copies hide behind them, and what is left is the update, of bytes counted by hand."""
    plan = plan_of(f"dp=1,{layout},recompute=full", model="llama-1b", host_share=1.0)
    asked = OptimizerConfig(**rule)  # type: ignore[arg-type]
    case = replace(plan.scenario, optimizer=asked, moment_bytes=cost.state_bytes_per_element(asked) / 2)
    away = price(case).times["offload"]
    assert away == pytest.approx(seconds * plan.scenario.shape.parameters, rel=0.01)


def test_ineffective_techniques_are_not_listed() -> None:
    """Lossless compression has nothing to pack in a Llama without dropout; inputs are divided already under sp."""
    found = found_of(plan_of("tp=2,recompute=full", devices="2xh200"))
    assert "compress=lossless" not in found
    assert "memory.partition=true" not in found
    assert "compress=lossless+int8" not in found_of(plan_of("dp=1,recompute=ops"))
    whole = plan_of("tp=2,sp=0,recompute=full,microbatch=16", devices="2xh200")
    one = found_of(whole)["memory.partition=true"]
    assert 0.4 < one.saved["activations"] / (whole.memory.parts["activations"]) < 0.51
    assert one.added_seconds > 0


def test_lossy_compression_halves_saved_bytes_and_is_never_chosen() -> None:
    plan = plan_of("dp=1")
    one = found_of(plan)["compress=lossless+int8"]
    assert one.saved["activations"] / plan.memory.parts["activations"] == pytest.approx(0.49, abs=0.01)
    assert one.added_seconds > 0
    request = PlanRequest(shape=plan.scenario.shape, cluster=plan.scenario.cluster, batch=4, seq_len=8192)
    assert {found.scenario.memory_options.compress for found in search_plans(request)} == {"none"}
    asked = search_plans(replace(request, memory_options=MemoryOptions(compress="lossless+int8")))
    assert {found.scenario.memory_options.compress for found in asked} == {"lossless+int8"}
    assert all(found.layout.recompute != "ops" for found in asked)


def test_techniques_that_train_refuses_are_not_listed() -> None:
    """Updates in backward leave no time for the host, and what is packed does not leave as it is."""
    plain = set(found_of(plan_of("dp=1,recompute=full")))
    packed = set(found_of(plan_of("dp=1,recompute=full", memory_options=MemoryOptions(compress="lossless+int8"))))
    assert {"offload=activations", "recompute=ops"} <= plain - packed
    factored = set(found_of(plan_of("dp=1,recompute=full", optimizer=UpdateRule(name="adafactor"))))
    assert "optimizer.states=int8" in plain - factored
    assert {"offload=activations", "offload=optimizer", "offload=params"} <= factored
    away = found_of(plan_of("dp=1,recompute=full,offload=optimizer"))
    assert {"optimizer.in_backward=true", "precision.master=none"} <= plain - set(away)
    assert {"optimizer.name=lion", "optimizer.name=adafactor", "optimizer.name=muon"} <= set(away)
    assert all(one.plan.runnable for one in away.values())


def test_states_that_pass_through_the_device_are_priced() -> None:
    """Muon with states on the host: their transfers beyond the update, three pages, and collectives of each page."""
    rule, c = UpdateRule(name="muon"), FITTED_CONSTANTS
    layout = "dp=8,zero=1,recompute=full,accumulate=2,offload=optimizer"
    here, away = (
        replace(plan_of(text, devices="8xh200", optimizer=rule).scenario, host_share=1.0)
        for text in (layout.removesuffix(",offload=optimizer"), layout)
    )
    sizes = paged_group_bytes(away, 0)
    pages = split_into_pages(sizes, PAGE_BYTES)
    assert len(pages) > 3
    work, before = count_work(away), count_work(here)
    assert work.update.num_collectives == len(pages) * before.update.num_collectives
    assert work.offload.page_bytes == pytest.approx(sum(sizes), rel=0.01)
    assert work.offload.num_params == 0
    times, without = step_times(work, c), step_times(before, c)
    link = work.offload.page_bytes / work.offload.host_bandwidth
    assert link > times.update > without.update
    assert times.offload == pytest.approx(link - times.update)
    parts, base = stage_memory(away, 0).parts, stage_memory(here, 0).parts
    assert parts.get("optimizer", 0) == parts.get("master", 0) == 0
    assert sum(parts.values()) < sum(base.values())
    assert paged_group_bytes(replace(away, optimizer=UpdateRule()), 0) == []


def test_ema_stays_with_another_optimizer() -> None:
    """It was left out, and counted as saved."""
    plan = plan_of("dp=1,recompute=full", optimizer=UpdateRule(ema=0.99))
    found, parameters = found_of(plan), plan.scenario.shape.parameters
    for name in ("optimizer.states=bfloat16", "optimizer.name=lion"):
        assert found[name].saved["states"] == pytest.approx(4 * parameters)


def test_offload_is_not_chosen_for_incompatible_optimizers() -> None:
    """A model that fits only with activations on the host, where they are packed."""
    request = PlanRequest(
        shape=resolve_shape("llama-1b"), cluster=cluster.parse_cluster("1xv100"), batch=1, seq_len=98304
    )
    (found, *_) = search_plans(request, top=1)
    assert found.layout.offload == "params+activations"
    assert search_plans(replace(request, memory_options=MemoryOptions(compress="lossless+fp8")), top=1) == []


def test_a_buffer_bounds_what_is_gathered() -> None:
    layout = "dp=8,zero=3,recompute=full"
    whole = plan_of(layout, devices="8xh100")
    cut = plan_of(layout, devices="8xh100", memory_options=MemoryOptions(buffer=64 << 20))
    # Two layers of parameters and gradients, of 2 and 4 bytes; what is outside the layers is gathered as before.
    layer, _ = whole.scenario.shape.layers[0]
    saved = whole.memory.parts["buffers"] - cut.memory.parts["buffers"]
    assert 0.6 < saved / (2 * (2 + 4) * layer.parameters) < 1
    assert cut.times["dp"] >= whole.times.get("dp", 0)  # modules of a layer that is repeated are gathered once more


def test_the_given_optimizer_is_priced() -> None:
    plain, lion = plan_of("dp=1,recompute=full"), plan_of("dp=1,recompute=full", optimizer=UpdateRule(name="lion"))
    assert lion.memory.parts["optimizer"] == pytest.approx(plain.memory.parts["optimizer"] / 2)


def test_the_command_lists_savings(capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["plan", "llama-8b", "--cluster", "1xh200", "--batch", "4", "--savings", "--set", "optimizer.name=lion"]
    answer = CliRunner().invoke(app, [*ask, "--json"])
    reported = json.loads(answer.stdout)["savings"]
    assert set(reported[0]) == {
        "technique",
        "saved_bytes",
        "saved",
        "added_s",
        "step_s",
        "memory_bytes",
        "fits",
        "runnable",
        "changes",
    }
    assert all(set(one["saved"]) == set(SAVING_CATEGORIES) for one in reported)
    shown = CliRunner().invoke(app, ask).stdout
    assert "What each technique would save of" in shown
    assert "--set optimizer.name=lion" in shown
    refused = CliRunner().invoke(app, [*ask, "--set", "steps=3"])
    assert refused.exit_code != 0


def plan_json(*settings: str, layout: str) -> dict[str, object]:
    ask = ["plan", "llama-8b", "--cluster", "8xh100", "--batch", "8", "--layout", layout, "--json"]
    answer = CliRunner().invoke(app, [*ask, *(word for text in settings for word in ("--set", text))])
    return json.loads(answer.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("layout", "setting", "part"),
    [
        ("tp=8,sp=0,recompute=full", "memory.partition=true", "activations"),
        ("dp=8,zero=3", "memory.buffer=16", "buffers"),
        ("dp=8,zero=1,offload=optimizer", "memory.host=1.0", "optimizer"),
    ],
)
def test_settings_of_memory_are_priced_in_the_layout(layout: str, setting: str, part: str) -> None:
    """All of them were refused, as doing nothing in no layout at all."""
    before, after = (plan_json(*given, layout=layout)["plans"][0]["memory"] for given in ((), (setting,)))  # type: ignore[index]
    assert after.get(part, 0) < before[part]


def test_settings_that_do_nothing_in_the_layout_are_refused() -> None:
    assert "has no effect" in str(plan_json("memory.arena=true", layout="dp=8,zero=1")["errors"])
    assert "is not a setting of" in str(plan_json("memory.disk=files", layout="dp=8,offload=disk")["errors"])
    assert "cannot clip" in str(plan_json("optimizer.in_backward=true", layout="dp=8")["errors"])
    assert plan_json("optimizer.in_backward=true", "clip=0", layout="dp=8")["plans"]


def test_options_that_train_refuses_are_plan_only() -> None:
    for setting, layout in (
        ("optimizer.ema=0.9", "dp=8,offload=disk"),
        ("compress=lossless", "dp=8,recompute=ops"),
    ):
        assert not plan_json(setting, layout=layout)["plans"][0]["runnable"]  # type: ignore[index]


def test_the_train_command_leaves_out_ineffective_settings() -> None:
    given = ["memory.arena=true", "compress=lossless"]
    assert settings_with_effect(given, "dp=8,zero=1") == ["compress=lossless"]
    assert settings_with_effect(given, "dp=8,recompute=full") == given


def test_savings_are_listed_if_nothing_fits() -> None:
    answer = CliRunner().invoke(app, ["plan", "gpt3-175b", "--cluster", "8xa100-40", "--batch", "64", "--json"])
    assert answer.exit_code != 0
    reported = json.loads(answer.stdout)["savings"]
    assert any(one["technique"] == "optimizer.name=adafactor" and one["saved_bytes"] > GIB for one in reported)


def test_default_rule_equals_the_configurations() -> None:
    """Planning may not know the configuration: both write down what is usual."""
    assert asdict(UpdateRule()) == asdict(OptimizerConfig())
