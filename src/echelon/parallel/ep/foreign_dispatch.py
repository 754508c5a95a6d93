"""Expert parallelism of transformers' MoE classes: tokens go to the ranks of their experts and back.

Each rank routes tokens of its own: its sequences, and its slice of them under cp and sequence parallelism. Their copies
are sorted by expert, sent (token_all_to_all.py), computed by the class's own code with one expert each, and sent back.
The weights of the choices stay where the tokens are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from echelon.layout.placement import DimSplit
from echelon.models.foreign.foreign_experts import ForeignExperts
from echelon.moe.routing import count_tokens_per_expert
from echelon.parallel.comm.mesh_axis import MeshAxis
from echelon.parallel.ep.cost import EP_ETP_AXIS
from echelon.parallel.ep.token_all_to_all import TokenAllToAll
from echelon.parallel.tp.tensor_parallel import ModuleSplitter

if TYPE_CHECKING:
    from echelon.parallel.transform_context import TransformContext


class ForeignDispatch:
    """Sends tokens to experts on other ranks."""

    def __init__(self, axis: MeshAxis):
        self.axis = axis

    def run(self, experts: ForeignExperts, hidden: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        tokens, k = choices.shape
        flat = choices.flatten()
        order = torch.argsort(flat, stable=True)
        counts = self.axis.all_gather(count_tokens_per_expert(flat, experts.all_experts)).cpu()
        exchange = TokenAllToAll(self.axis, counts, tokens * k, hidden.device)
        arrived = exchange.start_dispatch(hidden.index_select(0, order // k))()
        outputs = exchange.start_combine(self._compute(experts, arrived, exchange.expert_ends))()
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        chosen = outputs.index_select(0, back).view(tokens, k, -1)
        return (chosen * weights.unsqueeze(-1).to(chosen.dtype)).sum(1)

    @staticmethod
    def _compute(experts: ForeignExperts, arrived: Tensor, ends: Tensor) -> Tensor:
        sizes = torch.diff(ends, prepend=ends.new_zeros(1)).long()
        expert = torch.repeat_interleave(torch.arange(len(ends), device=ends.device), sizes, output_size=len(arrived))
        # A rank without tokens computes one of zeros, so that its weights have gradients like those of others.
        padding = int(not len(arrived))
        rows = nn.functional.pad(arrived, (0, 0, 0, padding))
        choices = nn.functional.pad(expert, (0, padding)).unsqueeze(1)
        out = experts.compute(rows, choices, torch.ones_like(rows[:, :1]))
        return out[: len(arrived)]


def apply_foreign_experts(context: TransformContext) -> bool:
    """Divide the experts of a foreign model over ep. Return whether it has any."""
    model, layout = context.model, context.layout
    found = {name: module for name, module in model.named_modules() if isinstance(module, ForeignExperts)}
    if not found:
        return False
    if layout.etp > 1:
        raise ValueError(f"experts of {type(model).__name__} are not split themselves (etp={layout.etp}); use etp=1")
    if layout.ep > 1 and layout.tp > 1 and not layout.sp:
        raise ValueError(
            f"experts require tokens that are divided over tp by position (tp={layout.tp}, sp=0); use sp=1, or ep=1"
        )
    if layout.ep == 1 and not (layout.tp > 1 and layout.sp) and layout.cp == 1:
        return True
    splitter = ModuleSplitter(model, context.params)
    for name, experts in found.items():
        if experts.all_experts % layout.ep:
            raise ValueError(f"ep={layout.ep} does not divide the {experts.all_experts} experts of {name}")
        if layout.ep > 1:
            experts.dispatch = ForeignDispatch(context.axes.get_or_add(EP_ETP_AXIS))
            vars(experts)["num_experts"] = experts.all_experts // layout.ep
        splits = (DimSplit(axis="ep", dim=0, num_parts=layout.ep), DimSplit(axis="etp", dim=0, num_parts=1))
        for key, _ in experts.named_parameters():
            splitter.update_param(f"{name}.{key}", splits=splits, is_expert=True, partial_grad_axes=())
    context.params = splitter.split_params()
    context.has_expert_params = True
    return True
