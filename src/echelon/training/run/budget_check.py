"""Checks `recompute=budget` before any rank starts, by the planner's count of the model's activations.

A run measures its layers with the first microbatch, and still refuses a budget that is too small by less than the
planner's error.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from echelon.config.run_config import Config
from echelon.layout import Layout, ValidationIssue
from echelon.planning.cost.recompute_cost import budget_issues
from echelon.training.run.auto_layout import plan_request_of

FLOAT64_SCALE = 2.0
"""bytes in float64 over those in float32, which the planner counts"""


def run_budget_issues(config: Config, ranks: int) -> list[ValidationIssue]:
    """Return the issue of a too small budget in a run's layout, for a named model or a traced custom one."""
    if "budget:" not in config.layout:
        return []
    issues: list[ValidationIssue] = []
    with suppress(Exception):  # the planner does not know every model and device: the run measures it
        layout = Layout.parse(config.layout, world=ranks, batch=config.batch)
        scale = FLOAT64_SCALE if config.dtype == "float64" else 1.0
        issues = budget_issues(plan_request_of(config, ranks).scenario(layout), element_scale=scale)
    return [replace(issue, key="layout", value=f"recompute={issue.value}") for issue in issues]
