"""Expert parallelism of transformers' MoE classes: tokens go to the ranks of their experts and back.

Each rank routes tokens of its own: its sequences, and its slice of them under cp and sequence parallelism. Their copies
are sorted by expert, sent (token_all_to_all.py), computed by the class's own code with one expert each, and sent back.
The weights of the choices stay where the tokens are. Where the ranks of tp have the same tokens (sp=0), each dispatches
its slice of them, and they gather the results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from echelon.layout.placement import DimSplit
from echelon.models.foreign.foreign_experts import ForeignExperts
from echelon.moe.routing import count_tokens_per_expert
from echelon.parallel.comm.autograd_collective import with_backward
from echelon.parallel.comm.mesh_axis import MeshAxis
from echelon.parallel.ep.cost import EP_ETP_AXIS
from echelon.parallel.ep.token_all_to_all import TokenAllToAll
from echelon.parallel.tp.foreign_parallel import own_slice
from echelon.parallel.tp.tensor_parallel import ModuleSplitter
from echelon.parallel.tp.tp_collectives import all_gather_sequence

if TYPE_CHECKING:
    from echelon.parallel.transform_context import TransformContext


class ForeignDispatch:
    """Sends tokens to experts on other ranks."""

    def __init__(self, axis: MeshAxis, same_tokens: MeshAxis | None = None):
        self.axis, self.same_tokens = axis, same_tokens
        """ranks that exchange tokens; ranks that have the same ones"""

    def run(self, experts: ForeignExperts, hidden: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        axis, tokens = self.same_tokens, len(hidden)
        if axis is None:
            return self._exchange(experts, hidden, choices, weights)
        hidden, weights = (divide_tokens(x, axis) for x in (hidden, weights))
        return gather_tokens(self._exchange(experts, hidden, own_slice(choices[None], axis)[0], weights), axis, tokens)

    def _exchange(self, experts: ForeignExperts, hidden: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
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


def divide_tokens(x: Tensor, axis: MeshAxis) -> Tensor:
    """This rank's slice of tokens [tokens, ...] that all ranks have; padding is zero. All have their gradients."""
    tokens = len(x)
    return with_backward(
        x, lambda x: own_slice(x[None], axis)[0], lambda dy: all_gather_sequence(dy[None], axis, tokens)[0]
    )


def gather_tokens(x: Tensor, axis: MeshAxis, tokens: int) -> Tensor:
    """The tokens of all ranks, which then compute the same."""
    return with_backward(
        x, lambda x: all_gather_sequence(x[None], axis, tokens)[0], lambda dy: own_slice(dy[None], axis)[0]
    )


def apply_foreign_experts(context: TransformContext) -> bool:
    """Divide the experts of a foreign model over ep. Return whether it has any."""
    model, layout = context.model, context.layout
    found = {name: module for name, module in model.named_modules() if isinstance(module, ForeignExperts)}
    if not found:
        return False
    if layout.etp > 1:
        raise ValueError(f"experts of {type(model).__name__} are not split themselves (etp={layout.etp}); use etp=1")
    if layout.ep == 1 and not (layout.tp > 1 and layout.sp):
        return True
    same_tokens = context.axes["tp"] if layout.tp > 1 and not layout.sp else None
    splitter = ModuleSplitter(model, context.params)
    for name, experts in found.items():
        if experts.all_experts % layout.ep:
            raise ValueError(f"ep={layout.ep} does not divide the {experts.all_experts} experts of {name}")
        if layout.ep > 1:
            experts.dispatch = ForeignDispatch(context.axes.get_or_add(EP_ETP_AXIS), same_tokens)
            vars(experts)["num_experts"] = experts.all_experts // layout.ep
        splits = (DimSplit(axis="ep", dim=0, num_parts=layout.ep), DimSplit(axis="etp", dim=0, num_parts=1))
        for key, _ in experts.named_parameters():
            splitter.update_param(f"{name}.{key}", splits=splits, is_expert=True, partial_grad_axes=())
    context.params = splitter.split_params()
    context.has_expert_params = True
    return True
