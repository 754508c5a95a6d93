"""Memory that each technique would save of a plan, and the time it would cost.

A technique changes one thing of a scenario. Both scenarios are priced, and their difference is reported by category. A
new technique is a line of TECHNIQUES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from echelon.layout.rules import LayoutConstraints, find_violations
from echelon.optim.update_rule import UpdateRule
from echelon.planning.calibrate.calibration import constants_for
from echelon.planning.calibrate.constants import FITTED_CONSTANTS, Constants
from echelon.planning.cost.activation_memory import partitions_inputs
from echelon.planning.cost.recompute_cost import FULL_LAYER_POLICIES
from echelon.planning.model.model_shape import RuleFacts
from echelon.planning.priced_plan import Plan, price
from echelon.planning.scenario import Scenario
from echelon.planning.search.memory_variants import with_budget

SAVING_CATEGORIES = {
    "states": ("parameters", "master", "optimizer", "versions"),
    "gradients": ("gradients",),
    "activations": ("activations", "working", "logits"),
    "buffers": ("buffers",),
}
"""reported categories, and the categories of a plan's memory that each sums"""


@dataclass(frozen=True, kw_only=True)
class MemorySaving:
    """What one technique saves and costs, relative to a plan."""

    technique: str
    """the setting that enables it"""
    saved: Mapping[str, int]
    """bytes by category, on the rank that is then the fullest; negative if it needs more"""
    added_seconds: float
    """per step; negative if it is faster"""
    plan: Plan
    """the plan with the technique"""
    training_effect: str
    """how it changes training, besides speed; mostly empty"""

    @property
    def total(self) -> int:
        return sum(self.saved.values())

    def to_json(self) -> dict[str, object]:
        return {
            "technique": self.technique,
            "saved_bytes": self.total,
            "saved": dict(self.saved),
            "added_s": self.added_seconds,
            "step_s": self.plan.seconds,
            "memory_bytes": self.plan.memory.total,
            "fits": self.plan.fits,
            "runnable": self.plan.runnable,
            "changes": self.training_effect,
        }


ScenarioChange = Callable[[Scenario, Constants], Scenario | None]
"""returns the scenario with a technique; None if it has it already, or it would have no effect"""
RULE_SPECIFIC_KEYS = ("betas", "eps", "momentum", "states")
"""keys that another rule has defaults of its own for"""
ROUNDED_VALUES = "values are rounded"
OTHER_OPTIMIZER = "another rule"


def _recompute(kind: str) -> ScenarioChange:
    def change(scenario: Scenario, c: Constants) -> Scenario | None:
        if kind == scenario.layout.recompute:
            return None
        return replace(scenario, layout=replace(scenario.layout, recompute=kind))

    return change


def _budget(scenario: Scenario, c: Constants) -> Scenario | None:
    return with_budget(scenario, c) if scenario.layout.recompute.partition(":")[0] in FULL_LAYER_POLICIES else None


def _optimizer(**keys: str | bool) -> ScenarioChange:
    def change(scenario: Scenario, c: Constants) -> Scenario | None:
        rule = scenario.optimizer or UpdateRule()
        if all(getattr(rule, key) == value for key, value in keys.items()):
            return None
        if keys.get("in_backward") and scenario.layout.accumulate * scenario.layout.pp > 1:
            return None  # gradients of several microbatches accumulate
        if "states" in keys and rule.name != "adamw":
            return None  # a setting of AdamW
        kept = [key for key in asdict(UpdateRule()) if key not in RULE_SPECIFIC_KEYS or "name" not in keys]
        return replace(scenario, optimizer=UpdateRule(**{**{key: getattr(rule, key) for key in kept}, **keys}))

    return change


def _compress(kind: str) -> ScenarioChange:
    def change(scenario: Scenario, c: Constants) -> Scenario | None:
        if scenario.memory_options.compress == kind:
            return None
        compressed = replace(scenario, memory_options=replace(scenario.memory_options, compress=kind))
        return compressed if price(compressed, c).memory.total != price(scenario, c).memory.total else None

    return change


