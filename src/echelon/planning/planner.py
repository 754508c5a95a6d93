"""From what a person writes to plans: `echelon plan`, `echelon.planning(...)` and `train --plan auto` ask here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from echelon.layout import check, grammar
from echelon.layout.validation_error import Fault, FaultError
from echelon.optim import cost
from echelon.optim.update_rule import Rule
from echelon.planning.calibrate import correction as corrections
from echelon.planning.calibrate.constants import IMBALANCE
from echelon.planning.cluster import cluster as clusters
from echelon.planning.cost.param_group_traffic import MOMENTS
from echelon.planning.explain.reasons import explained, infeasible, time_to
from echelon.planning.memory_options import Thrift
from echelon.planning.model.model_shape import RuleFacts
from echelon.planning.model.model_sources import shape_of
from echelon.planning.priced_plan import Plan, price
from echelon.planning.scenario import NOTHING
from echelon.planning.search.layout_families import OBJECTIVES, Wish
from echelon.planning.search.layout_search import nearest, search

Made = TypeVar("Made")
PRECISIONS = ("bf16", "fp16", "fp8", "fp4", "fp32")
SEQUENCES = 4096
"""tokens of a sequence, where nothing is said, at most"""
PER_DEVICE = 16
"""sequences of a step for each device, where nothing is said"""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Plans, best first, and what there is to say of them."""

    plans: tuple[Plan, ...]
    words: tuple[str, ...] = ()
    """why nothing fits"""
    nearest: Plan | None = None
    """where nothing fits, what needs the least"""


def answer(
    model: str,
    cluster: str,
    *,
    batch: int = 0,
    seq_len: int = 0,
    layout: str = "",
    fixed: str = "",
    precision: str = "bf16",
    objective: str = "time",
    plan_only: bool = False,
    top: int = 10,
    correct: str = "",
    tokens: float = 0.0,
    imbalance: float = 0.0,
    rule: Rule | None = None,
    thrift: Thrift = NOTHING,
    host: float | None = None,
) -> Answer:
    """Plans for a model on a cluster. With `layout`, that one alone; with `fixed`, those that have these keys.

    Without a batch, 16 sequences for each device; without a length, the model's longest, at most 4,096. With `correct`,
    the folder of a run, times are multiplied by what that run measured over what it was predicted to take. With
    `tokens`, it is said how long so many take. `imbalance` is of a mixture: rows of experts on the busiest of the ranks
    that divide them, to the mean. `rule` is the optimizer, `thrift` what is done beside the layout to need less memory,
    `host` the share of the states that leave the device where the layout lets them.
    """
    if not 0 <= tokens < float("inf"):
        raise FaultError([Fault(key="tokens", value=str(tokens), rule="is not a number of tokens", legal="> 0")])
    wish = _wish(model, cluster, batch, seq_len, fixed, precision, objective, plan_only, correct, imbalance)
    if rule is not None:
        wish = replace(wish, rule=rule, moment_bytes=cost.element_bytes(rule) / MOMENTS)
    wish = replace(wish, thrift=thrift, host=host)
    found = _answer(wish, model, layout, top)
    if layout and imbalance and found.plans[0].layout.ep == 1:
        why = "has no effect on ep=1: a rank that has all experts works on as many rows, whichever they are for"
        raise FaultError([Fault(key="imbalance", value=f"{imbalance:g}", rule=why, hint="leave it out, or give ep")])
    if correct:
        found = replace(found, plans=tuple(corrections.explained(plan, correct) for plan in found.plans))
    if tokens:
        told = (replace(plan, reasons=(*plan.reasons, time_to(plan, tokens))) for plan in found.plans)
        found = replace(found, plans=tuple(told))
    return found


def _answer(wish: Wish, model: str, layout: str, top: int) -> Answer:
    if layout:
        if wish.fixed:
            fixed = ",".join(f"{key}={value}" for key, value in wish.fixed.items())
            rule = "has no effect beside --layout, which prices one layout"
            raise FaultError([Fault(key="fix", value=fixed, rule=rule, hint="leave it out")])
        return Answer(plans=(priced(wish, layout),))
    plans = search(wish, top=top)
    if plans:
        return Answer(plans=(explained(wish, plans), *plans[1:]))
    least = nearest(wish)
    if least is None:
        rule = f"cannot be divided over {wish.cluster.devices} devices with a batch of {wish.batch}"
        hint = "change the batch, or fix fewer keys"
        raise FaultError([Fault(key="model", value=model, rule=rule, hint=hint)])
    return Answer(plans=(), words=tuple(infeasible(least)), nearest=least)


