"""The rules by which step_time.py, reached_rates.py and the counts before them price a step, one at a time, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from echelon.layout import Layout
from echelon.planning.calibrate.constants import FITTED_CONSTANTS as C
from echelon.planning.calibrate.programs import PROGRAMS
from echelon.planning.cluster.cluster import parse_cluster
from echelon.planning.cluster.device_kinds import DEVICE_KINDS
from echelon.planning.cluster.link_time import exposed_time
from echelon.planning.cost import elementwise_traffic
from echelon.planning.cost.count_work import count_work
from echelon.planning.cost.reached_rates import BISECTION_SHARE, MESSAGE_SECONDS, ReachedRates, reached_rates
from echelon.planning.cost.step_time import (
    OLD_MMA_SPEED,
    StepTimes,
    _last_passes,
    microbatch_time,
    program_profile,
    recompute_time,
    step_times,
)
from echelon.planning.cost.step_work import ExpertTraffic, StepWork
from echelon.planning.model.model_sources import resolve_shape
from echelon.planning.scenario import Scenario


def work(cluster: str, layout: str, model: str = "llama-8b", **more) -> StepWork:
    more = {"program": "megatron", "seq_len": 4096, **more}
    shape = resolve_shape(model)
    return count_work(Scenario(shape=shape, cluster=parse_cluster(cluster), layout=Layout.parse(layout), **more))


def rates(one: StepWork) -> ReachedRates:
    return reached_rates(one.microbatch.device, C, program_profile(one.microbatch.program, C))


def times(*args, **more) -> StepTimes:
    return step_times(work(*args, **more), C)


# -- groups of data parallelism ---------------------------------------------------------------------------------------


def test_hsdp_gathers_inside_nodes_and_reduces_between_them() -> None:
    dp = work("64xh100:eth", "dp=64,zero=3,shard=8,microbatch=2,accumulate=8,recompute=full").dp
    assert (dp.shards.ranks, dp.shards.ranks_per_node, dp.shards.in_node) == (8, 8, True)
    assert (dp.replicas.ranks, dp.replicas.ranks_per_node, dp.replicas.in_node) == (8, 1, False)
    params = resolve_shape("llama-8b").parameters
    assert dp.replicas.reduce_bytes == pytest.approx(2 * 7 / 8 * 4 * params / 8, rel=0.01)
    assert dp.replicas.gather_bytes == 0


def test_hsdp_is_faster_than_fsdp_where_nodes_are_far() -> None:
    plain = "dp=64,zero=3,microbatch=2,accumulate=8,recompute=full"
    inside, across = (float(times("64xh100:eth", text).dp) for text in (f"{plain},shard=8", plain))
    assert inside < across / 4
    large = "dp=4096,zero=3,microbatch=1"
    assert times("4096xh100", f"{large},shard=8").total < times("4096xh100", large).total


def test_replicas_of_hsdp_are_reduced_once_a_step_behind_the_last_backward() -> None:
    """What backward of one microbatch does not hide is exposed, whatever the step hides of gathers."""
    hybrid, slow = "dp=64,zero=3,shard=8,microbatch=1,accumulate=8", replace(C, inter_node=C.inter_node / 50)
    one = work("64xh100:eth", hybrid)
    wire = float(one.dp.replicas.wire_bytes) / (one.microbatch.device.inter_node_bandwidth * C.inter_node)
    waits = float(step_times(one, slow).dp - step_times(one, C).dp)
    assert waits == pytest.approx(49 * wire, rel=0.2)


def test_experts_are_reduced_by_the_ranks_that_hold_the_same_ones() -> None:
    dp = work("64xh100", "dp=64,zero=1,ep=8,microbatch=1", "mixtral-8x7b").dp
    assert (dp.shards.ranks, dp.shards.ranks_per_node) == (64, 8)
    assert (dp.expert_shards.ranks, dp.expert_shards.ranks_per_node) == (8, 1)
    assert dp.wire_bytes == dp.shards.wire_bytes + dp.expert_shards.wire_bytes


def test_fsdp_exposes_a_layer_of_a_stage_and_slows_what_hides_it() -> None:
    """A transfer that compute hides: one layer of those of the rank, and a share for the memory that both use."""
    for layout, layers in (("dp=8,zero=3,microbatch=8", 32), ("dp=4,zero=3,pp=2,microbatch=8,accumulate=2", 16)):
        one = work("8xh100", layout)
        group = one.dp.shards
        bandwidth = float(rates(one).intra_node_bandwidth)
        latency = float(rates(one).group_latency(group.ranks_per_node, 1)) * group.num_collectives
        total = group.wire_bytes / bandwidth + latency
        assert float(step_times(one, C).dp) == pytest.approx(total * (1 / layers + C.contention), rel=0.1)


def test_interleaved_stages_hide_reductions_behind_a_round_of_microbatches() -> None:
    plain, interleaved = (
        work("64xh100", f"dp=16,pp=4,microbatch=1,accumulate=16{more}") for more in ("", ",schedule=interleaved,vpp=4")
    )
    assert (float(_last_passes(plain)), float(_last_passes(interleaved))) == (0.25, 1.0)


# -- collectives ------------------------------------------------------------------------------------------------------


def test_an_all_reduce_takes_a_tree_where_it_is_quicker() -> None:
    one = rates(work("64xh100", "dp=64"))
    launch, inside = float(one.latency), 7 * C.hop_intra
    assert one.group_latency(8, 2, reduces_all=True) == pytest.approx(launch + 2 * (inside + C.hop_inter))
    assert one.group_latency(8, 1024, reduces_all=True) == pytest.approx(launch + 2 * (inside + 10 * C.hop_inter))
    assert one.group_latency(8, 1024) == pytest.approx(launch + 1024 * inside + 1023 * C.hop_inter)


def test_all_to_all_takes_the_slower_link_messages_and_the_routes_beyond_a_leaf() -> None:
    one = rates(work("64xh100", "dp=64"))
    inside, outside = float(one.intra_node_bandwidth), float(one.inter_node_bandwidth)
    near = ExpertTraffic(intra_node_bytes=1e9, inter_node_bytes=1e6)
    assert one.all_to_all_time(near) == pytest.approx(1e9 / inside)
    far = ExpertTraffic(intra_node_bytes=1e6, inter_node_bytes=1e9, leaf_bytes=5e8, num_messages=1000)
    seconds = (5e8 + 5e8 / BISECTION_SHARE) / outside + 1000 * MESSAGE_SECONDS
    assert one.all_to_all_time(far) == pytest.approx(seconds)


def test_all_to_alls_beside_another_microbatch_slow_its_compute() -> None:
    """But those of the first passes of a step and of its last, which have no other beside them."""
    layout = "dp=8,pp=8,ep=8,schedule=interleaved,vpp=4,microbatch=2,accumulate="
    alone, paired, short = (
        work("64xh100", layout + more, "mixtral-8x7b", pairs_microbatches=pairs)
        for more, pairs in (("128", False), ("128", True), ("8", True))
    )
    seconds, share = float(rates(alone).all_to_all_time(alone.microbatch.ep)), 1 - 8 / 128
    exposed = seconds * C.ep_exposed
    assert microbatch_time(alone, C).ep == microbatch_time(short, C).ep == pytest.approx(exposed)
    hidden = (1 - share) * exposed + share * seconds * C.contention
    assert microbatch_time(paired, C).ep == pytest.approx(hidden, rel=0.02)


def test_tokens_beyond_a_leaf_switch_are_counted() -> None:
    small, large = (work(f"{n}xh100", f"dp={n},ep={n},microbatch=1", "deepseek-v3").microbatch.ep for n in (64, 256))
    assert small.leaf_bytes == large.leaf_bytes == 0  # up to 32 nodes
    assert large.num_messages > small.num_messages > 0


# -- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mi300x", "gaudi3", "l40s"])
def test_low_precision_loses_elsewhere_what_it_does_on_hopper(kind: str) -> None:
    wide, narrow = (work(f"8x{kind}", "dp=8", precision=precision) for precision in ("bf16", "fp8"))
    gain = float(rates(narrow).gemm_flops / rates(wide).gemm_flops)
    peaks = DEVICE_KINDS[kind].peak("fp8") / DEVICE_KINDS[kind].peak("bf16")
    assert gain == pytest.approx(peaks * C.hopper_fp8 / C.hopper, rel=1e-6)


@pytest.mark.parametrize(("kind", "overlaps"), [("h100", True), ("b200", True), ("a100-80", False), ("mi300x", False)])
def test_tensor_parallelism_is_overlapped_on_named_generations(kind: str, overlaps: bool) -> None:
    profiles = tuple(replace(profile, tp_overlap=0.0) for profile in C.profiles)
    one = work(f"8x{kind}", "tp=8,microbatch=1")
    shown, hidden = (float(microbatch_time(one, c).tp) for c in (replace(C, profiles=profiles), C))
    assert (hidden < 0.5 * shown) if overlaps else hidden == shown


@pytest.mark.parametrize(("kind", "share"), [("h100", OLD_MMA_SPEED), ("a100-80", 1.0), ("mi300x", 1.0)])
def test_flash_attention_2_runs_ampere_instructions_on_hopper(kind: str, share: float) -> None:
    one = work(f"8x{kind}", "dp=8", attention_kernel="flash2")
    seconds = one.microbatch.attention.flops / (one.microbatch.device.peak_flops_16bit * C.flash2 * share)
    assert float(microbatch_time(one, C).attention) == pytest.approx(seconds)


def test_a_device_with_fewer_watts_holds_a_lower_clock() -> None:
    full = DEVICE_KINDS["h100"]
    assert full.power_share == pytest.approx(1.0, abs=0.01)
    assert replace(full, watts=full.watts / 4).power_share == pytest.approx(0.5, abs=0.01)


# -- programs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("program", "stops"), [("torch", True), ("xla", True), ("megatron", False)])
def test_recomputation_stops_before_the_last_gemm(program: str, stops: bool) -> None:
    """Of the 218 million weights of a layer of 8B, 4,096 x 14,336 are of the last GEMM."""
    one = work("8xh100", "dp=8,microbatch=1,recompute=full", program=program)
    m = microbatch_time(one, C)
    last = 4096 * 14336 / (4096 * (2 * 4096 + 2 * 1024 + 3 * 14336))
    assert float(one.microbatch.recompute.gemms) == pytest.approx(-last if stops else 0.0)
    assert float(recompute_time(one, m)) == pytest.approx(float(m.forward - last * stops * m.gemms))


def test_casts_are_two_kernels_where_none_does_both_and_for_grouped_gemms() -> None:
    def cast(program: str, model: str) -> tuple[float, float]:
        traffic = work("8xh100", "dp=8", model, precision="fp8", program=program).microbatch.elementwise
        return float(traffic.cast), float(traffic.norms + traffic.other) / 2

    one, moved = cast("megatron", "llama-8b")
    assert one == pytest.approx(moved)
    assert cast("torch-compiled", "llama-8b")[0] == pytest.approx(elementwise_traffic.CAST_KERNELS * moved)
    experts, moved = cast("megatron", "mixtral-8x7b")
    assert moved < experts < elementwise_traffic.EXPERT_CASTS * moved


@pytest.mark.parametrize(("program", "longer"), [("torch", 2 * 8 / 9), ("megatron", 1.0)])
def test_the_last_slice_of_a_sequence_attends_to_all_others(program: str, longer: float) -> None:
    case = {"seq_len": 32768, "program": program}
    one = work("8xh100", "cp=8,microbatch=1", **case).microbatch.attention.flops
    balanced = work("8xh100", "cp=8,microbatch=1", seq_len=32768, program="megatron").microbatch.attention.flops
    assert float(one / balanced) == pytest.approx(longer)


def test_the_host_launches_for_each_layer_by_its_program() -> None:
    launches = {
        name: float(microbatch_time(work("8xh100", "dp=8", program=name), C).kernel_launches) / 32 / C.launch
        for name in PROGRAMS
        if name != "plain"
    }
    assert launches["megatron"] == 1
    assert launches["torch"] == launches["torch-compiled"] == pytest.approx(0.55)
    assert launches["xla"] == pytest.approx(0.1)


def test_exposed_time_is_smooth() -> None:
    assert exposed_time(np.array([1.0, 2.0]), np.array([4.0, 0.0])) == pytest.approx([0.0, 2.0], abs=0.01)


def test_stages_on_other_nodes_send_over_the_links_between_nodes() -> None:
    near, far = (
        float(microbatch_time(work(cluster, "pp=8,microbatch=1,accumulate=8"), C).pp)
        for cluster in ("8xh100", "8xh100:eth")
    )
    assert near == far, "all stages are in a node"
    across = work("64xh100", "dp=1,tp=8,pp=8,microbatch=1,accumulate=8")
    size = 4096 * 4096 * 2 / 8
    seconds = size / (50e9 * C.inter_node) + across.microbatch.device.latency
    assert float(microbatch_time(across, C).pp) == pytest.approx(seconds)


def test_collectives_of_tensor_parallelism_hop_over_ranks_and_nodes() -> None:
    """A short sequence is all latency: seven hops in a node, and over two nodes 15, one of them between."""
    one, two = (work("16xh100", f"{text},microbatch=1", seq_len=16, program="torch") for text in ("dp=2,tp=8", "tp=16"))
    without = replace(C, hop_intra=0.0, hop_inter=0.0)
    inside, both = (float(microbatch_time(each, C).tp - microbatch_time(each, without).tp) for each in (one, two))
    count = float(one.microbatch.tp.num_collectives)
    assert inside == pytest.approx(count * 7 * C.hop_intra)
    assert both == pytest.approx(count * (14 * C.hop_intra + C.hop_inter))
