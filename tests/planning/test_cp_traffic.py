"""Context parallelism in plans: bytes counted by hand, overlap, links, memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.layout import Layout
from echelon.planning.calibrate.constants import FITTED_CONSTANTS
from echelon.planning.cluster import cluster
from echelon.planning.cost import cp_traffic as cp_traffic_module
from echelon.planning.cost.count_work import count_work
from echelon.planning.cost.cp_time import cp_time
from echelon.planning.cost.cp_traffic import cp_bytes_per_token, cp_traffic, cp_working_bytes, saved_cp_bytes
from echelon.planning.cost.memory_model import peak_memory
from echelon.planning.cost.reached_rates import reached_rates
from echelon.planning.cost.recompute_cost import recompute_plan, saved_layer_bytes
from echelon.planning.cost.step_time import microbatch_time
from echelon.planning.cost.step_work import CpTraffic, RecomputeShares, stack_work
from echelon.planning.model.model_sources import resolve_shape
from echelon.planning.priced_plan import price
from echelon.planning.scenario import Scenario

KIB, MIB = 2**10, 2**20
Q, KV, LAYERS, LENGTH = 4096, 2048, 32, 131072
"""of llama-8b: elements of a token's queries, of its keys and values; and the length of a sequence"""


def case(layout, devices="64xh100", model="llama-8b", **options):
    found = cluster.parse_cluster(devices)
    return Scenario(shape=resolve_shape(model), cluster=found, layout=Layout.parse(layout), seq_len=LENGTH, **options)


# -- bytes ------------------------------------------------------------------------------------------------------------


def test_a_ring_sends_every_slice_past_every_rank():
    """Forward and backward keys and values, and home their gradients: of 7 others, of 3 those of half of the keys."""
    assert cp_bytes_per_token(case("cp=8")) == 7 * 2 * (2 * KV) + 3 * KV + 4 * (2 * KV) == 78 * KIB
    again = case("cp=8,recompute=full")
    assert cp_bytes_per_token(again) == 78 * KIB + 7 * 2 * KV


def test_gather_all_gathers_twice_and_reduce_scatters_in_float32():
    assert cp_bytes_per_token(case("cp=8,cp_kind=gather")) == 7 * (2 * 2 * KV + 4 * KV) == 112 * KIB


def test_ulysses_exchanges_heads_twice_in_forward_and_in_backward():
    assert cp_bytes_per_token(case("cp=8,cp_kind=ulysses")) == 7 / 8 * 2 * 2 * (2 * Q + KV) == 35 * KIB


def test_ring_ulysses_sends_both():
    exchanged = 1 / 2 * 2 * 2 * (2 * Q + KV)
    around = 3 * 2 * (2 * KV) + 1 * KV + 2 * (2 * KV)
    assert cp_bytes_per_token(case("cp=8,cp_kind=ring-ulysses,ulysses=2")) == exchanged + around == 54 * KIB


def test_tp_divides_cp_bytes_and_few_kv_heads_are_sent_more_than_once():
    assert cp_bytes_per_token(case("tp=2,cp=8")) == cp_bytes_per_token(case("cp=8")) / 2
    # 16 ranks of tp x ulysses share 8 key-value heads: each goes to two.
    exchanged = 7 / 8 * 2 * 2 * (2 * Q / 2 + 2 * KV / 2)
    assert cp_bytes_per_token(case("tp=2,cp=8,cp_kind=ulysses")) == exchanged


def test_a_grid_divides_heads_by_its_side_and_sequences_by_the_rest():
    flat, grid = case("tp=2,cp=8,microbatch=2"), case("tp=4,tp_kind=2d,cp=8,microbatch=4")
    assert cp_bytes_per_token(grid) == cp_bytes_per_token(flat)
    assert cp_traffic(grid).ring_bytes == cp_traffic(flat).ring_bytes


# -- links ------------------------------------------------------------------------------------------------------------


def test_a_ring_that_fits_a_node_stays_in_it():
    near, far = cp_traffic(case("cp=8")), cp_traffic(case("tp=2,cp=8"))
    assert (near.ring_steps, near.ring_in_node, far.ring_in_node) == (8, True, False)
    assert near.ring_bytes == LAYERS * LENGTH / 8 * 2 * KV
    assert (near.intra_node_bytes, near.inter_node_bytes, near.num_collectives) == (0, 0, 0)