def priced(wish: Wish, text: str) -> Plan:
    """One layout, as it is written; it must fill the cluster and the batch, whether or not it fits the memory."""
    layout = check(
        text, world=wish.cluster.devices, batch=wish.batch, seq_len=wish.seq_len, model=RuleFacts(wish.shape)
    )
    return price(wish.case(layout))


def _wish(
    model: str,
    cluster: str,
    batch: int,
    seq_len: int,
    fixed: str,
    precision: str,
    objective: str,
    plan_only: bool,
    correct: str,
    imbalance: float,
) -> Wish:
    """All that is wrong is told at once."""
    faults: list[Fault] = []
    shape = _or_faults(lambda: shape_of(model), faults)
    found = _or_faults(lambda: clusters.parse(cluster), faults)
    ratio = _or_faults(lambda: corrections.ratio_of(correct, found), faults) if correct else 1.0
    read = grammar.read(fixed)
    faults += read.faults
    if precision not in PRECISIONS:
        faults.append(Fault(key="precision", value=precision, rule="is not known", legal=", ".join(PRECISIONS)))
    if objective not in OBJECTIVES:
        faults.append(Fault(key="objective", value=objective, rule="is not known", legal=", ".join(OBJECTIVES)))
    for key, value in (("batch", batch), ("seq-len", seq_len)):
        if value < 0:
            faults.append(Fault(key=key, value=str(value), rule="is less than 1", legal=">= 1"))
    if imbalance and not 1 <= imbalance < float("inf"):
        rule = "is not the rows of the busiest rank to the mean"
        faults.append(Fault(key="imbalance", value=f"{imbalance:g}", rule=rule, legal=">= 1"))
    elif imbalance and shape is not None and not shape.experts:
        rule = f"has no effect: {shape.name} has no experts"
        faults.append(Fault(key="imbalance", value=f"{imbalance:g}", rule=rule, hint="leave it out"))
    # Rotary positions have no end; a table of positions has.
    if shape is not None and shape.position_parameters and seq_len > shape.max_seq_len:
        rule = f"is longer than {shape.name} allows"
        faults.append(Fault(key="seq-len", value=str(seq_len), rule=rule, legal=f"1 to {shape.max_seq_len}"))
    if found is not None and precision in ("fp8", "fp4") and precision not in found.device.flops:
        legal = ", ".join(kind for kind in PRECISIONS if kind in found.device.flops)
        rule = f"cannot be multiplied by {found.device.name}"
        faults.append(Fault(key="precision", value=precision, rule=rule, legal=legal))
    if faults or shape is None or found is None:
        raise FaultError(faults)
    return Wish(
        shape=shape,
        cluster=found,
        batch=batch or PER_DEVICE * found.devices,
        seq_len=seq_len or min(shape.max_seq_len or SEQUENCES, SEQUENCES),
        precision=precision,
        fixed=dict(read.given),
        plan_only=plan_only,
        objective=objective,
        correction=ratio or 1.0,
        imbalance=imbalance or IMBALANCE,
    )


def _or_faults(make: Callable[[], Made], faults: list[Fault]) -> Made | None:
    try:
        return make()
    except FaultError as error:
        faults += error.faults
        return None


def command_of(plan: Plan, model: str, settings: Sequence[str] = ()) -> str:
    """What trains it, with these settings; nothing where that cannot be trained yet."""
    if not plan.runnable or model.endswith(".json"):
        return ""
    layout, cluster = plan.layout, plan.case.cluster
    here = min(cluster.per_node, layout.world)
    nodes = -(-layout.world // here)
    chosen = {
        "model": model,
        "layout": str(layout),
        "batch": layout.batch,
        "seq_len": plan.case.seq_len,
        "dtype": {"fp32": "float32", "fp16": "float16"}.get(plan.case.precision, "bfloat16"),
        **({"precision.compute": "fp8"} if plan.case.precision == "fp8" else {}),
    }
    given = " ".join(f"--set {text}" for text in (*(f"{key}={value}" for key, value in chosen.items()), *settings))
    several = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:PORT " if nodes > 1 else ""
    return f"torchrun {several}--nproc-per-node {here} -m echelon train {given}"
