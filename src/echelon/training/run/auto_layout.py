"""`train --plan`: the layout of a run from the planner, or from a file that the planner wrote."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.config.config_rules import keys_without_effect
from echelon.config.run_config import Config
from echelon.config.sections import OptimizerConfig
from echelon.input_file import InputFileError, read_json
from echelon.launch.world import local_world_size, under_launcher
from echelon.layout import ValidationError, ValidationIssue
from echelon.models import model_config, user_model
from echelon.models.foreign.hf_source import is_hf_model
from echelon.optim import cost
from echelon.planning.calibrate.programs import OWN_PROGRAMS
from echelon.planning.cluster.cluster import Cluster, NodeGroup, local_cluster
from echelon.planning.explain.reasons import explain_infeasible
from echelon.planning.memory_options import MemoryOptions
from echelon.planning.model.model_shape import ModelShape
from echelon.planning.model.model_sources import config_shape, resolve_shape
from echelon.planning.priced_plan import Plan
from echelon.planning.scenario import NUM_MOMENTS, PlanRequest
from echelon.planning.search.layout_search import least_memory_plan, search_plans

AUTO = "auto"
MIB = 1 << 20
PLANNED_KEYS = (
    *("optimizer.", "clip", "compress", "lora.rank", "lora.targets"),
    *("memory.partition", "memory.arena", "memory.buffer", "memory.host"),
)
"""settings that `plan --set` takes too; updates in backward require clip=0"""
PRECISION_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp32"}
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 4}
"""bytes per element in the planner, which does not price float64"""


def with_planned_layout(config: Config, plan: str, procs: int | None) -> tuple[Config, str]:
    """Return the configuration with the planned layout, and a line that names its source.

    Where a file's plan has FP8 GEMMs, the run has them too.
    """
    if config.layout:
        message = f"is incompatible with layout={config.layout}"
        raise ValidationError([ValidationIssue(key="plan", value=plan, message=message, hint="give one of them")])
    if plan == AUTO:
        best = best_plan(config, procs)
        line = f"planned: {best.layout}, {best.seconds:.3g} s a step predicted"
        return replace(config, layout=str(best.layout)), line
    layout, precision = _from_file(Path(plan))
    if precision != "fp8" or config.precision.compute != "same":
        return replace(config, layout=layout), f"layout from {plan}"
    fp8 = replace(config, layout=layout, dtype="bfloat16", precision=replace(config.precision, compute="fp8"))
    return fp8, f"layout and FP8 GEMMs from {plan}"


def memory_options_of(config: Config) -> MemoryOptions:
    """Translate the configuration into the planner's memory options."""
    memory, buffer = config.memory, int(config.memory.buffer * MIB)
    return MemoryOptions(compress=config.compress, partition=memory.partition, arena=memory.arena, buffer=buffer)


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """The settings of `plan --set`, which are those of `train --set`."""

    rule: OptimizerConfig | None
    """None without optimizer settings"""
    memory_options: MemoryOptions
    host: float | None
    lora_rank: int
    lora_targets: tuple[str, ...]


def parse_plan_settings(settings: Sequence[str], layout: str = "") -> PlanSettings:
    """Parse `plan --set`. Without a `layout` the planner tries many, and a key may have an effect in some of them."""
    other = [text for text in settings if not text.partition("=")[0].startswith(PLANNED_KEYS)]
    if other:
        rule = "is not a setting of `plan --set`"
        legal = "optimizer.*, clip, compress, lora.rank, lora.targets, memory.* but for memory.disk"
        raise ValidationError([ValidationIssue(key="set", value=text, message=rule, legal=legal) for text in other])
    config = Config.from_settings(settings, layout)
    of_optimizer = any(text.startswith("optimizer.") for text in settings)
    rule_asked = config.optimizer if of_optimizer else None
    return PlanSettings(
        rule=rule_asked,
        memory_options=memory_options_of(config),
        host=config.memory.host,
        lora_rank=config.lora.rank,
        lora_targets=config.lora.targets,
    )


