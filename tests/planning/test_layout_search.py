"""Search: what it must find, what it must respect, that it always answers the same."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import echelon as ec
from echelon.cli import app
from echelon.config.run_config import Config
from echelon.config.sections import OptimizerConfig, PrecisionConfig
from echelon.layout import Layout, check_layout
from echelon.models import model_config
from echelon.planning.calibrate.calibration import constants_for
from echelon.planning.cluster import cluster
from echelon.planning.cost.count_work import count_work
from echelon.planning.cost.memory_model import peak_memory, stage_memory
from echelon.planning.cost.param_group_traffic import param_groups
from echelon.planning.cost.step_time import step_times
from echelon.planning.explain.reasons import explain_infeasible, explain_plan
from echelon.planning.model.model_sources import resolve_shape
from echelon.planning.planner import PRECISIONS, train_command
from echelon.planning.priced_plan import price, step_timeline
from echelon.planning.scenario import PlanRequest, Scenario
from echelon.planning.search.bounds import branch_bounds, min_memory_bytes
from echelon.planning.search.layout_families import all_layouts, branch_layouts
from echelon.planning.search.layout_search import _is_legal, least_memory_plan, search_plans
from echelon.planning.search.memory_variants import OFFLOAD_OPTIONS
from echelon.training.run.auto_layout import with_planned_layout


def request(model="llama-8b", devices="8xh100", batch=64, seq_len=8192, **options):
    shape, devices = resolve_shape(model), cluster.parse_cluster(devices)
    return PlanRequest(shape=shape, cluster=devices, batch=batch, seq_len=seq_len, **options)


def test_every_plan_fits_fills_the_batch_and_can_be_run():
    asked = request()
    for plan in search_plans(asked):
        assert plan.fits
        assert plan.runnable
        assert plan.layout.batch == 64
        assert plan.layout.world <= 8
        ec.Layout.parse(str(plan.layout))


def test_the_search_is_deterministic():
    first, second = (search_plans(request()) for _ in range(2))
    assert [plan.to_json() for plan in first] == [plan.to_json() for plan in second]


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp32"])
def test_no_listed_layout_is_faster_and_fits(precision):
    """The search leaves nothing out: price every layout of a small question."""
    asked = request("llama-1b", "2xh100", 8, 4096, precision=precision)
    best = search_plans(asked)[0]
    every = [price(asked.scenario(layout)) for layout in all_layouts(asked)]
    assert best.seconds == min(plan.seconds for plan in every if plan.fits)


def test_fixed_keys_stay():
    for plan in search_plans(request(fixed={"tp": 4, "schedule": "zb-h1", "pp": 2})):
        assert (plan.layout.tp, plan.layout.pp, plan.layout.schedule) == (4, 2, "zb-h1")


def test_plan_only_layouts_are_left_out_by_default():
    asked = request(plan_only=True, precision="fp4")
    assert all(not plan.runnable for plan in search_plans(asked))
    assert all(plan.runnable for plan in search_plans(request()))


def test_ep_is_chosen_by_default():
    found = search_plans(request("mixtral-8x7b", "64xh100", 256, 4096))
    assert any(plan.layout.ep > 1 for plan in found)
    assert all(plan.runnable for plan in found)


@pytest.mark.parametrize(("devices", "batch"), [("12xh100", 96), ("7xh100", 56), ("7xh100", 64), ("24xa100-80", 120)])
def test_world_sizes_that_are_not_powers_of_two(devices, batch):
    plans = search_plans(request("llama-8b", devices, batch, 4096))
    assert plans
    assert plans[0].layout.world <= cluster.parse_cluster(devices).devices


def test_one_device_needs_no_parallelism():
    asked = request("gpt2-124m", "1xh100", 8, 1024)
    best = explain_plan(asked, search_plans(asked))
    assert best.layout.world == 1
    assert "no parallelism is needed" in best.reasons[0]


def test_reasons_name_what_binds_and_what_the_neighbours_would_do():
    asked = request("llama-70b", "64xh100", 256, 8192, fixed={"schedule": "1f1b"})
    reasons = explain_plan(asked, search_plans(asked)).reasons
    assert any("of a step" in reason for reason in reasons)
    assert any("would be" in reason or "would need" in reason for reason in reasons)


def test_the_objectives_differ():
    slow, few = (
        search_plans(request("llama-1b", "8xh100", 64, 2048, objective=name))[0] for name in ("time", "devices")
    )
    assert few.layout.world < slow.layout.world
    assert few.seconds > slow.seconds


def test_infeasible_requests_name_largest_terms_and_a_remedy():
    least = least_memory_plan(request("llama-405b", "8xh100", 8, 4096))
    words = explain_infeasible(least)
    assert "Nothing fits" in words[0]
    assert "optimizer" in words[1]
    assert "would do" in words[-1] or "would fit" in words[-1]
    assert search_plans(request("llama-405b", "8xh100", 8, 4096)) == []


def test_states_are_offloaded_if_nothing_fits():
    asked = request("llama-70b", "8xa100-80", 64, 4096)
    best = search_plans(asked, top=1)[0]
    assert best.fits
    assert best.layout.offload in ("optimizer", "optimizer+activations")
    assert search_plans(replace(asked, fixed={"offload": "none"}), top=1) == []
    muon = replace(asked, optimizer=OptimizerConfig(name="muon"))
    assert search_plans(muon, top=1) == [], "a rule that the host cannot update"


def test_the_fastest_offload_is_chosen():
    """The first kind that made room was taken: here the states, and layers were repeated that need not be."""
    asked = request("llama-1b", "1xa100-40", 1, 131072)
    best = search_plans(asked, top=1)[0]
    kinds = [
        found for kind in OFFLOAD_OPTIONS for found in search_plans(replace(asked, fixed={"offload": kind}), top=1)
    ]
    assert len(kinds) == len(OFFLOAD_OPTIONS)
    assert best.seconds == min(found.seconds for found in kinds)
    assert best.seconds < 0.9 * next(found for found in kinds if found.layout.offload == "optimizer").seconds


# -- prices -----------------------------------------------------------------------------------------------------------


def case(layout, model="llama-8b", devices="64xh100", seq_len=4096):
    shape, devices = resolve_shape(model), cluster.parse_cluster(devices)
    return Scenario(shape=shape, cluster=devices, layout=Layout.parse(layout), seq_len=seq_len)


@settings(max_examples=40, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4, 8]),
    zero=st.integers(0, 3),
    accumulate=st.integers(1, 40),
    recompute=st.sampled_from(["none", "full"]),
)
def test_prices_are_positive_and_causes_sum_to_the_step(tp, pp, zero, accumulate, recompute):
    plan = price(
        case(f"dp={64 // (tp * pp)},tp={tp},pp={pp},zero={zero},accumulate={accumulate},recompute={recompute}")
    )
    assert plan.seconds == pytest.approx(sum(plan.times.values()))
    assert 0 < plan.low < plan.seconds < plan.high
    assert 0 <= plan.bubble < 1
    assert 0 < plan.mfu < 1
    assert plan.memory.total == sum(plan.memory.parts.values())


def test_the_formula_is_near_the_simulation():
    """What ranks thousands of layouts agrees with what prices the finalists."""
    for text in (
        "pp=8,accumulate=32,dp=8",
        "pp=4,schedule=interleaved,vpp=4,accumulate=16,dp=16",
        "tp=8,dp=8",
        *(f"dp=8,pp=8,accumulate={n},schedule={kind}" for n in (4, 32) for kind in ("1f1b", "zb-h1", "zb-v")),
        *(f"dp=2,pp=8,cp=4,accumulate={n},schedule={kind}" for n in (4, 32) for kind in ("zb-v", "dualpipe-v")),
    ):
        found = case(text, seq_len=65536 if "cp" in text else 4096)
        formula = step_times(count_work(found), constants_for(found)).total
        assert price(found).seconds == pytest.approx(float(formula), rel=0.1), text


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "dualpipe-v", "interleaved"])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_long_steps_are_extrapolated_from_the_steady_state(pp, schedule):
    """Only part of a long step is simulated: it must be what simulating all of it gives."""
    found = case(f"pp={pp},accumulate=1024,dp=8,schedule={schedule}")
    whole = step_timeline(found).duration
    others = {"dp", "update", "rest"}
    assert sum(s for name, s in price(found).times.items() if name not in others) == pytest.approx(whole, rel=1e-3)


def test_more_microbatches_shrink_the_bubble_and_recomputation_the_memory():
    few, many = (price(case(f"pp=8,dp=8,accumulate={count}")) for count in (8, 64))
    assert many.bubble < few.bubble
    kept, again = (peak_memory(case(f"dp=64,zero=3,microbatch=4,recompute={text}")) for text in ("none", "full"))
    assert again.total < kept.total


def test_the_first_stages_hold_more_activations():
    found = case("pp=8,dp=8,accumulate=16")
    first, last = (stage_memory(found, stage).parts["activations"] for stage in (0, 7))
    assert first == pytest.approx(8 * last, rel=1e-6)


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_answers_in_json_and_writes_a_page(tmp_path):
    page = tmp_path / "plan.html"
    arguments = ["plan", "llama-1b", "--cluster", "8xh100", "--batch", "64", "--json", "--html", str(page)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    plans = json.loads(result.stdout)["plans"]
    keys = (
        "layout precision program runnable fits step_s step_s_low step_s_high extrapolated tokens_per_s mfu hfu bubble "
        "memory_bytes memory time reasons parameters active_parameters imbalance all_to_all_bytes"
    )
    assert set(plans[0]) == {*keys.split()}
    assert plans == sorted(plans, key=lambda plan: plan["step_s"])
    assert plans[0]["layout"] in page.read_text(encoding="utf-8")


def test_one_layout_can_be_priced_and_one_that_does_not_fit_says_so():
    arguments = ["plan", "llama-70b", "--cluster", "64xh100", "--batch", "64", "--json", "--layout"]
    assert CliRunner().invoke(app, [*arguments, "tp=8,pp=8,accumulate=64"]).exit_code == 0
    result = CliRunner().invoke(app, [*arguments, "dp=64,zero=0"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["plans"][0]["fits"] is False


def test_all_faults_are_reported_at_once():
    result = CliRunner().invoke(app, ["plan", "lama-8b", "--cluster", "0xh10", "--batch", "-3", "--fix", "tpp=2"])
    assert result.exit_code == 2
    for word in ("lama-8b", "0xh10", "batch=-3", "tpp"):
        assert word in result.stderr


def test_train_takes_the_planners_layout(tmp_path):
    config = Config.load(None, ["batch=8"])
    chosen, words = with_planned_layout(config, "auto", 2)
    assert Layout.parse(chosen.layout).world == 2
    assert "predicted" in words
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"plans": [{"layout": "dp=2,zero=1"}]}))
    assert with_planned_layout(config, str(file), 2)[0] == replace(config, layout="dp=2,zero=1")
    with pytest.raises(ec.ValidationError, match="cannot be read"):
        with_planned_layout(config, str(tmp_path / "none.json"), 2)
    with pytest.raises(ec.ValidationError, match="is incompatible with layout"):
        with_planned_layout(Config.load(None, ["layout=dp=2"]), "auto", 2)


# -- 8 bits -----------------------------------------------------------------------------------------------------------


def test_an_fp8_plan_trains_in_fp8(tmp_path):
    arguments = ["plan", "llama-8b", "--cluster", "8xh100", "--batch", "64", "--precision", "fp8", "--json"]
    result = CliRunner().invoke(app, arguments)
    file = tmp_path / "plan.json"
    file.write_text(result.stdout)
    asked = Config.load(None, ["model=llama-8b", "batch=64", "seq_len=4096"])
    chosen, words = with_planned_layout(asked, str(file), 8)
    assert (chosen.dtype, chosen.precision.compute) == ("bfloat16", "fp8")
    assert chosen.layout == json.loads(result.stdout)["plans"][0]["layout"]
    assert "FP8" in words
    assert not [fault for fault in chosen.issues(world=8) if fault.key == "precision.compute"]
    by_row = replace(asked, dtype="bfloat16", precision=PrecisionConfig(compute="fp8-row"))
    assert with_planned_layout(by_row, str(file), 8)[0].precision.compute == "fp8-row"


def test_the_train_command_of_a_plan_sets_fp8():
    best = search_plans(request(precision="fp8"), top=1)[0]
    assert best.runnable
    assert "--set dtype=bfloat16 --set precision.compute=fp8" in train_command(best, "llama-8b")
    assert "precision.compute" not in train_command(search_plans(request(), top=1)[0], "llama-8b")


def test_fp8_plans_may_defer_weight_gradients():
    """They were refused: fp8 GEMMs had no split backward."""
    asked = request("llama-70b", "64xh100", 256, 4096, precision="fp8")
    for schedule in ("zb-h1", "zb-v", "dualpipe-v"):
        assert price(asked.scenario(Layout.parse(f"dp=8,pp=8,schedule={schedule},accumulate=32"))).runnable
    (best,) = search_plans(replace(asked, fixed={"schedule": "zb-h1", "pp": 8}), top=1)
    assert best.runnable


def test_dtypes_that_train_lacks_are_plan_only():
    layout = Layout.parse("dp=8")
    runnable = {
        kind for kind in PRECISIONS if price(request(precision=kind, devices="8xb200").scenario(layout)).runnable
    }
    assert runnable == {"bf16", "fp16", "fp8", "fp32"}


@pytest.mark.parametrize("fixed", ["schedule=gpipe", "schedule=zb-h1", "shard=4", "vpp=4", "tp=4", "zero=3"])
def test_every_plan_passes_the_rules_of_training(fixed):
    """A schedule without a pipeline, a shard that does not divide: what `train` would refuse is no plan."""
    arguments = ["plan", "llama-8b", "--cluster", "16xh100", "--batch", "64", "--fix", fixed, "--json"]
    plans = json.loads(CliRunner().invoke(app, arguments).stdout)["plans"]
    assert plans
    for plan in plans:
        check_layout(
            plan["layout"],
            world=Layout.parse(plan["layout"]).world,
            batch=64,
            model=model_config.find_model("llama-8b"),
        )


def test_one_device_more_is_not_slower_and_slow_devices_can_stay_idle():
    def seconds(devices):
        return search_plans(request("llama-8b", devices, 512, 4096))[0].seconds

    alone = seconds("64xh100")
    assert seconds("65xh100") <= alone
    assert seconds("64xh100+8xv100") <= alone


def test_inter_node_collectives_use_inter_node_links():
    near = request("llama-8b", "32xh100", 64, 4096)
    slow = cluster.parse_cluster("32xh100")
    slow = replace(slow, inter_node=replace(slow.inter_node, bandwidth=1e6))
    layout = Layout.parse("dp=4,tp=2,pp=4,accumulate=16")
    assert price(replace(near, cluster=slow).scenario(layout)).seconds > 2 * price(near.scenario(layout)).seconds


def test_dtypes_that_a_device_lacks_are_refused():
    result = CliRunner().invoke(app, ["plan", "llama-8b", "--cluster", "8xa100-80", "--precision", "fp8"])
    assert result.exit_code == 2
    assert "legal: bf16, fp16, fp32" in result.stderr


def test_hfu_counts_recomputed_layers_without_the_head():
    plan = price(case("dp=64,recompute=full", "llama-1b"))
    shape = resolve_shape("llama-1b")
    layers = shape.flops(4096) - 2 * shape.head_parameters
    assert plan.hfu / plan.mfu == pytest.approx(1 + layers / shape.train_flops(4096))


def test_cost_prefers_fewer_devices_where_they_scale_badly():
    fast, cheap = (
        search_plans(request("llama-1b", "16xh100", 32, 2048, objective=name))[0] for name in ("time", "cost")
    )
    assert cheap.seconds * cheap.layout.world <= fast.seconds * fast.layout.world


def test_offloaded_states_must_fit_the_host():
    asked = request("llama-405b", "8xh200", 8, 4096, plan_only=True, fixed={"offload": "params"})
    assert search_plans(asked) == []
    assert "beyond the host" in least_memory_plan(asked).memory.parts


@pytest.mark.parametrize("objective", ["cost", "energy", "devices"])
def test_other_objectives_of_a_large_cluster_are_answered(objective):
    assert search_plans(request("llama-8b", "1000xh100", 1000, 4096, objective=objective), top=1)


@pytest.mark.parametrize("model", ["gpt2-124m", "llama-1b", "llama-8b", "mixtral-8x7b", "deepseek-v3"])
def test_param_groups_hold_every_parameter_once(model):
    """On one device, norms and positions outside the layers too."""
    found = case("dp=1", model, "1xh100")
    assert sum(unit.numel * n for unit, n in param_groups(found, 0)) == resolve_shape(model).parameters


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp32"])
@pytest.mark.parametrize(
    ("devices", "batch", "seq_len", "model"),
    [
        ("8xh100", 16, 4096, "llama-1b"),
        ("4xcpu", 16, 4096, "llama-1b"),
        ("8xh100", 4, 32768, "llama-1b"),
        ("16xh100", 16, 4096, "qwen3-30b-a3b"),
    ],
)
def test_no_layout_takes_less_than_the_bounds_say(devices, batch, seq_len, model, precision):
    asked = request(model, devices, batch, seq_len, precision=precision)
    c = constants_for(asked.scenario(Layout()))
    every = branch_bounds(asked, c)
    assert every == sorted(every)
    for bound in every[::7]:
        for layout in branch_layouts(asked, bound.branch):
            found = asked.scenario(layout)
            assert min_memory_bytes(asked, layout, bound.activation_bytes) <= peak_memory(found, c).total, layout
            assert bound.objective <= (1 + 1e-9) * step_times(count_work(found), c).total, layout


def test_the_bound_of_memory_holds_for_one_microbatch_in_flight():
    """The naive schedule fills no pipeline: a rank holds the activations of its own layers, once."""
    asked = request("llama-1b", "8xh100", 16, 32768, fixed={"schedule": "naive", "pp": 4})
    c = constants_for(asked.scenario(Layout()))
    bounds = branch_bounds(asked, c)
    assert bounds
    for bound in bounds:
        for layout in branch_layouts(asked, bound.branch):
            least = min_memory_bytes(asked, layout, bound.activation_bytes)
            assert least <= peak_memory(asked.scenario(layout), c).total, layout


@pytest.mark.parametrize(
    ("devices", "batch", "seq_len", "precision"),
    [
        ("8xh100", 64, 4096, "bf16"),
        ("12xa100-80", 96, 4096, "bf16"),
        ("8xh100", 64, 4096, "fp8"),
        ("16xh100", 4, 32768, "bf16"),
    ],
)
def test_closed_branches_hold_none_of_the_best(devices, batch, seq_len, precision):
    """The ten best by formula of all layouts that fit are found, unless simulation puts them behind all that are."""
    asked = request("llama-8b", devices, batch, seq_len, precision=precision)
    fitting = [c for c in map(asked.scenario, all_layouts(asked)) if peak_memory(c).total <= asked.cluster.memory]
    legal = [c for c in fitting if _is_legal(asked, c.layout)]
    ranked = sorted(legal, key=lambda c: (float(step_times(count_work(c), constants_for(c)).total), str(c.layout)))
    found = {str(plan.layout): plan.seconds for plan in search_plans(asked, top=20)}
    assert all(str(c.layout) in found or price(c).seconds >= max(found.values()) for c in ranked[:10])


@pytest.mark.parametrize(
    ("program", "stages"), [("echelon", {0, 1, 2, 3}), ("megatron", {0, 1, 3}), ("torch", {0, 1, 3})]
)
def test_other_programs_have_no_zero_2_under_a_pipeline(program, stages):
    """They reduce once a step there: zero=1 and zero=2 were two rows with the same seconds."""
    fixed = {"pp": 2, "tp": 1, "microbatch": 1, "schedule": "1f1b", "recompute": "full"}
    layouts = list(all_layouts(request(program=program, fixed=fixed)))
    assert {layout.zero for layout in layouts} == stages
    alone = list(all_layouts(request(program=program, fixed={**fixed, "pp": 1})))
    assert {layout.zero for layout in alone} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("program", "policy"),
    [("torch", "selective"), ("torch-compiled", "selective"), ("xla", "selective"), ("megatron", "ops")],
)
def test_the_search_tries_what_a_program_recomputes(program, policy):
    fixed = {"pp": 1, "tp": 1, "dp": 8, "microbatch": 1}
    layouts = list(all_layouts(request(program=program, fixed=fixed)))
    assert policy in {layout.recompute for layout in layouts}
    other = "deepspeed"
    layouts = list(all_layouts(request(program=other, fixed=fixed)))
    assert policy not in {layout.recompute for layout in layouts}
