"""Rank placement by link speed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.layout import Layout, Mesh
from echelon.layout.rank_order import LinkSpeeds, StepTraffic, choose_rank_order, exposed_comm_s

TWO_NODES = LinkSpeeds(devices_per_node=4, intra_node=400e9, inter_node=25e9)


def test_heavy_gradients_stay_in_a_node():
    order = choose_rank_order(Layout(dp=4, pp=2), TWO_NODES, StepTraffic(dp_bytes=10e9, pp_bytes=1e9))
    assert order == ("pp", "dp")


def test_heavy_activations_stay_in_a_node():
    order = choose_rank_order(Layout(dp=4, pp=2), TWO_NODES, StepTraffic(dp_bytes=1e9, pp_bytes=10e9))
    assert order == ("dp", "pp")


def test_overlapped_gradients_leave_the_fast_links_to_the_pipeline():
    traffic = StepTraffic(dp_bytes=10e9, pp_bytes=1e9, dp_overlap_s=1.0)
    assert choose_rank_order(Layout(dp=4, pp=2), TWO_NODES, traffic) == ("dp", "pp")


def test_seconds_by_hand():
    traffic = StepTraffic(dp_bytes=8e9, pp_bytes=1e9, dp_overlap_s=0.005)
    # pp outside: gradients inside a node (20 ms, 5 hidden), activations between nodes (40 ms).
    assert exposed_comm_s(Mesh(Layout(dp=4, pp=2), ("pp", "dp")), TWO_NODES, traffic) == pytest.approx(0.015 + 0.040)
    # dp outside: two members of a dp group share the way out of a node (160 ms, 5 hidden), activations inside (2.5 ms).
    assert exposed_comm_s(Mesh(Layout(dp=4, pp=2), ("dp", "pp")), TWO_NODES, traffic) == pytest.approx(0.155 + 0.0025)


def test_tp_is_placed_before_pp_and_dp():
    # tp fills a node, so both axes leave it in either order: a tie keeps pp outside.
    assert choose_rank_order(Layout(dp=2, pp=2, tp=4), TWO_NODES, StepTraffic(dp_bytes=1, pp_bytes=9)) == ("pp", "dp")
    # With tp=2 two places are left per node, and the pipeline takes them.
    assert choose_rank_order(Layout(dp=2, pp=2, tp=2), TWO_NODES, StepTraffic(dp_bytes=1, pp_bytes=9)) == ("dp", "pp")


@settings(deadline=None)
@given(
    *[st.integers(1, 4)] * 4,
    st.integers(1, 9),
    *[st.floats(1, 1e12)] * 2,
    *[st.floats(0, 1e12)] * 2,
)
def test_the_choice_is_never_the_slower_order(dp, pp, tp, cp, per_node, inside, between, dp_bytes, pp_bytes):
    layout = Layout(dp=dp, pp=pp, tp=tp, cp=cp)
    links = LinkSpeeds(devices_per_node=per_node, intra_node=inside, inter_node=between)
    traffic = StepTraffic(dp_bytes=dp_bytes, pp_bytes=pp_bytes)
    chosen = choose_rank_order(layout, links, traffic)
    other = (chosen[1], chosen[0])
    assert exposed_comm_s(Mesh(layout, chosen), links, traffic) <= exposed_comm_s(Mesh(layout, other), links, traffic)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 4))
def test_one_node_needs_no_choice(dp, pp):
    links = LinkSpeeds(devices_per_node=64, intra_node=1e9, inter_node=1.0)
    assert choose_rank_order(Layout(dp=dp, pp=pp), links, StepTraffic(dp_bytes=5, pp_bytes=5)) == ("pp", "dp")


def test_links_are_checked():
    with pytest.raises(ValueError, match="speeds above zero"):
        LinkSpeeds(devices_per_node=8, intra_node=1e9, inter_node=0.0)


def test_a_collective_is_as_slow_as_the_node_with_the_fewest_of_its_ranks():
    """Four ranks on nodes of three: the one that is alone on its node has one link for what all send."""
    links = LinkSpeeds(devices_per_node=3, intra_node=100.0, inter_node=10.0)
    traffic = StepTraffic(dp_bytes=1000.0, pp_bytes=0.0)
    assert exposed_comm_s(Mesh(Layout.parse("dp=4")), links, traffic) == 1000.0 / 10.0
    even = LinkSpeeds(devices_per_node=2, intra_node=100.0, inter_node=10.0)
    assert exposed_comm_s(Mesh(Layout.parse("dp=4")), even, traffic) == 1000.0 / 20.0