def settings_with_effect(settings: Sequence[str], layout: str) -> list[str]:
    """Return the settings that have an effect in a layout: `train` refuses the others."""
    idle_here = keys_without_effect(replace(Config(), layout=layout))
    return [text for text in settings if text.partition("=")[0] not in idle_here]


def best_plan(config: Config, procs: int | None) -> Plan:
    """Return the best runnable plan on this machine, or on the ranks that a launcher started."""
    if user_model.is_user_model(config.model):
        rule = "plans named models only; plan a custom model with `echelon plan file.py:factory`"
        raise ValidationError([ValidationIssue(key="plan", value=AUTO, message=rule, hint="set layout")])
    world = int(os.environ["WORLD_SIZE"]) if under_launcher() else procs
    request = plan_request_of(config, world)
    plans = search_plans(request, top=1)
    if plans:
        return plans[0]
    least = least_memory_plan(request)
    words = explain_infeasible(least) if least else [f"a batch of {config.batch} does not divide over the ranks"]
    raise ValidationError([ValidationIssue(key="plan", value=AUTO, message="found no layout", hint=" ".join(words))])


def plan_request_of(config: Config, ranks: int | None) -> PlanRequest:
    """Return the planner's request for this run on `ranks` ranks, or on one rank per device of this machine."""
    cluster = _cluster_of_ranks(ranks, config.device)
    if user_model.is_user_model(config.model):
        shape = resolve_shape(config.model)  # traced
        return replace(plan_request_on(config, shape, cluster), seq_len=max(1, shape.traced_seq_len))
    if is_hf_model(config.model):
        shape = resolve_shape(config.model, seq_len=config.seq_len, precision=PRECISION_NAMES[config.dtype])
        return plan_request_on(config, shape, cluster)
    model = config.override_model(model_config.find_model(config.model))
    return plan_request_on(config, config_shape(model), cluster)


def plan_request_on(config: Config, shape: ModelShape, cluster: Cluster) -> PlanRequest:
    """Return the planner's request for this run of a model on a cluster."""
    gradients = {"master": "float32", "same": config.dtype}.get(config.precision.reduce, config.precision.reduce)
    return PlanRequest(
        shape=shape,
        cluster=cluster,
        batch=config.batch,
        seq_len=config.seq_len,
        # The planner does not distinguish row-wise from tensor-wise scales.
        precision=PRECISION_NAMES[config.dtype] if config.precision.compute == "same" else "fp8",
        program="plain" if config.kernels == "plain" else "echelon",
        moment_bytes=cost.state_bytes_per_element(config.optimizer) / NUM_MOMENTS,
        reduce_bytes=DTYPE_BYTES[gradients],
        master_bytes=2 if config.precision.master == "none" else 4,
        optimizer=config.optimizer,
        memory_options=memory_options_of(config),
        lora_rank=config.lora.rank,
        lora_targets=config.lora.targets,
    )


def _cluster_of_ranks(ranks: int | None, device: str) -> Cluster:
    """Return a cluster of machines like this one, with the ranks that a launcher started."""
    cluster = local_cluster(device)
    world = ranks or cluster.devices
    local = min(local_world_size(world), world)
    if device == "auto" and local > cluster.devices:  # as ranks join: one GPU each, or all on the CPU
        cluster = local_cluster("cpu")
    nodes = max(1, world // local)
    return replace(cluster, node_groups=(NodeGroup(device=cluster.device, nodes=nodes, per_node=local),))


def _from_file(path: Path) -> tuple[str, str]:
    """Read (layout, precision) of the best plan in the output of `echelon plan --json`."""
    try:
        report, reason = read_json(path), "lists no plan with a layout"
    except InputFileError as error:
        report, reason = None, error.reason
    match report:
        case {"plans": [{"layout": str(layout), **others}, *_]}:
            if (program := others.get("program", "echelon")) not in OWN_PROGRAMS:
                rule = f"is priced for another program ({program}), which `train` does not run"
                hint = "plan without --program"
                raise ValidationError.single("plan", str(path), rule, hint=hint)
            return layout, str(others.get("precision", ""))
    legal = "auto, or a file that `echelon plan --json` printed"
    raise ValidationError.single("plan", str(path), reason, legal=legal)
