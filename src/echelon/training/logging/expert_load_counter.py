"""Expert load over all ranks: how many tokens the gates assign to each expert in a step.

Ranks of cp and tp route full sequences and count the same; dp ranks have other sequences, and pipeline stages other
layers. One all-reduce over pp x dp per step gives every rank all counts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from echelon.layout import Layout
from echelon.layout.collective import Collective
from echelon.layout.layout import ASYNC_SCHEDULES
from echelon.models.foreign.causal_lm import ForeignCausalLM
from echelon.models.foreign.foreign_experts import ForeignExperts
from echelon.moe.moe_layer import MoELayer
from echelon.parallel.comm.mesh_axis import PendingWork
from echelon.parallel.parallel_model import ParallelModel
from echelon.training.logging.expert_load import ExpertLoad
from echelon.training.step_result import start_host_copy


def experts_per_moe_layer(model: nn.Module, layout: Layout) -> dict[str, int]:
    """Return the number of experts of each MoE layer of the full model, before stages keep their parts."""
    if isinstance(model, ForeignCausalLM):
        return {name: part.all_experts for name, part in model.named_modules() if isinstance(part, ForeignExperts)}
    gates = {name: part.gate for name, part in model.named_modules() if isinstance(part, MoELayer)}
    by_load = [name for name, gate in gates.items() if gate.balances_by_load]
    if by_load and layout.pp > 1 and layout.schedule in ASYNC_SCHEDULES:
        raise ValueError(
            f"a gate that balances by the loads of a step ({by_load[0]}.gate) has none in schedule={layout.schedule}, "
            "where stages are at different steps; use schedule=1f1b, or a gate with a load-balance loss"
        )
    return {name: gate.num_experts for name, gate in gates.items()}


def _count_axes(parallel: ParallelModel) -> str:
    """Return the axes of ranks that count different tokens or layers. Experts of foreign models count local tokens."""
    layout = parallel.layout
    names = ["pp"] * (layout.pp > 1) + ["dp"]
    if isinstance(parallel.model, ForeignCausalLM):
        names += ["cp"] * (layout.cp > 1) + ["tp"] * (layout.tp > 1 and bool(layout.sp))
    return "*".join(names)


class ExpertLoadCounter:
    """Counts the load of all MoE layers, on this rank and on others."""

    def __init__(self, parallel: ParallelModel, num_experts: dict[str, int]):
        self.num_experts = num_experts
        kinds = (MoELayer, ForeignExperts)
        self.local_layers = {name: part for name, part in parallel.model.named_modules() if isinstance(part, kinds)}
        self.row_width = max(num_experts.values(), default=0) + 1
        self.axis = parallel.axes.get_or_add(_count_axes(parallel)) if num_experts else None
        self.device = parallel.options.device
        self.last_table: Tensor | None = None
        """[layers, E + 1] of the last step, on the device"""
        self._pending: PendingWork | None = None
        """all-reduce of the last step, in flight"""

    def end_step(self, updated: Tensor) -> None:
        """All-reduce the loads after an update, or a skipped one (`updated` is false). Every rank must call it."""
        if self.axis is None:
            return
        self.last_table = self.axis.all_reduce(self._count_table())
        for row, (name, experts) in enumerate(self.num_experts.items()):
            if name in self.local_layers:
                self.local_layers[name].end_step(self.last_table[row, :experts] * updated)

    def end_window(self) -> None:
        """Start the all-reduce after a step of an asynchronous schedule, whose stages end it at different times."""
        if self.axis is None:
            return
        self.last_table = self._count_table()
        self._pending = self.axis.start_all_reduce(self.last_table)
        for part in self.local_layers.values():
            part.expert_load = None  # load-balancing gates are refused: see `experts_per_moe_layer`

    def _count_table(self) -> Tensor:
        table = torch.zeros(len(self.num_experts), self.row_width, dtype=torch.int64, device=self.device)
        for row, name in enumerate(self.num_experts):
            part = self.local_layers.get(name)
            if part is not None and part.expert_load is not None:
                table[row, : len(part.expert_load) - 1] = part.expert_load[:-1]
                table[row, -1] = part.expert_load[-1]
        return table

    def start_read(self) -> Callable[[], list[ExpertLoad]]:
        """Start to read the loads of the last queued step; the returned function waits for that step only."""
        if self.last_table is None:
            return list
        read_table = start_host_copy(self.last_table.flatten(), self._pending)

        def read() -> list[ExpertLoad]:
            table, loads = [int(value) for value in read_table()], []
            for row, (name, experts) in enumerate(self.num_experts.items()):
                *counts, dropped = table[row * self.row_width : (row + 1) * self.row_width]
                loads.append(ExpertLoad.from_counts(name, counts[:experts], dropped))
            return loads

        return read

    def collectives(self) -> list[Collective]:
        if self.axis is None or self.axis.size == 1:
            return []
        size = len(self.num_experts) * self.row_width * 8
        return [Collective(op="all_reduce", axis=self.axis.name, bytes=size, purpose="loads of experts")]
