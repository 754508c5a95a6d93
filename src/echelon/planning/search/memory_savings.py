"""Memory that each technique would save of a plan, and the time it would cost.

A technique changes one thing of a scenario. Both scenarios are priced, and their difference is reported by category. A
new technique is a line of TECHNIQUES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from echelon.optim.update_rule import UpdateRule
from echelon.planning.calibrate.calibration import constants_for
from echelon.planning.calibrate.constants import FITTED_CONSTANTS, Constants
from echelon.planning.cost.activation_memory import partitions_inputs
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
ROUNDED = "values are rounded"
OPTIMIZERS, LOSSY_COMPRESSIONS = ("lion", "adafactor", "muon"), ("lossless+fp16", "lossless+fp8", "lossless+int8")


def _recompute(policy: str) -> ScenarioChange:
    def change(scenario: Scenario, c: Constants) -> Scenario | None:
        other = replace(scenario, layout=replace(scenario.layout, recompute=policy))
        return other if policy != scenario.layout.recompute else None

    return change


def _budget(scenario: Scenario, c: Constants) -> Scenario | None:
    return with_budget(scenario, c) if scenario.recomputes_layers else None


def _optimizer(**keys: str | bool) -> ScenarioChange:
    def change(scenario: Scenario, c: Constants) -> Scenario | None:
        rule = scenario.optimizer or UpdateRule()
        if all(getattr(rule, key) == value for key, value in keys.items()):
            return None
        if keys.get("in_backward") and scenario.layout.accumulate * scenario.layout.pp > 1:
            return None  # gradients of several microbatches accumulate
        if "states" in keys and rule.name != "adamw":
            return None  # a setting of AdamW
        names = [key for key in asdict(UpdateRule()) if key not in RULE_SPECIFIC_KEYS or "name" not in keys]
        return replace(scenario, optimizer=UpdateRule(**{**{key: getattr(rule, key) for key in names}, **keys}))

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
    recomputes = scenario.recomputes_layers or scenario.layout.recompute.startswith("budget")
    return partitioned if recomputes and partitions_inputs(partitioned) and not partitions_inputs(scenario) else None


def _offload(kind: str) -> ScenarioChange:
    def change(scenario: Scenario, c: Constants) -> Scenario | None:
        offloaded = replace(scenario, layout=replace(scenario.layout, offload=kind), host_share=1.0)
        return offloaded if scenario.layout.offload == "none" else None

    return change


def _master(scenario: Scenario, c: Constants) -> Scenario | None:
    return replace(scenario, master_bytes=2) if scenario.precision == "bf16" and scenario.master_bytes > 2 else None


@dataclass(frozen=True)
class Technique:
    setting: str
    change: ScenarioChange
    training_effect: str = ""


TECHNIQUES = (
    *(Technique(f"recompute={kind}", _recompute(kind)) for kind in ("none", "ops", "selective", "full", "sqrt")),
    Technique("recompute=budget", _budget),
    *(Technique(f"optimizer.states={dtype}", _optimizer(states=dtype), ROUNDED) for dtype in ("bfloat16", "int8")),
    *(Technique(f"optimizer.name={name}", _optimizer(name=name), "another rule") for name in OPTIMIZERS),
    Technique("precision.master=none", _master, ROUNDED),
    Technique("optimizer.in_backward=true", _optimizer(in_backward=True), "no clipping"),
    Technique("compress=lossless", _compress("lossless")),
    *(Technique(f"compress={kind}", _compress(kind), ROUNDED) for kind in LOSSY_COMPRESSIONS),
    Technique("memory.partition=true", _partition),
    *(Technique(f"offload={kind}", _offload(kind)) for kind in ("optimizer", "params", "activations")),
)
"""in the order of the report"""


def memory_savings(plan: Plan, c: Constants = FITTED_CONSTANTS) -> tuple[MemorySaving, ...]:
    """Price every technique that has an effect on the plan."""
    return tuple(_iter_savings(plan, constants_for(plan.scenario, c)))


def _iter_savings(plan: Plan, c: Constants) -> Iterator[MemorySaving]:
    before = grouped_memory(plan)
    for technique in TECHNIQUES:
        scenario = technique.change(plan.scenario, c)
        if scenario is None or scenario.violations(scenario.layout) or not scenario.is_compatible:
            continue
        other = price(scenario, c)
        after, is_budget = grouped_memory(other), technique.setting == "recompute=budget"
        yield MemorySaving(
            technique=f"recompute={scenario.layout.recompute}" if is_budget else technique.setting,
            saved={name: before[name] - after[name] for name in SAVING_CATEGORIES},
            added_seconds=other.seconds - plan.seconds,
            plan=other,
            training_effect=technique.training_effect,
        )


def grouped_memory(plan: Plan) -> dict[str, int]:
    """Bytes of the fullest rank by reported category."""
    parts = plan.memory.parts
    return {name: sum(parts.get(part, 0) for part in members) for name, members in SAVING_CATEGORIES.items()}
