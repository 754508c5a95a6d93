"""The planner's prediction for a run, made at its start and compared with the measured step at its end."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from echelon.config.run_config import Config
from echelon.launch.world import World, local_world_size
from echelon.layout import Layout
from echelon.layout.mesh import DEFAULT_ORDER
from echelon.models.model_config import ModelConfig
from echelon.planning.cluster.cluster import Cluster, NodeGroup, local_cluster
from echelon.planning.cost.memory_model import stage_memory
from echelon.planning.cost.rank_placement import place_ranks
from echelon.planning.model.model_sources import config_shape
from echelon.planning.priced_plan import price
from echelon.planning.scenario import Scenario
from echelon.training.run.auto_layout import PRECISION_NAMES, plan_request_on

STATE_CATEGORIES = ("parameters", "master", "gradients", "optimizer", "versions", "beyond the host")
"""memory categories that are allocated for the entire run"""


def predict_run(
    config: Config, layout: Layout, shape: ModelConfig | None, world: World, *, threads: int
) -> dict[str, Any]:
    """Predict `step_s` and `memory_bytes` of the fullest rank, or give the `reason` for none. Never raises."""
    if shape is None:
        return {"reason": "the planner does not price a custom model"}
    if config.dtype not in PRECISION_NAMES or config.dtype == "float64":
        return {"reason": f"the planner does not price {config.dtype} GEMMs"}
    try:
        plan = price(place_ranks(scenario_of(config, layout, shape, _this_machine(world, threads))))
    except Exception as error:  # a prediction must not end a run
        return {"reason": f"the planner gave up ({error})"}
    # The measured peak of a GPU counts tensors only; that of a CPU process includes the reserve.
    reserve = plan.memory.parts.get("reserve", 0) if world.device.type == "cuda" else 0
    kind = plan.scenario.cluster.device.name
    return {"step_s": plan.seconds, "memory_bytes": plan.memory.total - reserve, "device": kind}


def agree_on_rank_order(config: Config, layout: Layout, shape: ModelConfig | None, world: World) -> tuple[str, str]:
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


def transient_bytes(config: Config, layout: Layout, shape: ModelConfig | None, world: World) -> int:
    """Predict the device memory of a step besides states and gradients, for offload; 0 if unknown or unused."""
    if shape is None or layout.offload == "none" or world.device.type != "cuda" or config.dtype not in PRECISION_NAMES:
        return 0
    try:
        return scenario_transient_bytes(scenario_of(config, layout, shape, _this_machine(world, 1)))
    except Exception:  # an estimate must not end a run
        return 0


def scenario_transient_bytes(scenario: Scenario) -> int:
    return sum(size for name, size in stage_memory(scenario, 0).parts.items() if name not in STATE_CATEGORIES)


def scenario_of(config: Config, layout: Layout, shape: ModelConfig, cluster: Cluster) -> Scenario:
    request = plan_request_on(config, config_shape(shape), cluster)
    return replace(request, host_share=config.memory.host).scenario(layout)


def _this_machine(world: World, threads: int) -> Cluster:
    """Return `--cluster here` with the ranks of this run; a CPU rank has the speed of all its threads."""
    cluster = local_cluster(world.device.type)
    device = cluster.device
    if world.device.type == "cpu":
        flops = {name: threads * peak for name, peak in device.flops.items()}
        device = replace(device, flops=flops, bandwidth=threads * device.bandwidth)
    local = _local_world_size(world)
    part = NodeGroup(device=device, nodes=max(1, world.world_size // local), per_node=local)
    return replace(cluster, node_groups=(part,))


def _local_world_size(world: World) -> int:
    return local_world_size(world.world_size)
