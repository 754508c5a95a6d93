"""Properties of gates by name. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LOAD_BALANCED_GATES = ("loss-free", "deepseek-v3")
"""gates that balance by the expert load of each step"""
GROUP_LIMITED_GATES = ("deepseek-v2", "deepseek-v3")
"""gates that limit a token to experts of a few groups"""
DEFAULT_GROUP_SIZE = 4
"""default experts per group"""


def most_square_divisor(num_experts: int) -> int:
    """The largest divisor up to the square root: both levels of a hierarchy choose among few."""
    candidates = range(1, max(num_experts, 1) + 1)
    return max(a for a in candidates if a == 1 or (num_experts % a == 0 and a * a <= num_experts))


def num_router_rows(gate: str, num_experts: int, options: Mapping[str, Any]) -> int:
    """Rows of all router weights of a gate."""
    if gate == "noisy-top-k":
        return 2 * num_experts
    if gate == "hierarchical":
        return 2 * (num_experts + int(options.get("num_groups") or most_square_divisor(num_experts)))
    return num_experts


def group_options(gate: str, num_experts: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a gate with groups that suit the number of experts."""
    others = {key: value for key, value in options.items() if key not in ("num_groups", "group_limit")}
    if gate not in GROUP_LIMITED_GATES:
        return others  # the hierarchical gate derives its groups
    groups = max(num_experts // DEFAULT_GROUP_SIZE, 1)
    return {**others, "num_groups": groups, "group_limit": max(groups // 2, 1)}
