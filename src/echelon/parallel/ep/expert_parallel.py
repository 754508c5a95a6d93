"""Transform of expert parallelism: each rank holds some of the experts, and tokens are dispatched to theirs and back.

Experts are folded into the ranks of a stage (dp x cp x tp). Whatever those ranks are for the rest of the model, for
experts they are edp replicas of ep parts, each expert split once more over etp. Every rank has tokens of its own: its
sequences, its slice of them under cp, and its slice of that under tp with sequence parallelism. So a token is sent
once, and no rank computes what another one does. token_dispatch.py sends the tokens, cost.py counts the collectives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.layout.placement import DimSplit
from echelon.moe.moe_layer import MoELayer
from echelon.parallel.ep.foreign_dispatch import apply_foreign_experts
from echelon.parallel.ep.routing_sums import apply_routing_sums
from echelon.parallel.ep.token_dispatch import AllToAllTokenDispatcher
from echelon.parallel.tp.tensor_parallel import ModuleSplitter

if TYPE_CHECKING:
    from echelon.layout import Layout
    from echelon.parallel.transform_context import TransformContext


def apply_expert_parallel(context: TransformContext) -> None:
    """Give every MoE layer a token dispatcher, and split its experts over ep and etp."""
    model, layout, axes = context.model, context.layout, context.axes
    apply_routing_sums(context)
    if apply_foreign_experts(context):
        return
    moe_layers = {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}
    _check(type(model).__name__, layout, has_experts=bool(moe_layers))
    if not moe_layers or layout.ep * layout.etp * layout.cp * layout.tp == 1:
        return
    splitter = ModuleSplitter(model, context.params)
    for name, moe in moe_layers.items():
        experts = moe.gate.num_experts
        if experts % layout.ep:
            raise ValueError(f"ep={layout.ep} does not divide the {experts} experts of {name}; use a divisor of them")
        moe.dispatcher = AllToAllTokenDispatcher(layout, axes, context.tp_boundary, context.cp_context, experts=experts)
        moe.experts.first_unit = axes.coordinates["etp"] * -(-moe.experts.up.shape[2] // layout.etp)
        ep, etp = DimSplit(axis="ep", dim=0, num_parts=layout.ep), DimSplit(axis="etp", dim=2, num_parts=layout.etp)
        for key in ("up", "down"):
            splitter.update_param(f"{name}.experts.{key}", splits=(ep, etp), is_expert=True)
        if layout.tp > 1:
            for key, _ in moe.gate.named_parameters():
                splitter.update_param(f"{name}.gate.{key}", partial_grad_axes=("tp",))
    context.params = splitter.split_params()
    context.has_expert_params = any(param.is_expert for param in context.params)


def _check(model_name: str, layout: Layout, *, has_experts: bool) -> None:
    if not has_experts and layout.ep * layout.etp > 1:
        raise ValueError(
            f"{model_name} has no experts to divide (ep={layout.ep}, etp={layout.etp}); "
            "use a model with MoE layers (moe-tiny, mixtral-8x7b), or ep=1"
        )
    if has_experts and layout.tp > 1 and (layout.tp_kind != "1d" or not layout.sp):
        raise ValueError(
            f"experts require tokens that are divided over tp by position (tp={layout.tp}, "
            f"tp_kind={layout.tp_kind}, sp={layout.sp}); use tp_kind=1d and sp=1"
        )
