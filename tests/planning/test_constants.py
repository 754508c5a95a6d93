"""Each fitted constant has a plausible value, and changes the prediction of what it names.

The bars of the score (test_scoring.py) hold with any of two dozen of them at zero: published runs fix them together.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest

from echelon.layout import Layout
from echelon.planning.calibrate import constants
from echelon.planning.calibrate.constants import FITTED_CONSTANTS, NATIVE_OVERRIDES, Constants
from echelon.planning.calibrate.programs import PROGRAMS
from echelon.planning.cluster.cluster import parse_cluster
from echelon.planning.cost import activation_memory
from echelon.planning.cost.count_work import count_work
from echelon.planning.cost.param_group_traffic import param_groups
from echelon.planning.cost.step_time import step_times
from echelon.planning.model.model_sources import resolve_shape
from echelon.planning.priced_plan import price
from echelon.planning.scenario import Scenario


def case(cluster: str = "16xh100", layout: str = "dp=2,tp=8,microbatch=1", model: str = "llama-8b", **more) -> Scenario:
    more = {"program": "megatron", "seq_len": 4096, **more}
    return Scenario(shape=resolve_shape(model), cluster=parse_cluster(cluster), layout=Layout.parse(layout), **more)


PLAUSIBLE = {
    # Shares of a stated peak: large GEMMs reach at least a third, and none exceeds it.
    **dict.fromkeys(("volta", "ampere", "hopper", "blackwell", "cpu", "hopper_fp8", "blackwell_fp8", "fp4"), (0.33, 1)),
    **dict.fromkeys(("accelerator", "tpu"), (0.33, 1)),
    **dict.fromkeys(("flash1", "flash2", "best_attention", "blackwell_attention"), (0.1, 0.8)),
    **dict.fromkeys(("memory_bandwidth", "intra_node", "inter_node"), (0.5, 1)),
    "edge": (16, 256),  # around a tile of a GEMM
    "expert_edge": (16, 4096),
    "misaligned_gemms": (0.1, 2),
    "blockwise_attention": (0.9, 1.2),
    # 2 bytes of a score written and read several times: softmax, mask, dropout
    "fused_score_bytes": (4, 20),
    "plain_score_bytes": (12, 60),
    "unfused_norms": (2, 16),
    "cast_bytes": (3, 12),  # at least 2 read and 1 written
    "launch": (2e-5, 4e-3),  # a dozen kernels or more, of some microseconds each, or of the host's Python
    "step_overhead": (5e-3, 0.05),  # launches of the update, its norm, logging
    "launch_experts": (1e-4, 1e-2),
    "single_device_share": (0.1, 1),
    # shares that are exposed, and what hides
    **dict.fromkeys(("ep_exposed", "pp_exposed", "contention"), (0.05, 1)),
    # a switch and a wire of a ring: within a node some microseconds, between nodes more
    "hop_intra": (5e-7, 1e-5),
    "hop_inter": (2e-6, 5e-5),
    "congestion": (0.001, 0.2),
    "update_bytes": (30, 60),  # two moments and a master weight, read and written; gradients zeroed, summed, scaled
    "activation_slack": (0.01, 0.5),
    "backward_working": (1, 20),
    "context_gib": (0.5, 8),
    "unfused_norm_saved": (2, 12),
    "spread_own": (0.03, 0.3),
    "spread_far": (1, 3),
    "spread": (0.03, 0.3),
    "spread_experts": (0.05, 0.6),
}
STATED_ZEROS = {"cast_bytes", "single_device_share"}
"""overrides of our kernels that are zero for a reason that stands beside them"""

FSDP = {"layout": "dp=16,zero=3,microbatch=1"}
PIPELINE = {"layout": "pp=16,microbatch=1,accumulate=16"}
RESPONDS: dict[str, tuple[Scenario, str, int]] = {
    "volta": (case("16xv100", precision="fp16"), "products", -1),
    "ampere": (case("16xa100-80"), "products", -1),
    "hopper": (case(), "products", -1),
    "blackwell": (case("16xb200"), "products", -1),
    "cpu": (case("2xcpu", "dp=2", "llama-tiny"), "products", -1),
    "accelerator": (case("16xmi300x"), "products", -1),
    "tpu": (case("16xtpu-v5p"), "products", -1),
    "hopper_fp8": (case(precision="fp8"), "products", -1),
    "blackwell_fp8": (case("16xb200", precision="fp8"), "products", -1),
    "fp4": (case("16xb200", precision="fp4"), "products", -1),
    "edge": (case(), "products", 1),
    "misaligned_gemms": (case(model="gpt2-774m", layout="tp=8,dp=2"), "products", 1),
    "expert_edge": (case(model="mixtral-8x7b", layout="dp=16,ep=8"), "products", 1),
    "flash1": (case(attention_kernel="flash1"), "attention", -1),
    "flash2": (case("16xa100-80", attention_kernel="flash2"), "attention", -1),
    "best_attention": (case(), "attention", -1),
    "blackwell_attention": (case("16xb200"), "attention", -1),
    "blockwise_attention": (case(layout="dp=2,cp=8", seq_len=32768), "attention", 1),
    "fused_score_bytes": (case(attention_kernel="fused"), "attention", 1),
    "plain_score_bytes": (case(attention_kernel="plain"), "attention", 1),
    "memory_bandwidth": (case(), "passing", -1),
    "unfused_norms": (case(fused_norms=False), "passing", 1),
    "cast_bytes": (case(precision="fp8"), "passing", 1),
    "launch": (case(model="llama-1b", seq_len=256), "launches", 1),
    "launch_experts": (case(model="mixtral-8x7b", layout="dp=2,tp=8,ep=8", seq_len=64), "launches", 1),
    "step_overhead": (case(), "rest", 1),
    "single_device_share": (case("1xh100", "dp=1", "llama-1b"), "rest", 1),
    "intra_node": (case(), "tp", -1),
    "inter_node": (case(**FSDP), "dp", -1),
    "ep_exposed": (case(model="mixtral-8x7b", layout="dp=16,ep=8"), "ep", 1),
    "pp_exposed": (case(**PIPELINE), "pp", 1),
    "hop_intra": (case(seq_len=64), "tp", 1),
    "hop_inter": (case("1024xh100", "dp=1024,zero=3,microbatch=1", seq_len=64), "dp", 1),
    "congestion": (case("1024xh100:eth", "dp=1024,zero=3,microbatch=1", seq_len=64), "dp", 1),
    "contention": (case(**FSDP), "dp", 1),
    "update_bytes": (case(), "update", 1),
    "activation_slack": (case(program="unknown"), "activations", 1),
    "backward_working": (
        case(layout="dp=1,tp=8,pp=2,microbatch=1", model="gpt3-175b", program="unknown"),
        "working",
        1,
    ),
    "context_gib": (case(), "reserve", 1),
    "spread": (case(), "interval", 1),
    "spread_own": (case("1xh200", "dp=1", "llama-1b", program="echelon"), "interval", 1),
    "spread_far": (case("16xl40s"), "interval", 1),
    "spread_experts": (case(model="mixtral-8x7b", layout="dp=16,ep=8"), "interval", 1),
}
"""scenario, what is predicted, and whether it grows with the constant"""


def predicted(scenario: Scenario, what: str, c: Constants = FITTED_CONSTANTS) -> float:
    plan = price(scenario, c)
    if what == "interval":
        return plan.high / plan.low
    if what == "pp":  # a priced plan simulates its transfers; the search takes them from the formula
        return float(step_times(count_work(scenario), c).pp)
    return plan.memory.parts[what] if what in plan.memory.parts else plan.times[what]


def test_every_constant_is_in_both_tables() -> None:
    names = {field.name for field in fields(Constants)}
    names.remove("profiles")  # tests of their own, below
    assert set(PLAUSIBLE) == names
    assert set(RESPONDS) == names - {"unfused_norm_saved"}  # a test of its own, below


@pytest.mark.parametrize("name", PLAUSIBLE)
def test_a_constant_has_a_plausible_value(name: str) -> None:
    low, high = PLAUSIBLE[name]
    assert low <= getattr(FITTED_CONSTANTS, name) <= high
    if name in NATIVE_OVERRIDES:
        assert low <= NATIVE_OVERRIDES[name] <= high or (name in STATED_ZEROS and NATIVE_OVERRIDES[name] == 0)


@pytest.mark.parametrize("name", RESPONDS)
def test_a_constant_changes_what_it_names(name: str) -> None:
    """By a tenth of the constant at most, and by a thousandth at least: not zero, and no other number in its place."""
    scenario, what, sign = RESPONDS[name]
    value = getattr(FITTED_CONSTANTS, name)
    before, after = (predicted(scenario, what, replace(FITTED_CONSTANTS, **{name: v})) for v in (value, 1.1 * value))
    change = sign * (after / before - 1)
    assert 1e-3 < change < 0.15, (what, before, after)


PROFILE_RESPONDS = {
    "speed": (case(), "products", -1),
    "traffic": (case(), "passing", 1),
    "overlap": (case(layout="dp=16,zero=1,microbatch=1", seq_len=1024), "dp", -1),
    "tp_overlap": (case(), "tp", -1),
    "host": (case(model="llama-1b", seq_len=256), "launches", 1),
}
PROFILE_PLAUSIBLE = {
    "speed": (0.8, 1.2),
    "traffic": (0.5, 2),
    "overlap": (0.05, 0.95),
    "tp_overlap": (0, 0.95),
    "host": (0.05, 1),
}
OVERLAPS_TP = ("megatron", "unknown")


@pytest.mark.parametrize("program", [name for name in PROGRAMS if name != "plain"])
@pytest.mark.parametrize("name", PROFILE_RESPONDS)
def test_a_profile_changes_the_times_of_its_program_alone(name: str, program: str) -> None:
    if name == "tp_overlap" and program not in OVERLAPS_TP:
        assert FITTED_CONSTANTS.profiles[PROGRAMS.index(program)].tp_overlap == 0
        return
    scenario, what, sign = PROFILE_RESPONDS[name]
    index, profile = PROGRAMS.index(program), FITTED_CONSTANTS.profiles[PROGRAMS.index(program)]
    low, high = PROFILE_PLAUSIBLE[name]
    assert low <= getattr(profile, name) <= high
    more = [*FITTED_CONSTANTS.profiles]
    more[index] = replace(profile, **{name: 1.05 * getattr(profile, name)})
    changed = replace(FITTED_CONSTANTS, profiles=tuple(more))
    for other in (program, next(one for one in PROGRAMS if one != program)):
        priced = replace(scenario, program=other)
        change = sign * (predicted(priced, what, changed) / predicted(priced, what) - 1)
        assert 1e-3 < change < 0.35 if other == program else change == 0


def test_unfused_norms_save_more(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = case(layout="dp=16,microbatch=1", fused_norms=False)

    def saved(one: Scenario) -> float:
        return activation_memory.saved_tensor_bytes(one, one.shape.layers[0][0])

    more = saved(scenario) - saved(replace(scenario, fused_norms=True))
    tokens, width = 4096, scenario.shape.width
    assert more == pytest.approx(2 * constants.FITTED_CONSTANTS.unfused_norm_saved * tokens * width)


# -- what a step's gradients and states cost, by hand -----------------------------------------------------------------


def test_a_reduction_that_nothing_hides_takes_its_bytes_over_the_link() -> None:
    """2 (n - 1) / n of the gradients, over the links of eight ranks a node, with a hop for each rank and node, in
    Megatron's buckets of 64 million parameters for 64 ranks."""
    scenario = case("64xa100-80", "dp=64,zero=0,microbatch=1", reduce_bytes=4)
    profiles = tuple(replace(profile, overlap=0.0) for profile in FITTED_CONSTANTS.profiles)
    c, ranks = replace(FITTED_CONSTANTS, profiles=profiles), 64
    wire = 2 * (ranks - 1) / ranks * 4 * scenario.shape.parameters
    inside = scenario.cluster.intra_node.bandwidth * c.intra_node
    across = 8 * scenario.cluster.inter_node.bandwidth * c.inter_node / (1 + 3 * c.congestion)
    hops = 2 * (7 * c.hop_intra + 3 * c.hop_inter)  # up and down a tree of eight nodes
    latency = (scenario.cluster.intra_node.latency + hops) * math.ceil(scenario.shape.parameters / 64e6)
    # Where both take equally long, half the corner of `exposed_time` is added: OVERLAP_SOFTNESS squared, over four.
    assert price(scenario, c).times["dp"] == pytest.approx(wire / min(inside, across) + latency, rel=0.01)


