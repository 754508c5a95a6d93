"""Why a layout does not divide a model of `hf:DIR`, found on the meta device before ranks start.

The transforms refuse the same (parallel/apply.py): this is their answer without ranks, in one sentence each.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from echelon.layout.validation_error import ValidationIssue
from echelon.models.foreign.hf_source import read_hf_source

if TYPE_CHECKING:
    from echelon.layout import Layout
    from echelon.models.foreign.causal_lm import ForeignCausalLM

ONE_BY_ONE = {"pp": "pp=1", "sp": "sp=0", "cp": "cp=1"}
"""keys of layouts that run layers one by one, and the value that does not"""


def find_hf_layout_issues(model: str, layout: Layout) -> list[ValidationIssue]:
    """What of a layout a directory's class does not allow. Plain data parallelism is not looked at: it divides any."""
    if layout.pp == layout.tp == layout.cp == layout.ep == 1:
        return []
    return find_layout_issues(_build(model), layout)


@lru_cache(maxsize=1)
def _build(model: str) -> ForeignCausalLM:
    from echelon.models.foreign.causal_lm import build_causal_lm

    built: ForeignCausalLM = build_causal_lm(read_hf_source(model))
    return built


def find_layout_issues(model: ForeignCausalLM, layout: Layout) -> list[ValidationIssue]:
    """What of a layout an adapted model does not allow."""
    from echelon.models.foreign.foreign_experts import ForeignExperts
    from echelon.parallel.cp.sequence_plan import plan_sequences

    name, problem = type(model).__name__, model.layer_problem
    sizes = {"pp": layout.pp, "sp": layout.tp if layout.sp else 1, "cp": layout.cp}
    issues = [
        ValidationIssue(
            key=key,
            value=str(layout.sp if key == "sp" else sizes[key]),
            message=f"runs the layers of {name} one by one, but {problem}",
            hint=f"use {remedy}",
        )
        for key, remedy in ONE_BY_ONE.items()
        if problem and sizes[key] > 1
    ]
    if layout.cp > 1 and not problem and (undivided := plan_sequences(model).problem):
        issues.append(ValidationIssue("cp", str(layout.cp), f"cannot divide {name}: {undivided}", hint="use cp=1"))
    counts = {module.all_experts for module in model.modules() if isinstance(module, ForeignExperts)}
    if layout.ep > 1 and any(count % layout.ep for count in counts or {1}):
        has = f"{' and '.join(map(str, sorted(counts)))} experts" if counts else "no experts with stacked weights"
        issues.append(
            ValidationIssue("ep", str(layout.ep), f"does not divide {name}, which has {has}", hint="use ep=1")
        )
    return issues
