"""Names of the mesh axes that every run has, and of the axes over which tokens are divided."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.parallel.tp.cost import loss_token_axes

if TYPE_CHECKING:
    from echelon.layout import Layout
    from echelon.parallel.dp.zero import ShardingPolicy

WORLD_AXIS = "pp*replica*shard*cp*tp"
STAGE_RANKS_AXIS = "replica*shard*cp*tp"
"""ranks of one pipeline stage, which must make the same choices"""
EXPERT_SHARD_AXES = ("edp", "eshard")
"""axes over which experts are sharded: all their copies, or those of one HSDP group"""


def mesh_axis_names(policy: ShardingPolicy, token_axis: str) -> tuple[str, ...]:
    """Return the axes of every run, in the order in which all ranks create their process groups."""
    shard = policy.shard_axis
    return (
        *(policy.replica_axis, shard, "dp", "tp", f"{shard}*tp", f"pp*{shard}*tp"),
        *("pp", token_axis, f"pp*{token_axis}", WORLD_AXIS),
    )


def token_axes(layout: Layout) -> tuple[str, ...]:
    """Return the axes over which the tokens of a step are divided."""
    context = ("cp",) if layout.cp > 1 else ()
    return ("dp", *context, *loss_token_axes(layout))