def test_heads_stay_inside_a_node_and_the_ring_leaves_it():
    found = cp_traffic(case("cp=16,cp_kind=ring-ulysses,ulysses=8"))
    assert (found.ring_steps, found.ring_in_node, found.inter_node_bytes) == (2, False, 0)
    assert found.intra_node_bytes == LAYERS * LENGTH / 16 * 35 * KIB


def test_an_all_to_all_between_nodes_keeps_a_part_inside():
    """16 ranks on 2 nodes: of what a rank sends 7 parts stay, and 8 leave."""
    found = cp_traffic(case("cp=16,cp_kind=ulysses"))
    each = LAYERS * LENGTH / 16 * 2 * 2 * (2 * Q + 2 * KV) / 16
    assert (found.intra_node_bytes, found.inter_node_bytes) == (7 * each, 8 * each)


def test_a_gather_between_nodes_uses_the_links_of_all_ranks_of_a_node():
    found = cp_traffic(case("cp=16,cp_kind=gather"))
    assert found.intra_node_bytes == LAYERS * LENGTH / 16 * cp_bytes_per_token(case("cp=16,cp_kind=gather"))
    assert found.inter_node_bytes == found.intra_node_bytes / 8
    assert (
        cp_traffic(case("tp=8,cp=16,cp_kind=gather")).inter_node_bytes
        == cp_traffic(case("tp=8,cp=16,cp_kind=gather")).intra_node_bytes
    )


@pytest.mark.parametrize("kind", ["ring", "gather", "ulysses"])
def test_slow_inter_node_links_slow_only_groups_that_span_nodes(kind):
    def seconds(layout, factor):
        found = case(f"{layout},cp_kind={kind}", "16xh100")
        link = replace(found.cluster.inter_node, bandwidth=found.cluster.inter_node.bandwidth / factor)
        return price(replace(found, cluster=replace(found.cluster, inter_node=link))).times["cp"]

    assert seconds("cp=8,dp=2", 100) == seconds("cp=8,dp=2", 1)
    assert seconds("cp=16", 100) > 5 * seconds("cp=16", 1)


# -- what hides -------------------------------------------------------------------------------------------------------


def ring(steps, hop, gradients):
    """A microbatch whose ring transfers take the given seconds over links of 1 byte per second, and nothing else."""
    work = count_work(case("cp=8")).microbatch
    traffic = CpTraffic(ring_steps=steps, ring_bytes=hop, ring_grad_bytes=gradients)
    return replace(work, cp=traffic, device=replace(work.device, latency=0.0, intra_node_bandwidth=1.0))


def time_of(work, forward, backward):
    return cp_time(work, reached_rates(work.device, replace(FITTED_CONSTANTS, intra_node=1.0)), forward, backward)


def test_a_long_block_overlaps_all_but_the_last_gradients():
    found = time_of(ring(4, hop=1.0, gradients=2.0), 400.0, 1000.0)
    assert found.exposed == pytest.approx(2.0, rel=0.01)
    assert (found.hop, found.block, found.merge) == (1.0, 100.0, 0)


def test_a_hop_longer_than_its_block_is_exposed():
    """Forward 3 hops of 10 s beside blocks of 1 s; backward one of 10 s and two of 30 s beside 2 s, and 20 s home."""
    found = time_of(ring(4, hop=10.0, gradients=20.0), 4.0, 8.0)
    assert found.exposed == pytest.approx(3 * 9 + 8 + 2 * 28 + 20, rel=0.01)


def test_a_ring_of_two_sends_once_and_exposes_its_gradients():
    assert time_of(ring(2, hop=1.0, gradients=2.0), 200.0, 500.0).exposed == pytest.approx(2.0, rel=0.01)
    assert time_of(ring(1, hop=0.0, gradients=0.0), 200.0, 500.0).total == 0


def test_recomputation_sends_around_the_ring_once_more():
    work = ring(4, hop=10.0, gradients=0.0)
    recomputed = [replace(work, recompute=RecomputeShares(layers=share)) for share in (0.0, 1.0)]
    once, twice = (time_of(one, 4.0, 8.0).exposed for one in recomputed)
    assert twice - once == pytest.approx(3 * 9, rel=0.01)


