"""What a step exposes of its communication, by hand: FSDP a layer ahead, reductions once a step, links side by side."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from echelon.layout import Layout
from echelon.planning.calibrate.constants import FITTED_CONSTANTS
from echelon.planning.calibrate.programs import PROGRAMS
from echelon.planning.cluster.cluster import parse_cluster
from echelon.planning.cost.count_work import count_work
from echelon.planning.cost.reached_rates import reached_rates
from echelon.planning.cost.step_time import StepTimes, dp_overlap_time, microbatch_time, step_times
from echelon.planning.cost.step_work import StepWork, stack_work
from echelon.planning.model.model_sources import resolve_shape
from echelon.planning.scenario import Scenario

QUIET = replace(FITTED_CONSTANTS, contention=0.0, hop_intra=0.0)
"""without what hidden communication costs"""


def count(layout: str, cluster: str = "8xh100", model: str = "llama-8b", **options) -> StepWork:
    setup = {"shape": resolve_shape(model), "seq_len": 4096, "program": "torch", **options}
    return count_work(Scenario(cluster=parse_cluster(cluster), layout=Layout.parse(layout), **setup))


def with_gathers_of(work: StepWork, forwards: float) -> StepWork:
    """The same step on a link on which gathers of a microbatch take this many forwards."""
    seconds = forwards * float(microbatch_time(work, QUIET).forward)
    bandwidth = float(work.dp.shards.gather_bytes) / seconds / QUIET.intra_node
    device = replace(work.microbatch.device, intra_node_bandwidth=bandwidth, latency=0.0)
    return replace(work, microbatch=replace(work.microbatch, device=device))


def exposed(work: StepWork) -> float:
    return float(step_times(work, QUIET).dp)


def link_seconds(work: StepWork) -> float:
    rates = reached_rates(work.microbatch.device, QUIET)
    return float(work.dp.wire_bytes / rates.intra_node_bandwidth)


def test_fsdp_exposes_the_first_layer() -> None:
    """Nothing runs beside its gather, and nothing beside the reduction of the last gradients."""
    work = with_gathers_of(count("dp=8,zero=3,microbatch=1"), 0.01)
    assert exposed(work) == pytest.approx(link_seconds(work) / 32, rel=0.01)


def test_fsdp_gathers_half_in_forward_and_half_in_backward() -> None:
    """Gathers of 1.5 forwards, and reductions of half as many bytes: 0.75 forwards beside a forward, the rest beside a
    backward of two. Had forward to hide all gathers, it would expose half a forward."""
    work = with_gathers_of(count("dp=8,zero=3,microbatch=1", reduce_bytes=2), 1.5)
    assert float(work.dp.shards.reduce_bytes) == pytest.approx(float(work.dp.shards.gather_bytes) / 2, rel=0.01)
    forward = float(microbatch_time(work, QUIET).forward)
    assert link_seconds(work) / 32 < exposed(work) < link_seconds(work) / 32 + 0.05 * forward


def test_fsdp_exposes_what_compute_does_not_hide() -> None:
    """Gathers and reductions of 30 forwards, beside a step of three."""
    work = with_gathers_of(count("dp=8,zero=3,microbatch=1"), 20)
    busy = float(step_times(work, QUIET).total - step_times(work, QUIET).dp)
    assert link_seconds(work) > 9 * busy
    assert exposed(work) == pytest.approx((1 + 1 / 32) * link_seconds(work) - busy, rel=0.03)


def test_what_is_hidden_slows_the_compute_beside_it() -> None:
    work = with_gathers_of(count("dp=8,zero=3,microbatch=1"), 0.5)
    slowed = float(step_times(work, replace(QUIET, contention=0.2)).dp) - exposed(work)
    assert slowed == pytest.approx(0.2 * link_seconds(work), rel=1e-6)


@pytest.mark.parametrize(("microbatches", "passes"), [(2, 2), (4, 4), (16, 4)])
def test_interleaved_stages_reduce_while_other_chunks_pass(microbatches: int, passes: int) -> None:
    """The first chunk's gradients are complete when as many microbatches as stages have yet to pass the others."""
    layout = f"dp=2,pp=4,zero=1,accumulate={microbatches}"
    plain, interleaved = count(layout), count(f"{layout},schedule=interleaved,vpp=2")
    hidden = [float(dp_overlap_time(work, QUIET, 100.0)) for work in (plain, interleaved)]
    assert hidden[1] == pytest.approx(passes * hidden[0], rel=1e-6)