@pytest.mark.parametrize("cluster", ["64xh100", "64xh100:eth", "64xa100-80", "64xb200"])
def test_more_gradients_than_compute_hides_are_exposed(cluster: str) -> None:
    """A slower link, wider gradients or fewer tokens to hide behind: the exposed time grows, and is never zero."""
    plain = case(cluster, "dp=64,zero=1,microbatch=1", seq_len=512)
    exposed = price(plain).times["dp"]
    assert exposed > 0
    assert price(replace(plain, reduce_bytes=2)).times["dp"] < exposed
    assert price(replace(plain, seq_len=8192)).times.get("dp", 0.0) <= exposed
    sharded = price(replace(plain, layout=Layout.parse("dp=64,zero=3,microbatch=1"))).times["dp"]
    assert sharded > 0


OLD_VERSIONS = {"1f1b": 0, "2bw": 1, "pipedream": 7, "pipedream-vsync": 7}


@pytest.mark.parametrize(("schedule", "old_versions"), OLD_VERSIONS.items())
def test_weight_versions_take_memory(schedule: str, old_versions: int) -> None:
    """Each old version is one more copy of the bf16 weights, on the stage with the highest peak."""
    scenario = case("8xh100", f"pp=8,microbatch=1,accumulate=2,schedule={schedule}", program="echelon", seq_len=256)
    memory = price(scenario).memory
    weights = sum(n * group.shard_numel for group, n in param_groups(scenario, memory.stage))
    parts = memory.parts
    assert parts["parameters"] >= 2 * weights
    assert parts.get("versions", 0) == pytest.approx(old_versions * 2 * weights, rel=1e-6)


@pytest.mark.parametrize(
    "layout", ["dp=16,microbatch=1", "dp=2,tp=8,microbatch=1", "dp=4,pp=4,microbatch=1,accumulate=16"]
)
def test_recomputation_takes_the_time_of_a_forward(layout: str) -> None:
    plain, full = (price(case(layout=f"{layout},recompute={how}")) for how in ("none", "full"))
    assert full.times["recompute"] > 0.2 * (full.times["products"] + full.times["attention"])
    longer = full.seconds - plain.seconds
    assert longer == pytest.approx(full.times["recompute"], rel=0.35)
    assert all(seconds >= 0 for seconds in (*plain.times.values(), *full.times.values()))


def test_mfu_is_of_all_devices_and_hfu_counts_recomputation() -> None:
    plan = price(case(layout="dp=2,tp=8,microbatch=1,recompute=full"))
    flops = plan.scenario.shape.train_flops(4096) * 2 * 4096
    assert plan.mfu == pytest.approx(flops / plan.seconds / (16 * plan.scenario.cluster.device.peak("bf16")))
    assert plan.mfu < plan.hfu < 1.4 * plan.mfu