def test_gathers_and_exchanges_are_exposed():
    for kind in ("gather", "ulysses"):
        work = count_work(case(f"cp=8,cp_kind={kind}")).microbatch
        slow, fast = (time_of(work, seconds, seconds).exposed for seconds in (1e-3, 1e3))
        sent = work.cp.intra_node_bytes / work.device.intra_node_bandwidth
        assert slow == fast == pytest.approx(sent + work.cp.num_collectives * work.device.latency)


def test_stacked_work_is_timed_as_single_work():
    works = [count_work(case(text)) for text in ("cp=8", "cp=1", "tp=2,cp=8,cp_kind=gather", "cp=8,cp_kind=ulysses")]
    together = microbatch_time(stack_work(works)).cp.tolist()
    assert together == pytest.approx([float(microbatch_time(work).cp) for work in works])
    assert together[1] == 0


def test_merging_of_blocks_is_memory_traffic():
    """Forward: a copy of keys and values, 8 results read and one written."""
    found = cp_traffic(case("cp=8"))
    tokens = LAYERS * LENGTH / 8
    assert found.memory_bytes == tokens * (
        2 * 2 * KV + 9 * 2 * Q + cp_traffic_module.FP32_BYTES * 2 * Q
    )  # 512 MiB hold 4 parts of 128 MiB
    assert (found.is_blockwise, cp_traffic(case("cp=8,cp_kind=ulysses")).is_blockwise) == (True, False)


def test_other_programs_add_every_result_as_it_comes():
    ours, theirs = (cp_traffic(case("cp=8", program=program)).memory_bytes for program in ("echelon", "megatron"))
    assert theirs - ours == LAYERS * LENGTH / 8 * (7 - 1) * 2 * cp_traffic_module.FP32_BYTES * Q


# -- room -------------------------------------------------------------------------------------------------------------


def layer_bytes(found):
    (layer, _), *_ = found.shape.layers
    return saved_layer_bytes(found, layer, recompute_plan(found))


def test_cp_divides_saved_activations():
    """Beside them a ring keeps a copy of its keys and values, an exchange one of its result."""
    whole, half = case("cp=1"), case("cp=2")
    copy = LENGTH / 2 * 2 * KV
    assert saved_cp_bytes(half) == copy
    assert layer_bytes(half) == pytest.approx(layer_bytes(whole) / 2 + copy)
    assert saved_cp_bytes(case("cp=2,cp_kind=ulysses")) == LENGTH / 2 * 2 * Q
    assert saved_cp_bytes(case("cp=4,cp_kind=ring-ulysses,ulysses=2")) == LENGTH / 4 * 2 * (Q + KV)
    assert saved_cp_bytes(case("cp=2", program="megatron")) == 0


def test_working_memory_of_ring_gather_and_ulysses():
    slice_bytes = LENGTH / 8 * KV
    # At hand, arriving, going home and coming, 2 bytes each; 8 gradients of keys, of values and 4 of queries wait.
    waiting = LENGTH / 8 * (8 * 2 * KV + (4 * 2 + cp_traffic_module.FP32_BYTES) * Q)
    assert cp_working_bytes(case("cp=8")) == 4 * 2 * slice_bytes + waiting
    gathered = LENGTH * KV * (2 + 3 * cp_traffic_module.FP32_BYTES) + LENGTH / 8 * 2 * 2 * Q
    assert cp_working_bytes(case("cp=8,cp_kind=gather")) == gathered
    assert cp_working_bytes(case("cp=8,cp_kind=ulysses")) == LENGTH / 8 * 3 * 2 * (Q + KV)
    assert cp_working_bytes(case("cp=1")) == 0


def test_cp_working_memory_is_in_the_plan():
    found = case("dp=8,cp=8,cp_kind=gather,recompute=full,zero=3")
    assert peak_memory(found).parts["working"] > cp_working_bytes(found) > 0.9 * 3 * 2**30


def test_zero_shards_states_over_cp_too():
    parts = peak_memory(case("cp=8,zero=3", "8xh100")).parts
    assert parts["optimizer"] == pytest.approx(8 * resolve_shape("llama-8b").parameters / 8, rel=1e-3)
    assert parts["buffers"] > 0
