"""The planner's order of pp and dp: the one with the smaller predicted exposed time."""

from __future__ import annotations

from dataclasses import replace

from echelon.layout import Layout
from echelon.planning.cluster.cluster import parse_cluster
from echelon.planning.cost.count_work import count_work
from echelon.planning.cost.rank_placement import place_ranks
from echelon.planning.cost.step_time import step_times
from echelon.planning.model.model_sources import resolve_shape
from echelon.planning.priced_plan import price
from echelon.planning.scenario import Scenario


def scenario(layout: str, cluster: str, model: str = "llama-8b") -> Scenario:
    nodes = parse_cluster(cluster)
    return Scenario(
        shape=resolve_shape(model), cluster=nodes, layout=Layout.parse(layout, world=nodes.devices), seq_len=4096
    )


def exposed(priced: Scenario) -> float:
    times = step_times(count_work(priced))
    return float(times.dp + times.pp)


def test_one_node_keeps_pp_outermost():
    assert place_ranks(scenario("pp=4,accumulate=8", "8xh100")).rank_order == ("pp", "dp")


def test_a_pipeline_of_many_large_transfers_stays_in_a_node():
    """Over Ethernet, with few gradients to reduce and many long microbatches."""
    wide = scenario("pp=8,accumulate=64,microbatch=8", "16xh100:eth", "llama-1b")
    chosen = place_ranks(wide)
    assert chosen.rank_order == ("dp", "pp")
    assert exposed(chosen) < exposed(wide)


def test_heavy_gradients_stay_in_a_node():
    chosen = place_ranks(scenario("pp=2,accumulate=2,zero=1", "16xa100-80:eth"))
    assert chosen.rank_order == ("pp", "dp")


def test_other_frameworks_keep_their_order():
    wide = replace(scenario("pp=8,accumulate=64,microbatch=8", "16xh100:eth", "llama-1b"), program="megatron")
    assert place_ranks(wide).rank_order == ("pp", "dp")


def test_a_plan_is_priced_in_the_order_of_its_ranks():
    wide = scenario("pp=8,accumulate=64,microbatch=8", "16xh100:eth", "llama-1b")
    assert price(place_ranks(wide)).seconds < price(wide).seconds