def _partition(scenario: Scenario, c: Constants) -> Scenario | None:
    partitioned = replace(scenario, memory_options=replace(scenario.memory_options, partition=True))
    recomputes = scenario.layout.recompute.partition(":")[0] in (*FULL_LAYER_POLICIES, "budget")
    return partitioned if recomputes and partitions_inputs(partitioned) and not partitions_inputs(scenario) else None


def _offload(kind: str) -> ScenarioChange:
    def change(scenario: Scenario, c: Constants) -> Scenario | None:
        if scenario.layout.offload != "none":
            return None
        return replace(scenario, layout=replace(scenario.layout, offload=kind), host_share=1.0)

    return change


def _master(scenario: Scenario, c: Constants) -> Scenario | None:
    return replace(scenario, master_bytes=2) if scenario.precision == "bf16" and scenario.master_bytes > 2 else None


@dataclass(frozen=True)
class Technique:
    """A setting that saves memory."""

    setting: str
    change: ScenarioChange
    training_effect: str = ""


TECHNIQUES = (
    *(Technique(f"recompute={kind}", _recompute(kind)) for kind in ("none", "ops", "selective", "full", "sqrt")),
    Technique("recompute=budget", _budget),
    Technique("optimizer.states=bfloat16", _optimizer(states="bfloat16"), ROUNDED_VALUES),
    Technique("optimizer.states=int8", _optimizer(states="int8"), ROUNDED_VALUES),
    Technique("optimizer.name=lion", _optimizer(name="lion"), OTHER_OPTIMIZER),
    Technique("optimizer.name=adafactor", _optimizer(name="adafactor"), OTHER_OPTIMIZER),
    Technique("optimizer.name=muon", _optimizer(name="muon"), OTHER_OPTIMIZER),
    Technique("precision.master=none", _master, ROUNDED_VALUES),
    Technique("optimizer.in_backward=true", _optimizer(in_backward=True), "no clipping"),
    Technique("compress=lossless", _compress("lossless")),
    *(
        Technique(f"compress=lossless+{kind}", _compress(f"lossless+{kind}"), ROUNDED_VALUES)
        for kind in ("fp16", "fp8", "int8")
    ),
    Technique("memory.partition=true", _partition),
    *(Technique(f"offload={kind}", _offload(kind)) for kind in ("optimizer", "params", "activations")),
)
"""in the order of the report"""


def memory_savings(plan: Plan, c: Constants = FITTED_CONSTANTS) -> tuple[MemorySaving, ...]:
    """Price every technique that has an effect on the plan."""
    return tuple(_priced_savings(plan, constants_for(plan.scenario, c)))


def _priced_savings(plan: Plan, c: Constants) -> Iterator[MemorySaving]:
    facts = LayoutConstraints(seq_len=plan.scenario.seq_len, model=RuleFacts(plan.scenario.shape))
    before = grouped_memory(plan)
    for technique in TECHNIQUES:
        scenario = technique.change(plan.scenario, c)
        if scenario is None or find_violations(scenario.layout, facts) or not scenario.is_compatible:
            continue
        other = price(scenario, c)
        after = grouped_memory(other)
        setting = technique.setting
        if setting == "recompute=budget":
            setting = f"recompute={scenario.layout.recompute}"
        yield MemorySaving(
            technique=setting,
            saved={name: before[name] - after[name] for name in SAVING_CATEGORIES},
            added_seconds=other.seconds - plan.seconds,
            plan=other,
            training_effect=technique.training_effect,
        )


def grouped_memory(plan: Plan) -> dict[str, int]:
    """Bytes of the fullest rank by reported category."""
    parts = plan.memory.parts
    return {name: sum(parts.get(part, 0) for part in members) for name, members in SAVING_CATEGORIES.items()}
