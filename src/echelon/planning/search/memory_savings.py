"""What each technique would save of a plan's memory, and what it would cost: one line for each.

A technique is a case that differs in one thing. Both are priced, and the difference is told by category. A new
technique is a line of TECHNIQUES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from echelon.layout.rules import Facts, broken
from echelon.optim.named_rule import Named
from echelon.planning.calibrate.calibration import constants_of
from echelon.planning.calibrate.constants import FITTED, Constants
from echelon.planning.cost.activation_memory import divides
from echelon.planning.cost.recompute_cost import SEGMENTS
from echelon.planning.model.model_shape import RuleFacts
from echelon.planning.priced_plan import Plan, price
from echelon.planning.scenario import Case
from echelon.planning.search.memory_variants import with_budget

CATEGORIES = {
    "states": ("parameters", "master", "optimizer", "versions"),
    "gradients": ("gradients",),
    "activations": ("activations", "working", "logits"),
    "buffers": ("buffers",),
}
"""what a technique saves, and the parts of a plan's memory that are counted there"""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """One technique, to the plan as it is."""

    technique: str
    """the setting that asks for it"""
    saved: Mapping[str, int]
    """bytes by category, on the rank that is then the fullest; less than 0: it needs more"""
    seconds: float
    """that a step takes longer; less than 0: it is faster"""
    plan: Plan
    """with it"""
    changes: str
    """what it changes in training beside speed; nothing, mostly"""

    @property
    def total(self) -> int:
        return sum(self.saved.values())

    def to_json(self) -> dict[str, object]:
        return {
            "technique": self.technique,
            "saved_bytes": self.total,
            "saved": dict(self.saved),
            "added_s": self.seconds,
            "step_s": self.plan.seconds,
            "memory_bytes": self.plan.memory.total,
            "fits": self.plan.fits,
            "runnable": self.plan.runnable,
            "changes": self.changes,
        }


Change = Callable[[Case, Constants], Case | None]
"""the case with a technique; none where it has it already, or it would do nothing"""
OF_ONE_RULE = ("betas", "eps", "momentum", "states")
"""what another rule has values of its own for"""
ROUNDED = "values are rounded"
ANOTHER = "another rule"


def _recompute(kind: str) -> Change:
    def change(case: Case, c: Constants) -> Case | None:
        return None if kind == case.layout.recompute else replace(case, layout=replace(case.layout, recompute=kind))

    return change


def _budget(case: Case, c: Constants) -> Case | None:
    return with_budget(case, c) if case.layout.recompute.partition(":")[0] in SEGMENTS else None


def _optimizer(**keys: str | bool) -> Change:
    def change(case: Case, c: Constants) -> Case | None:
        now = case.rule or Named()
        if all(getattr(now, key) == value for key, value in keys.items()):
            return None
        if keys.get("in_backward") and case.layout.accumulate * case.layout.pp > 1:
            return None  # gradients of several microbatches are all there
        if "states" in keys and now.name != "adamw":
            return None  # a setting of AdamW
        given = {key: getattr(now, key) for key in asdict(Named()) if key not in OF_ONE_RULE or "name" not in keys}
        return replace(case, rule=Named(**{**given, **keys}))

    return change


def _compress(kind: str) -> Change:
    def change(case: Case, c: Constants) -> Case | None:
        if case.thrift.compress == kind:
            return None
        found = replace(case, thrift=replace(case.thrift, compress=kind))
        return found if price(found, c).memory.total != price(case, c).memory.total else None

    return change


def _partition(case: Case, c: Constants) -> Case | None:
    found = replace(case, thrift=replace(case.thrift, partition=True))
    repeats = case.layout.recompute.partition(":")[0] in (*SEGMENTS, "budget")
    return found if repeats and divides(found) and not divides(case) else None


def _offload(kind: str) -> Change:
    def change(case: Case, c: Constants) -> Case | None:
        if case.layout.offload != "none":
            return None
        return replace(case, layout=replace(case.layout, offload=kind), host=1.0)  # all that can leave

    return change


def _master(case: Case, c: Constants) -> Case | None:
    return replace(case, master_bytes=2) if case.precision == "bf16" and case.master_bytes > 2 else None


@dataclass(frozen=True)
class Technique:
    setting: str
    change: Change
    changes: str = ""


TECHNIQUES = (
    *(Technique(f"recompute={kind}", _recompute(kind)) for kind in ("none", "ops", "selective", "full", "sqrt")),
    Technique("recompute=budget", _budget),
    Technique("optimizer.states=bfloat16", _optimizer(states="bfloat16"), ROUNDED),
    Technique("optimizer.states=int8", _optimizer(states="int8"), ROUNDED),
    Technique("optimizer.name=lion", _optimizer(name="lion"), ANOTHER),
    Technique("optimizer.name=adafactor", _optimizer(name="adafactor"), ANOTHER),
    Technique("optimizer.name=muon", _optimizer(name="muon"), ANOTHER),
    Technique("precision.master=none", _master, ROUNDED),
    Technique("optimizer.in_backward=true", _optimizer(in_backward=True), "no clipping"),
    Technique("compress=lossless", _compress("lossless")),
    *(
        Technique(f"compress=lossless+{kind}", _compress(f"lossless+{kind}"), ROUNDED)
        for kind in ("fp16", "fp8", "int8")
    ),
    Technique("memory.partition=true", _partition),
    *(Technique(f"offload={kind}", _offload(kind)) for kind in ("optimizer", "params", "activations")),
)
"""in the order in which they are told"""


def savings(plan: Plan, c: Constants = FITTED) -> tuple[Saving, ...]:
    """What every technique would do that can do something for the plan."""
    return tuple(_found(plan, constants_of(plan.case, c)))


def _found(plan: Plan, c: Constants) -> Iterator[Saving]:
    facts = Facts(seq_len=plan.case.seq_len, model=RuleFacts(plan.case.shape))
    before = by_category(plan)
    for technique in TECHNIQUES:
        case = technique.change(plan.case, c)
        if case is None or broken(case.layout, facts) or not case.agrees:
            continue
        other = price(case, c)
        after = by_category(other)
        setting = technique.setting
        if setting == "recompute=budget":
            setting = f"recompute={case.layout.recompute}"
        yield Saving(
            technique=setting,
            saved={name: before[name] - after[name] for name in CATEGORIES},
            seconds=other.seconds - plan.seconds,
            plan=other,
            changes=technique.changes,
        )


def by_category(plan: Plan) -> dict[str, int]:
    """Of the fullest rank."""
    parts = plan.memory.parts
    return {name: sum(parts.get(part, 0) for part in members) for name, members in CATEGORIES.items()}
