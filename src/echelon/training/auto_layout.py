"""A run that leaves the choice of its layout to the planner, or to a file that the planner wrote."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.config.config_rules import idle
from echelon.config.run_config import Config
from echelon.config.sections import OptimizerConfig
from echelon.layout import Fault, FaultError
from echelon.models import model_config, user_model
from echelon.optim import cost
from echelon.planning.cluster.cluster import Cluster, Part, here
from echelon.planning.cost.param_group_traffic import MOMENTS
from echelon.planning.explain.reasons import infeasible
from echelon.planning.memory_options import Thrift
from echelon.planning.model.model_sources import of_config
from echelon.planning.priced_plan import Plan
from echelon.planning.search.layout_families import Wish
from echelon.planning.search.layout_search import nearest, search

AUTO = "auto"
MIB = 1 << 20
PLANNED = ("optimizer.", "clip", "compress", "memory.partition", "memory.arena", "memory.buffer", "memory.host")
"""settings that `plan` asks too; updates in backward ask for no clipping"""
TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp32"}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 4}
"""of an element, as planning counts: float64 is not priced"""


def planned(config: Config, plan: str, procs: int | None) -> tuple[Config, str]:
    """(the configuration in the layout that was chosen, a line that says where it comes from).

    A file's plan may have its products in 8 bits, and then the run has.
    """
    if config.layout:
        rule = f"leaves nothing to choose beside layout={config.layout}"
        raise FaultError([Fault(key="plan", value=plan, rule=rule, hint="give one of them")])
    if plan == AUTO:
        best = best_plan(config, procs)
        words = f"planned: {best.layout}, {best.seconds:.3g} s a step predicted"
        return replace(config, layout=str(best.layout)), words
    layout, precision = _from_file(Path(plan))
    if precision != "fp8" or config.precision.compute != "same":
        return replace(config, layout=layout), f"layout from {plan}"
    narrow = replace(config, layout=layout, dtype="bfloat16", precision=replace(config.precision, compute="fp8"))
    return narrow, f"layout and products in 8 bits from {plan}"


def precision_of(config: Config) -> str:
    """Of the products, as planning calls it; scales for each row or for each tensor are not told apart."""
    return TYPES[config.dtype] if config.precision.compute == "same" else "fp8"


def reduce_bytes(config: Config) -> int:
    """Of an element of a gradient where it adds up and is reduced."""
    asked = config.precision.reduce
    return BYTES[{"master": "float32", "same": config.dtype}.get(asked, asked)]


def master_bytes(config: Config) -> int:
    """Of an element of what the optimizer updates."""
    return 2 if config.precision.master == "none" else 4


def program_of(config: Config) -> str:
    return "plain" if config.kernels == "plain" else "echelon"


def thrift_of(config: Config) -> Thrift:
    """What the run does to need less memory, as planning calls it."""
    memory = config.memory
    return Thrift(
        compress=config.compress,
        partition=memory.partition,
        arena=memory.arena,
        buffer=int(memory.buffer * MIB),
    )


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What `plan --set` says, as `train --set` has it."""

    rule: OptimizerConfig | None
    """none where nothing is said of it"""
    thrift: Thrift
    host: float | None


def asked(settings: Sequence[str], layout: str = "") -> Asked:
    """Where no `layout` is given many are tried, and a key may do something in some of them."""
    other = [text for text in settings if not text.partition("=")[0].startswith(PLANNED)]
    if other:
        rule = "changes nothing that `plan` asks by --set"
        legal = "optimizer.*, clip, compress, memory.* but for memory.disk"
        raise FaultError([Fault(key="set", value=text, rule=rule, legal=legal) for text in other])
    config = Config.of_settings(settings, layout)
    of_optimizer = any(text.startswith("optimizer.") for text in settings)
    rule_asked = config.optimizer if of_optimizer else None
    return Asked(rule=rule_asked, thrift=thrift_of(config), host=config.memory.host)


def effective(settings: Sequence[str], layout: str) -> list[str]:
    """Those that do something in a layout: `train` refuses the others there."""
    idle_here = idle(replace(Config(), layout=layout))
    return [text for text in settings if text.partition("=")[0] not in idle_here]


def best_plan(config: Config, procs: int | None) -> Plan:
    """The best runnable plan on this machine, or on the ranks that a launcher started."""
    if user_model.is_own(config.model):
        rule = "plans named models; a module of your own is planned by `echelon plan file.py:factory`"
        raise FaultError([Fault(key="plan", value=AUTO, rule=rule, hint="set layout")])
    world = int(os.environ.get("WORLD_SIZE", procs or 0)) or None
    wish = wish_of(config, world)
    found = search(wish, top=1)
    if found:
        return found[0]
    least = nearest(wish)
    words = infeasible(least) if least else [f"a batch of {config.batch} does not divide over the ranks"]
    raise FaultError([Fault(key="plan", value=AUTO, rule="found no layout", hint=" ".join(words))])


def wish_of(config: Config, ranks: int | None) -> Wish:
    """A run as a question to the planner: the best layout on so many ranks, or one for each device of this machine."""
    shape = config.changed(model_config.find(config.model))
    return Wish(
        shape=of_config(shape),
        cluster=_ranks(ranks, config.device),
        batch=config.batch,
        seq_len=config.seq_len,
        precision=precision_of(config),
        program=program_of(config),
        moment_bytes=cost.element_bytes(config.optimizer) / MOMENTS,
        reduce_bytes=reduce_bytes(config),
        master_bytes=master_bytes(config),
        rule=config.optimizer,
        thrift=thrift_of(config),
    )


def _ranks(ranks: int | None, asked: str) -> Cluster:
    """This machine with as many ranks as there are, or as a launcher started on how many machines."""
    cluster = here(asked)
    world = ranks or cluster.devices
    local = min(int(os.environ.get("LOCAL_WORLD_SIZE", world)), world)
    if asked == "auto" and local > cluster.devices:  # as ranks join: a GPU for each, or the CPU for all
        cluster = here("cpu")
    return replace(cluster, parts=(Part(device=cluster.device, nodes=max(1, world // local), per_node=local),))


def _from_file(path: Path) -> tuple[str, str]:
    """(layout, precision) of the first plan of what `echelon plan --json` printed."""
    try:
        first = json.loads(path.read_text(encoding="utf-8"))["plans"][0]
        return str(first["layout"]), str(first.get("precision", ""))
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        rule = f"cannot be read ({error!r})"
        legal = "auto, or a file that `echelon plan --json` printed"
        raise FaultError([Fault(key="plan", value=str(path), rule=rule, legal=legal)]) from error
