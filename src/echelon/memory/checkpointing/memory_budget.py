"""A memory budget for saved activations: each layer gets the checkpoint option that makes all fit at the least time.

Before the first step one microbatch runs forward without gradients, and every layer measures what it would save in each
of its forms, and what a rerun would take. Measured are bytes of saved tensors, each storage once, without parameters
and without what all layers share; and FLOPs and bytes, not seconds, so that ranks agree. Where ranks may differ
(experts get as many tokens as are routed to them) the maximum of each number counts. Then `solve_knapsack` chooses.

The budget is for the layers of a rank. What the embedding and the LM head save comes on top, and so do gradients and
temporaries of operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import flop_registry

from echelon.compat import torch_dispatch_mode
from echelon.memory.checkpointing.checkpoint_options import LayerMeasurement, checkpoint_options
from echelon.memory.checkpointing.checkpoint_policy import (
    GEMM_OPS,
    CheckpointedLayers,
    RecomputePolicy,
    StageLayers,
    recomputing_modules,
)
from echelon.memory.checkpointing.checkpoint_wrapper import CheckpointedLayer, iter_tensors, map_tensors
from echelon.memory.checkpointing.cost import GIB, RecomputeWork, budget_bytes, sufficient_budget
from echelon.memory.checkpointing.knapsack import CheckpointOption, peak_bytes, solve_knapsack, total_seconds
from echelon.memory.checkpointing.saved_inputs import save_as_is
from echelon.models.attention import CoreAttention


@dataclass
class _SavedStorages:
    """The storages that a forward saved, held until they are measured: freed memory would be reused."""

    measurement: LayerMeasurement
    storages: set[Any] = field(default_factory=set)
    core: set[Any] = field(default_factory=set)
    in_core: bool = False
    """core attention is running"""

    def pack(self, tensor: Tensor) -> None:
        """Record a saved tensor. Returning it would make a reference cycle with its graph, as backward never runs."""
        self.measurement.recompute_flops = self.measurement.flops
        if self.in_core:
            self.measurement.core_recompute_flops = self.measurement.core_flops
        (self.core if self.in_core else self.storages).add(tensor.untyped_storage())


class _OpCounter(torch_dispatch_mode()):  # type: ignore[misc]
    """Counts FLOPs, and bytes of GEMM and attention outputs."""

    def __init__(self, storages: _SavedStorages):
        super().__init__()
        self.storages, self.measurement = storages, storages.measurement

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        name = packet.__name__
        if name in GEMM_OPS or "attention" in name:
            self.measurement.gemm_output_bytes += sum(tensor.nbytes for tensor in iter_tensors(out))
        if "attention" in name and len(args) > 2 and args[0].dim() == 4:
            # torch's formula refuses grouped-query attention, and does not know every kernel.
            (batch, heads, queries, dim), keys = args[0].shape, args[1].shape[2]
            flops = 2 * batch * heads * queries * keys * (dim + args[2].shape[3])
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        else:
            return out
        self.measurement.flops += flops
        if self.storages.in_core:
            self.measurement.core_flops += flops
        return out


class MemoryBudget(CheckpointedLayers):
    """Layers that recompute fully until the rehearsal decides the form of each."""

    def __init__(
        self,
        policy: RecomputePolicy,
        recompute: str,
        stages: Sequence[StageLayers],
        in_flight: Sequence[Sequence[int]],
        *,
        all_reduce_max: Callable[[Tensor], Tensor],
        all_reduce_sum: Callable[[Tensor], Tensor],
    ):
        """`all_reduce_max` reduces over the ranks of a stage, which choose alike; `all_reduce_sum` over stages."""
        super().__init__()
        self.policy, self.recompute = policy, recompute
        self.all_reduce_max, self.all_reduce_sum = all_reduce_max, all_reduce_sum
        self.budget = budget_bytes(recompute)
        here = [[name for name in part.names if policy.is_on_this_stage(name)] for part in stages]
        self.layer_names = [name for names in here for name in names]
        self.in_flight = [
            [count for count, names in zip(counts, here, strict=True) for _ in names] for counts in in_flight
        ]
        self.options: list[list[CheckpointOption]] = []
        """of each layer, after the rehearsal"""
        self.chosen: list[CheckpointOption] = []
        self._measurements: dict[str, dict[str, LayerMeasurement]] = {}
        self._layer_flops: list[LayerMeasurement] = []
        """of each layer"""
        self._unrecomputed_bytes = 0
        self.recompute_work = RecomputeWork()
        """of the chosen options, as shares of the layers of all stages"""
        self._before_recompute: Callable[[nn.Module], None] | None = None
        self._apply_forms(["full"] * len(self.layer_names))

    @property
    def is_undecided(self) -> bool:
        return not self.chosen and bool(self.layer_names)

    def set_before_recompute(self, hook: Callable[[nn.Module], None]) -> None:
        self._before_recompute = hook
        super().set_before_recompute(hook)

    def _apply_forms(self, forms: Sequence[str]) -> None:
        self.unwrap()
        self.segments.clear()
        self.segment_tails.clear()
        for name, form in zip(self.layer_names, forms, strict=True):
            self.policy.set_form(name, form, self)
        if self._before_recompute is not None:
            self.set_before_recompute(self._before_recompute)

    # -- the rehearsal ------------------------------------------------------------------------------------------------

    @contextmanager
    def rehearsal(self, device: torch.device) -> Iterator[None]:
        """Measure a forward of one microbatch without gradients inside this context, then choose."""
        before: dict[str, Any] = {}
        for name in self.layer_names:
            module = self.policy.model.get_submodule(name)
            assert isinstance(module.forward, CheckpointedLayer)
            before[name], plain = module.forward, module.forward.forward
            module.forward = partial(self._rehearse, name, plain)
        try:
            yield
        finally:
            for name, forward in before.items():
                self.policy.model.get_submodule(name).forward = forward
        missing = [name for name in self.layer_names if name not in self._measurements]
        if missing:
            raise ValueError(
                f"the first forward pass did not call {missing[0]}, so its saved activations are unknown "
                f"(recompute={self.recompute}); use another recompute"
            )
        self._decide(device)

    def _rehearse(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        module = self.policy.model.get_submodule(name)
        arguments = map_tensors((args, kwargs), _as_leaf)
        measured: dict[str, LayerMeasurement] = {}
        out: Any = None
        with torch.enable_grad():
            for form in self.policy.available_forms(name):
                if form == "full":
                    continue
                with self._with_form(name, module, form, forward):
                    measurement, output = self._measure(module, form, arguments)
                measured[form] = measurement
                out = output if form == "none" else out
        self._measurements[name] = measured
        return map_tensors(out, Tensor.detach)

    @contextmanager
    def _with_form(self, name: str, module: nn.Module, form: str, forward: Callable[..., Any]) -> Iterator[None]:
        """Give the layer a form for the time of a measurement."""
        current, layers = module.forward, CheckpointedLayers()
        flags = [(part, part.recompute_output) for part in recomputing_modules(module)]
        module.forward = forward
        try:
            if form != "none":
                self.policy.set_form(name, form, layers)
            yield
        finally:
            layers.unwrap()
            for part, flag in flags:
                part.recompute_output = flag
            module.forward = current

    def _measure(self, module: nn.Module, form: str, arguments: Any) -> tuple[LayerMeasurement, Any]:
        measurement = LayerMeasurement()
        storages = _SavedStorages(measurement)
        args, kwargs = arguments
        forwards: dict[Any, Callable[..., Any]] = {}
        if form == "none":
            forwards = {part: part.forward for part in module.modules() if isinstance(part, CoreAttention)}
        for core, forward in forwards.items():
            core.forward = partial(_forward_in_core, storages, forward)
        try:
            with saved_tensors_hooks(storages.pack, _no_backward), _OpCounter(storages):
                out = module.forward(*args, **kwargs)
        finally:
            for core, forward in forwards.items():
                core.forward = forward
        streams = [tensor for tensor in iter_tensors(arguments) if tensor.requires_grad]
        entries = {tensor.untyped_storage() for tensor in streams}
        excluded = {tensor.untyped_storage() for tensor in (*module.parameters(), *module.buffers())}
        excluded |= {tensor.untyped_storage() for tensor in iter_tensors(arguments, in_dataclasses=True)} - entries
        saved = (storages.storages | storages.core) - excluded
        measurement.saved_bytes = _total_bytes(saved)
        measurement.core_bytes = _total_bytes(storages.core - excluded - storages.storages)
        measurement.saved_and_input_bytes = _total_bytes(saved | entries)
        measurement.input_bytes = sum(self.policy.save_input(tensor.detach())[0].nbytes for tensor in streams)
        if form == "ops" and not any(True for _ in recomputing_modules(module)):
            # torch's checkpointing saves GEMM outputs outside of the hooks, and recomputes all the rest at once.
            measurement.saved_bytes += measurement.gemm_output_bytes
            measurement.saved_and_input_bytes = measurement.saved_bytes + self._unrecomputed_bytes
        elif form == "none":
            self._unrecomputed_bytes = measurement.saved_bytes
        return measurement, out

    # -- the choice ---------------------------------------------------------------------------------------------------

    def _decide(self, device: torch.device) -> None:
        local_rows = [astuple(each) for name in self.layer_names for each in self._measurements[name].values()]
        rows = iter(self.all_reduce_max(torch.tensor(local_rows, dtype=torch.float64, device=device)).tolist())
        for name in self.layer_names:
            measured = {form: LayerMeasurement(*next(rows)) for form in self._measurements[name]}
            self._layer_flops.append(measured["none"])
            copies_input = self.policy.save_input is not save_as_is
            self.options.append(checkpoint_options(measured, device.type, copies_input=copies_input))
        smallest = [options[-1] for options in self.options]
        minimum = max(peak_bytes(smallest, counts) for counts in self.in_flight)
        if minimum > self.budget:
            raise ValueError(
                f"recompute={self.recompute} is too small to recompute every layer ({minimum / GIB:.4g} GiB for "
                f"the inputs of {len(self.layer_names)} layers and the activations of one); use "
                f"recompute={sufficient_budget(minimum)} or more, or a smaller microbatch"
            )
        self.chosen = self._solve() or smallest
        self._apply_forms([option.form for option in self.chosen])
        self._measurements.clear()
        self.recompute_work = self._shares(device)

    def _solve(self) -> list[CheckpointOption] | None:
        """Solve for the moment with the most microbatches in flight; if that does not fit another, for all at once."""
        peak_in_flight = max(self.in_flight, key=sum)
        solution = solve_knapsack(self.options, peak_in_flight, self.budget)
        if solution is not None and all(peak_bytes(solution, counts) <= self.budget for counts in self.in_flight):
            return solution
        most_in_flight = [max(counts) for counts in zip(*self.in_flight, strict=True)]
        return solve_knapsack(self.options, most_in_flight, self.budget)

    @property
    def peak_bytes(self) -> float:
        """Predicted bytes."""
        return max((peak_bytes(self.chosen, counts) for counts in self.in_flight), default=0.0)

    def _shares(self, device: torch.device) -> RecomputeWork:
        rows = torch.zeros(9, dtype=torch.float64, device=device)
        for option, options, one in zip(self.chosen, self.options, self._layer_flops, strict=True):
            full, selective, ops = option.form == "full", "selective" in option.form, "ops" in option.form
            flops = [one.flops, full * one.recompute_flops, one.core_flops, selective * one.core_recompute_flops]
            saved_bytes = 0.0 if full else option.saved_bytes
            rows += rows.new_tensor([*flops, options[0].saved_bytes, saved_bytes, 1.0, full, ops])
        sums = self.all_reduce_sum(rows).tolist()
        total, forward, cores, attention, all_bytes, saved_bytes, layers, inputs, ops = sums
        return RecomputeWork(
            forward=forward / max(total, 1.0),
            attention=attention / max(cores, 1.0),
            elementwise=ops / max(layers, 1.0),
            saved=saved_bytes / max(all_bytes, 1.0),
            inputs=inputs / max(layers, 1.0),
            segment_layers=int(inputs > 0),
        )

    def describe(self) -> tuple[str, str]:
        """Return (the choice, its reason) as text."""
        if self.is_undecided:
            return "each layer by itself", "chosen with the first microbatch"
        forms = zip([option.form for option in self.chosen], self.layer_names, strict=True)
        ranges = [(form, [name for _, name in layers]) for form, layers in groupby(forms, key=itemgetter(0))]
        text = ", ".join(f"{names[0]}{f' to {names[-1]}' if names[1:] else ''} {form}" for form, names in ranges)
        full = total_seconds([options[-1] for options in self.options])
        share = total_seconds(self.chosen) / full if full else 0.0
        return text, (
            f"{self.peak_bytes / GIB:.4g} of {self.budget / GIB:.4g} GiB at the peak, for {share:.0%} of the time of "
            "recomputing every layer"
        )


def _forward_in_core(storages: _SavedStorages, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    storages.in_core = True
    try:
        return forward(*args, **kwargs)
    finally:
        storages.in_core = False


def _no_backward(_packed: None) -> Tensor:
    raise RuntimeError("the rehearsal has no backward")


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _total_bytes(storages: set[Any]) -> int:
    return sum(int(storage.nbytes()) for storage in storages)
