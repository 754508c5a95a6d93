"""A run that leaves the choice of its layout to the planner, or to a file that the planner wrote."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.config.config_rules import keys_without_effect
from echelon.config.run_config import Config
from echelon.config.sections import OptimizerConfig
from echelon.layout import ValidationError, ValidationIssue
from echelon.models import model_config, user_model
from echelon.optim import cost
from echelon.planning.cluster.cluster import Cluster, NodeGroup, local_cluster
from echelon.planning.cost.param_group_traffic import NUM_MOMENTS
from echelon.planning.explain.reasons import explain_infeasible
from echelon.planning.memory_options import MemoryOptions
from echelon.planning.model.model_sources import config_shape
from echelon.planning.priced_plan import Plan
from echelon.planning.scenario import PlanRequest
from echelon.planning.search.layout_search import least_memory_plan, search_plans

AUTO = "auto"
MIB = 1 << 20
PLANNED_KEYS = ("optimizer.", "clip", "compress", "memory.partition", "memory.arena", "memory.buffer", "memory.host")
"""settings that `plan` asks too; updates in backward ask for no clipping"""
PRECISION_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp32"}
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 4}
"""of an element, as planning counts: float64 is not priced"""


def with_planned_layout(config: Config, plan: str, procs: int | None) -> tuple[Config, str]:
    """(the configuration in the layout that was chosen, a line that says where it comes from).

    A file's plan may have its products in 8 bits, and then the run has.
    """
    if config.layout:
        rule = f"leaves nothing to choose beside layout={config.layout}"
        raise ValidationError([ValidationIssue(key="plan", value=plan, message=rule, hint="give one of them")])
    if plan == AUTO:
        best = best_plan(config, procs)
        words = f"planned: {best.layout}, {best.seconds:.3g} s a step predicted"
        return replace(config, layout=str(best.layout)), words
    layout, precision = _from_file(Path(plan))
    if precision != "fp8" or config.precision.compute != "same":
        return replace(config, layout=layout), f"layout from {plan}"
    narrow = replace(config, layout=layout, dtype="bfloat16", precision=replace(config.precision, compute="fp8"))
    return narrow, f"layout and products in 8 bits from {plan}"


def planner_precision(config: Config) -> str:
    """Of the products, as planning calls it; scales for each row or for each tensor are not told apart."""
    return PRECISION_NAMES[config.dtype] if config.precision.compute == "same" else "fp8"


def reduce_bytes(config: Config) -> int:
    """Of an element of a gradient where it adds up and is reduced."""
    asked = config.precision.reduce
    return DTYPE_BYTES[{"master": "float32", "same": config.dtype}.get(asked, asked)]


def master_bytes(config: Config) -> int:
    """Of an element of what the optimizer updates."""
    return 2 if config.precision.master == "none" else 4


def planner_program(config: Config) -> str:
    return "plain" if config.kernels == "plain" else "echelon"


def memory_options_of(config: Config) -> MemoryOptions:
    """What the run does to need less memory, as planning calls it."""
    memory = config.memory
    return MemoryOptions(
        compress=config.compress,
        partition=memory.partition,
        arena=memory.arena,
        buffer=int(memory.buffer * MIB),
    )


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """What `plan --set` says, as `train --set` has it."""

    rule: OptimizerConfig | None
    """none where nothing is said of it"""
    memory_options: MemoryOptions
    host: float | None


def parse_plan_settings(settings: Sequence[str], layout: str = "") -> PlanSettings:
    """Where no `layout` is given many are tried, and a key may do something in some of them."""
    other = [text for text in settings if not text.partition("=")[0].startswith(PLANNED_KEYS)]
    if other:
        rule = "changes nothing that `plan` asks by --set"
        legal = "optimizer.*, clip, compress, memory.* but for memory.disk"
        raise ValidationError([ValidationIssue(key="set", value=text, message=rule, legal=legal) for text in other])
    config = Config.from_settings(settings, layout)
    of_optimizer = any(text.startswith("optimizer.") for text in settings)
    rule_asked = config.optimizer if of_optimizer else None
    return PlanSettings(rule=rule_asked, memory_options=memory_options_of(config), host=config.memory.host)


def settings_with_effect(settings: Sequence[str], layout: str) -> list[str]:
    """Those that do something in a layout: `train` refuses the others there."""
    idle_here = keys_without_effect(replace(Config(), layout=layout))
    return [text for text in settings if text.partition("=")[0] not in idle_here]


def best_plan(config: Config, procs: int | None) -> Plan:
    """The best runnable plan on this machine, or on the ranks that a launcher started."""
    if user_model.is_user_model(config.model):
        rule = "plans named models; a module of your own is planned by `echelon plan file.py:factory`"
        raise ValidationError([ValidationIssue(key="plan", value=AUTO, message=rule, hint="set layout")])
    world = int(os.environ.get("WORLD_SIZE", procs or 0)) or None
    wish = plan_request_of(config, world)
    found = search_plans(wish, top=1)
    if found:
        return found[0]
    least = least_memory_plan(wish)
    words = explain_infeasible(least) if least else [f"a batch of {config.batch} does not divide over the ranks"]
    raise ValidationError([ValidationIssue(key="plan", value=AUTO, message="found no layout", hint=" ".join(words))])


def plan_request_of(config: Config, ranks: int | None) -> PlanRequest:
    """A run as a question to the planner: the best layout on so many ranks, or one for each device of this machine."""
    shape = config.override_model(model_config.find_model(config.model))
    return PlanRequest(
        shape=config_shape(shape),
        cluster=_cluster_of_ranks(ranks),
        batch=config.batch,
        seq_len=config.seq_len,
        precision=planner_precision(config),
        program=planner_program(config),
        moment_bytes=cost.state_bytes_per_element(config.optimizer) / NUM_MOMENTS,
        reduce_bytes=reduce_bytes(config),
        master_bytes=master_bytes(config),
        optimizer=config.optimizer,
        memory_options=memory_options_of(config),
    )


def _cluster_of_ranks(ranks: int | None) -> Cluster:
    """This machine with as many ranks as there are, or as a launcher started on how many machines."""
    cluster = local_cluster()
    device = cluster.device
    world = ranks or cluster.devices
    local = min(int(os.environ.get("LOCAL_WORLD_SIZE", world)), world)
    return replace(cluster, node_groups=(NodeGroup(device=device, nodes=max(1, world // local), per_node=local),))


def _from_file(path: Path) -> tuple[str, str]:
    """(layout, precision) of the first plan of what `echelon plan --json` printed."""
    try:
        first = json.loads(path.read_text(encoding="utf-8"))["plans"][0]
        return str(first["layout"]), str(first.get("precision", ""))
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        rule = f"cannot be read ({error!r})"
        legal = "auto, or a file that `echelon plan --json` printed"
        raise ValidationError([ValidationIssue(key="plan", value=str(path), message=rule, legal=legal)]) from error
