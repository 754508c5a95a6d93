"""Expert parallelism: each rank holds some of the experts, and tokens travel to theirs and back.

Experts are folded into the ranks of a stage (dp x cp x tp): whatever those are for the rest of the model, for experts
they are edp copies of ep parts, each expert cut once more over etp. Every rank has tokens of its own (its sequences,
its slice of them under cp, and its slice of that under tp with sequence parallelism), so a token is sent once, and
nobody computes what somebody else does. How they travel is in dispatch.py, what it costs in expert_cost.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from echelon.layout import Layout
from echelon.layout.placement import DimSplit, LogicalParam

if TYPE_CHECKING:
    from torch import nn

    from echelon.parallel.comm.mesh_axis import MeshAxes
    from echelon.parallel.cp.context_parallel import ContextParallel
    from echelon.parallel.tp.tp_collectives import RegionBoundary

EP_ETP_AXIS = "ep*etp"
"""the ranks that hold all experts between them"""
MAX_LOAD_FACTOR = 2.0
"""rows of experts that a rank has at a time, at most, to those of an even load: see rounds.py"""


def apply_expert_parallel(
    model: nn.Module,
    params: Iterable[LogicalParam],
    layout: Layout,
    axes: MeshAxes,
    boundary: RegionBoundary | None,
    context: ContextParallel | None,
) -> list[LogicalParam]:
    """Makes every mixture of a model reach experts and tokens elsewhere, and says how experts are cut."""
    from echelon.moe.moe_layer import MoELayer
    from echelon.parallel.ep.token_dispatch import AllToAllTokenDispatcher

    found = {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}
    if not found:
        if layout.ep * layout.etp > 1:
            raise ValueError(
                f"{type(model).__name__} has no experts to divide (ep={layout.ep}, etp={layout.etp}); "
                "use a model with mixtures (moe-tiny, mixtral-8x7b), or ep=1"
            )
        return list(params)
    if layout.tp > 1 and (layout.tp_kind != "1d" or not layout.sp):
        raise ValueError(
            f"experts need tokens that are divided over tp by position (tp={layout.tp}, tp_kind={layout.tp_kind}, "
            f"sp={layout.sp}); use tp_kind=1d and sp=1"
        )
    if layout.ep * layout.etp * layout.cp * layout.tp == 1:
        return list(params)
    changed = {name: entry for entry in params for name in entry.names}
    for name, mixture in found.items():
        experts = mixture.gate.num_experts
        if experts % layout.ep:
            raise ValueError(f"ep={layout.ep} does not divide the {experts} experts of {name}; use a divisor of them")
        mixture.dispatcher = AllToAllTokenDispatcher(layout, axes, boundary, context, experts=experts)
        mixture.experts.first_unit = axes.coordinates["etp"] * -(-mixture.experts.up.shape[2] // layout.etp)
        parts = DimSplit(axis="ep", dim=0, num_parts=layout.ep)
        for key in ("up", "down"):
            cuts = (parts, DimSplit(axis="etp", dim=2, num_parts=layout.etp))
            entry = replace(changed[f"{name}.experts.{key}"], splits=cuts, is_expert=True)
            changed.update(dict.fromkeys(entry.names, entry))
        if layout.tp > 1:
            for key, _ in mixture.gate.named_parameters():
                entry = replace(changed[f"{name}.gate.{key}"], partial_grad_axes=("tp",))
                changed.update(dict.fromkeys(entry.names, entry))
    return [changed[entry.name] for entry in params]
