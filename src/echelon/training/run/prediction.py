"""What the planner says of a run before it begins, so that its end can say how far off that was."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from echelon.config.run_config import Config
from echelon.launch.world import World
from echelon.layout import Layout
from echelon.layout.mesh import DEFAULT_ORDER
from echelon.models.model_config import ModelConfig
from echelon.optim import cost
from echelon.planning.cluster.cluster import Cluster, NodeGroup, local_cluster
from echelon.planning.cost.memory_model import stage_memory
from echelon.planning.cost.param_group_traffic import NUM_MOMENTS
from echelon.planning.cost.rank_placement import place_ranks
from echelon.planning.model.model_sources import config_shape
from echelon.planning.priced_plan import price
from echelon.planning.scenario import Scenario
from echelon.training.run.auto_layout import (
    PRECISION_NAMES,
    master_bytes,
    memory_options_of,
    planner_precision,
    planner_program,
    reduce_bytes,
)

STATE_CATEGORIES = ("parameters", "master", "gradients", "optimizer", "versions", "beyond the host")
"""categories of memory that do not come and go"""


def predict_run(
    config: Config, layout: Layout, shape: ModelConfig | None, world: World, *, threads: int
) -> dict[str, Any]:
    """`step_s` and `memory_bytes` of the fullest rank, or the `reason` why there are none. Never raises."""
    if shape is None:
        return {"reason": "a module of your own is trained as it is, and not priced"}
    if config.dtype not in PRECISION_NAMES or config.dtype == "float64":
        return {"reason": f"products in {config.dtype} are not priced"}
    try:
        plan = price(place_ranks(scenario_of(config, layout, shape, _this_machine(world, threads))))
    except Exception as error:  # whatever the planner does not know, the run goes on
        return {"reason": f"the planner gave up ({error})"}
    # What a GPU's allocator counts has no context in it; what a process holds has.
    reserve = plan.memory.parts.get("reserve", 0) if world.device.type == "cuda" else 0
    kind = plan.scenario.cluster.device.name
    return {"step_s": plan.seconds, "memory_bytes": plan.memory.total - reserve, "device": kind}


def transient_bytes(config: Config, layout: Layout, shape: ModelConfig | None, world: World) -> int:
    """On a GPU, what comes and goes in a step beside states and gradients; 0 where it is not known, or not asked."""
    if shape is None or layout.offload == "none" or world.device.type != "cuda" or config.dtype not in PRECISION_NAMES:
        return 0
    try:
        return scenario_transient_bytes(scenario_of(config, layout, shape, _this_machine(world, 1)))
    except Exception:  # whatever the planner does not know
        return 0


def choose_rank_order(config: Config, layout: Layout, shape: ModelConfig | None, world: World) -> tuple[str, str]:
    """Return the order of pp and dp with the smaller predicted exposed time; on one node, the default.

    Rank 0 decides for all ranks, since their machines may differ.
    """
    if shape is None or config.dtype not in PRECISION_NAMES or world.world_size <= _local_world_size(world):
        return DEFAULT_ORDER
    order = [DEFAULT_ORDER]
    if world.rank == 0:
        with suppress(Exception):  # the planner does not know every model and device
            order = [place_ranks(scenario_of(config, layout, shape, _this_machine(world, 1))).rank_order]
    dist.broadcast_object_list(order)
    return order[0]


def scenario_transient_bytes(case: Scenario) -> int:
    return sum(size for name, size in stage_memory(case, 0).parts.items() if name not in STATE_CATEGORIES)


def scenario_of(config: Config, layout: Layout, shape: ModelConfig, cluster: Cluster) -> Scenario:
    """A run as a question to the planner."""
    return Scenario(
        shape=config_shape(shape),
        cluster=cluster,
        layout=layout,
        seq_len=config.seq_len,
        precision=planner_precision(config),
        program=planner_program(config),
        moment_bytes=cost.state_bytes_per_element(config.optimizer) / NUM_MOMENTS,
        reduce_bytes=reduce_bytes(config),
        master_bytes=master_bytes(config),
        host_share=config.memory.host,
        optimizer=config.optimizer,
        memory_options=memory_options_of(config),
    )


def _this_machine(world: World, threads: int) -> Cluster:
    """This machine as `--cluster here` describes it, with the ranks that there are; one on several cores is faster."""
    cluster = local_cluster()
    device = cluster.device
    if world.device.type == "cpu":
        flops = {name: threads * peak for name, peak in device.flops.items()}
        device = replace(device, flops=flops, bandwidth=threads * device.bandwidth)
    local = _local_world_size(world)
    part = NodeGroup(device=device, nodes=max(1, world.world_size // local), per_node=local)
    return replace(cluster, node_groups=(part,))


def _local_world_size(world: World) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", world.world_size))
