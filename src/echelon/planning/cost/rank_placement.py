"""Which of pp and dp is the outer mesh axis of a scenario: the order with the smaller predicted exposed time."""

from __future__ import annotations

from dataclasses import replace

from echelon.layout.mesh import DEFAULT_ORDER
from echelon.layout.rank_order import LinkSpeeds, StepTraffic, choose_rank_order
from echelon.planning.calibrate.constants import FITTED_CONSTANTS, Constants
from echelon.planning.cost.count_work import count_work
from echelon.planning.cost.reached_rates import reached_rates
from echelon.planning.cost.step_time import dp_overlap_time, step_times
from echelon.planning.scenario import Scenario


def place_ranks(scenario: Scenario, c: Constants = FITTED_CONSTANTS) -> Scenario:
    """Return the scenario with its better rank order.

    Ranks in one node, and those of other frameworks, keep pp outermost.
    """
    layout, per_node = scenario.layout, scenario.cluster.per_node
    if not scenario.is_own or layout.world <= per_node or 1 in (layout.dp, layout.pp):
        return scenario
    work = count_work(replace(scenario, rank_order=DEFAULT_ORDER))
    rates, times, pipeline = reached_rates(work.microbatch.device, c), step_times(work, c), work.pipeline
    busy = times.total - times.dp - times.update - times.offload - times.rest
    sends = 2 * pipeline.num_microbatches * pipeline.vpp * c.pp_exposed + 2 * (pipeline.pp - 1)
    intra_node, inter_node = float(rates.intra_node_bandwidth), float(rates.inter_node_bandwidth)
    links = LinkSpeeds(devices_per_node=per_node, intra_node=intra_node, inter_node=inter_node)
    traffic = StepTraffic(
        dp_bytes=float(work.dp.wire_bytes),
        pp_bytes=float(sends * pipeline.p2p_bytes),
        dp_overlap_s=float(dp_overlap_time(work, c, busy)),
    )
    return replace(scenario, rank_order=choose_rank_order(layout, links, traffic))