def test_zero_2_of_other_programs_reduces_once_a_step_under_a_pipeline() -> None:
    """MegaScale was predicted 4.4 times too slow: each of its microbatches was reduced, with nothing to hide it."""

    def reduced(layout: str, program: str) -> tuple[float, bool]:
        work = count(layout, "64xh100", program=program)
        return float(work.dp.shards.reduce_bytes + work.dp.replicas.reduce_bytes), bool(work.dp.every_microbatch)

    once, often = ("dp=8,pp=8,zero=2,accumulate=8", "dp=8,pp=8,zero=2,accumulate=32")
    assert reduced(once, "megatron") == reduced(often, "megatron") == (reduced(often, "megatron")[0], False)
    assert reduced(often, "megatron")[0] == pytest.approx(reduced(often.replace("zero=2", "zero=1"), "megatron")[0])
    own = reduced(once, "echelon"), reduced(often, "echelon")
    assert own[0][1]
    assert own[1][0] == pytest.approx(4 * own[0][0])
    assert reduced("dp=64,zero=2,accumulate=8", "megatron")[1]


def test_tokens_pass_the_links_in_a_node_and_between_nodes_at_once() -> None:
    """Of what a rank sends, 8 of 15 parts leave its node, over links that are a ninth as fast: those set the time."""
    work = count("dp=16,ep=16,microbatch=1", "16xh100", "deepseek-v2", program="megatron")
    device = replace(work.microbatch.device, intra_node_bandwidth=1000 * work.microbatch.device.intra_node_bandwidth)
    faster = replace(work, microbatch=replace(work.microbatch, device=device))
    assert work.microbatch.ep.intra_node_bytes > 0.8 * work.microbatch.ep.inter_node_bytes
    assert float(step_times(work).ep) == float(step_times(faster).ep) > 0


def test_programs_priced_together_keep_their_profiles() -> None:
    """A fit prices all runs at once: each has the profile of its program, and the times that it has alone."""
    works = [count("dp=4,tp=2,zero=1,accumulate=2", program=program) for program in PROGRAMS if program != "plain"]
    together = step_times(stack_work(works))
    for field in fields(StepTimes):
        alone = [float(getattr(step_times(work), field.name)) for work in works]
        assert getattr(together, field.name) == pytest.approx(alone), field.name
    assert len(set(together.total)) > len(works) // 2


def test_unbalanced_context_parallelism_waits_for_its_last_rank() -> None:
    """The last of four slices attends to all four: 1.6 times the mean."""
    balanced, unbalanced = (count("dp=2,cp=4", program=program).microbatch for program in ("megatron", "torch"))
    assert unbalanced.attention.flops == pytest.approx(1.6 * balanced.attention.flops)


def test_a_device_with_less_power_for_its_flops_is_slower() -> None:
    """An A100 of a quarter of the watts holds half its clock; one that states none holds all of it."""

    def peak(watts: float) -> float:
        cluster = parse_cluster("8xa100-80").with_devices(lambda device: replace(device, watts=watts))
        scenario = Scenario(shape=resolve_shape("llama-1b"), cluster=cluster, layout=Layout.parse("dp=8"), seq_len=1024)
        return float(count_work(scenario).microbatch.device.peak_flops)

    assert peak(400) == peak(800) == peak(0) == 312e12
    assert peak(100) == pytest.approx(156e12, rel=0.01)


@pytest.mark.parametrize(("ranks", "buckets"), [(8, 201), (64, 126), (512, 16)])
def test_megatron_reduces_and_gathers_by_buckets_that_grow_with_the_ranks(ranks: int, buckets: int) -> None:
    """Of 8.03 billion parameters: 40 million each, or a million for each rank, the default of Megatron-Core. With a
    collective for each layer, the hops of a ring of 300 nodes took as long as the bytes."""
    layout, cluster = f"dp={ranks},zero=1,microbatch=1", f"{ranks}xh100"
    assert count(layout, cluster, program="megatron").dp.shards.num_collectives == 2 * buckets
    assert count(layout, cluster, program="deepspeed").dp.shards.num_collectives == 2 * 33
    replicated = count(f"dp={ranks},zero=0,microbatch=1", cluster, program="megatron").dp
    assert (replicated.shards.num_collectives, replicated.replicas.num_collectives) == (0, buckets)
