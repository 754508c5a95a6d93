"""What the planner says of a run before it begins, so that its end can say how far off that was."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from echelon.config.run_config import Config
from echelon.launch.world import World
from echelon.layout import Layout
from echelon.models.model_config import ModelConfig
from echelon.optim import cost
from echelon.planning.cluster.cluster import Cluster, Part, here
from echelon.planning.cost.memory_model import of_stage
from echelon.planning.cost.param_group_traffic import MOMENTS
from echelon.planning.model.model_sources import of_config
from echelon.planning.priced_plan import price
from echelon.planning.scenario import Case
from echelon.training.auto_layout import TYPES, master_bytes, precision_of, program_of, reduce_bytes, thrift_of

STATES = ("parameters", "master", "gradients", "optimizer", "versions", "beyond the host")
"""categories of memory that do not come and go"""


def predicted(
    config: Config, layout: Layout, shape: ModelConfig | None, world: World, *, threads: int
) -> dict[str, Any]:
    """`step_s` and `memory_bytes` of the fullest rank, or the `reason` why there are none. Never raises."""
    if shape is None:
        return {"reason": "a module of your own is trained as it is, and not priced"}
    if config.dtype not in TYPES or config.dtype == "float64":
        return {"reason": f"products in {config.dtype} are not priced"}
    try:
        plan = price(case_of(config, layout, shape, _machine(world, threads)))
    except Exception as error:  # whatever the planner does not know, the run goes on
        return {"reason": f"the planner gave up ({error})"}
    # What a GPU's allocator counts has no context in it; what a process holds has.
    reserve = plan.memory.parts.get("reserve", 0) if world.device.type == "cuda" else 0
    kind = plan.case.cluster.device.name
    return {"step_s": plan.seconds, "memory_bytes": plan.memory.total - reserve, "device": kind}


def working_bytes(config: Config, layout: Layout, shape: ModelConfig | None, world: World) -> int:
    """On a GPU, what comes and goes in a step beside states and gradients; 0 where it is not known, or not asked."""
    if shape is None or layout.offload == "none" or world.device.type != "cuda" or config.dtype not in TYPES:
        return 0
    try:
        return working_of(case_of(config, layout, shape, _machine(world, 1)))
    except Exception:  # whatever the planner does not know
        return 0


def working_of(case: Case) -> int:
    return sum(size for name, size in of_stage(case, 0).parts.items() if name not in STATES)


def case_of(config: Config, layout: Layout, shape: ModelConfig, cluster: Cluster) -> Case:
    """A run as a question to the planner."""
    return Case(
        shape=of_config(shape),
        cluster=cluster,
        layout=layout,
        seq_len=config.seq_len,
        precision=precision_of(config),
        program=program_of(config),
        moment_bytes=cost.element_bytes(config.optimizer) / MOMENTS,
        reduce_bytes=reduce_bytes(config),
        master_bytes=master_bytes(config),
        host=config.memory.host,
        rule=config.optimizer,
        thrift=thrift_of(config),
    )


def _machine(world: World, threads: int) -> Cluster:
    """This machine as `--cluster here` describes it, with the ranks that there are; one on several cores is faster."""
    cluster = here(world.device.type)
    device = cluster.device
    if world.device.type == "cpu":
        flops = {name: threads * peak for name, peak in device.flops.items()}
        device = replace(device, flops=flops, bandwidth=threads * device.bandwidth)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world.world_size))
    part = Part(device=device, nodes=max(1, world.world_size // local), per_node=local)
    return replace(cluster, parts=(part,))
