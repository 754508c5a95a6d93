"""A budget for what is kept from forward to backward: each layer does what makes all fit for the least time.

Before the first step one microbatch is rehearsed: it goes forward without gradients, and every layer counts what it
would keep in each of its ways, and what repeating it would take. What is counted are bytes of what autograd saves, each
storage once, without parameters and without what all layers are given; and FLOPs and bytes, not seconds, so that ranks
agree.
Where they may differ (experts get as many tokens as come) the largest of each number counts. Then `solve` chooses.

The budget is for the layers of a rank. What the embedding and the head keep is beside it, and so are gradients and what
an operator needs while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, is_dataclass
from functools import partial
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
from echelon.memory.checkpointing.cost import GIB, RecomputeWork
from echelon.memory.checkpointing.knapsack import CheckpointOption, peak_bytes, solve_knapsack, total_seconds
from echelon.models.attention import CoreAttention


@dataclass
class _SavedStorages:
    """What a forward saved, held until it is counted: memory that is freed is used again."""

    measurement: LayerMeasurement
    storages: set[Any] = field(default_factory=set)
    core: set[Any] = field(default_factory=set)
    in_core: bool = False
    """the core is at work"""

    def pack(self, tensor: Tensor) -> None:
        """Backward never comes. A tensor that is given back here is held by the graph that it holds, for ever."""
        self.measurement.recompute_flops = self.measurement.flops
        if self.in_core:
            self.measurement.core_recompute_flops = self.measurement.core_flops
        (self.core if self.in_core else self.storages).add(tensor.untyped_storage())


class _OpCounter(torch_dispatch_mode()):  # type: ignore[misc]
    """Counts FLOPs, and bytes that products and attention make."""

    def __init__(self, seen: _SavedStorages):
        super().__init__()
        self.seen, self.counted = seen, seen.measurement

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        name = packet.__name__
        if name in GEMM_OPS or "attention" in name:
            self.counted.gemm_output_bytes += sum(tensor.nbytes for tensor in iter_tensors(out))
        if "attention" in name and len(args) > 2 and args[0].dim() == 4:
            # torch's own formula refuses heads that share keys, and does not know every kernel.
            (batch, heads, queries, dim), keys = args[0].shape, args[1].shape[2]
            flops = 2 * batch * heads * queries * keys * (dim + args[2].shape[3])
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        else:
            return out
        self.counted.flops += flops
        if self.seen.in_core:
            self.counted.core_flops += flops
        return out


class MemoryBudget(CheckpointedLayers):
    """Layers that repeat themselves until it is decided what each of them does."""

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
        """`agree` takes the largest numbers of all ranks of a stage, which choose alike; `add_up` sums over stages."""
        super().__init__()
        self.policy, self.recompute, self.all_reduce_max, self.all_reduce_sum = (
            policy,
            recompute,
            all_reduce_max,
            all_reduce_sum,
        )
        self.budget = float(recompute.partition(":")[2].removesuffix("GiB")) * GIB
        here = [[name for name in part.names if policy.is_on_this_stage(name)] for part in stages]
        self.layer_names = [name for names in here for name in names]
        self.in_flight = [
            [count for count, names in zip(counts, here, strict=True) for _ in names] for counts in in_flight
        ]
        self.options: list[list[CheckpointOption]] = []
        """of each layer, once it was rehearsed"""
        self.chosen: list[CheckpointOption] = []
        self._measurements: dict[str, dict[str, LayerMeasurement]] = {}
        self._layer_flops: list[LayerMeasurement] = []
        """of each layer"""
        self._unrecomputed_bytes = 0
        self.recompute_work = RecomputeWork()
        """what was chosen, as shares of the layers of all stages"""
        self._ready: Callable[[nn.Module], None] | None = None
        self._apply_forms(["full"] * len(self.layer_names))

    @property
    def is_undecided(self) -> bool:
        return not self.chosen and bool(self.layer_names)

    def set_before_recompute(self, hook: Callable[[nn.Module], None]) -> None:
        self._ready = hook
        super().set_before_recompute(hook)

    def _apply_forms(self, forms: Sequence[str]) -> None:
        for segment in self.segments:
            for layer in segment.layers:
                layer.unwrap()
        self.segments.clear()
        self.segment_tails.clear()
        for name, form in zip(self.layer_names, forms, strict=True):
            self.policy.set_form(name, form, self)
        if self._ready is not None:
            self.set_before_recompute(self._ready)

    # -- the rehearsal ------------------------------------------------------------------------------------------------

    @contextmanager
    def rehearsal(self, device: torch.device) -> Iterator[None]:
        """Around a forward of one microbatch without gradients; after it, it is decided."""
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
                f"a forward pass did not call {missing[0]}, so what it keeps is not known "
                f"(recompute={self.recompute}); use another recompute"
            )
        self._decide(device)

    def _rehearse(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        module = self.policy.model.get_submodule(name)
        given = map_tensors((args, kwargs), _as_leaf)
        found: dict[str, LayerMeasurement] = {}
        out: Any = None
        with torch.enable_grad():
            for form in self.policy.available_forms(name):
                if form == "full":
                    continue
                with self._with_form(name, module, form, forward):
                    counted, made = self._measure(module, form, given)
                found[form] = counted
                out = made if form == "none" else out
        self._measurements[name] = found
        return map_tensors(out, Tensor.detach)

    @contextmanager
    def _with_form(self, name: str, module: nn.Module, form: str, forward: Callable[..., Any]) -> Iterator[None]:
        """The layer as it would be."""
        now, done = module.forward, CheckpointedLayers()
        remakes = [(part, part.recompute_output) for part in recomputing_modules(module)]
        module.forward = forward
        try:
            if form != "none":
                self.policy.set_form(name, form, done)
            yield
        finally:
            for segment in done.segments:
                for layer in segment.layers:
                    layer.unwrap()
            for part, remake in remakes:
                part.recompute_output = remake
            module.forward = now

    def _measure(self, module: nn.Module, form: str, given: Any) -> tuple[LayerMeasurement, Any]:
        counted = LayerMeasurement()
        seen = _SavedStorages(counted)
        args, kwargs = given
        cores: list[Any] = (
            [part for part in module.modules() if isinstance(part, CoreAttention)] if form == "none" else []
        )
        plain = [core.forward for core in cores]
        for core, inner in zip(cores, plain, strict=True):
            core.forward = partial(_forward_in_core, seen, inner)
        try:
            with saved_tensors_hooks(seen.pack, _no_backward), _OpCounter(seen):
                out = module.forward(*args, **kwargs)
        finally:
            for core, inner in zip(cores, plain, strict=True):
                core.forward = inner
        streams = [tensor for tensor in iter_tensors(given) if tensor.requires_grad]
        entries = {tensor.untyped_storage() for tensor in streams}
        known = {parameter.untyped_storage() for parameter in module.parameters()}
        known |= {tensor.untyped_storage() for tensor in _all_tensors(given)} - entries
        known |= {buffer.untyped_storage() for buffer in module.buffers()}
        saved = (seen.storages | seen.core) - known
        counted.saved_bytes = _total_bytes(saved)
        counted.core_bytes = _total_bytes(seen.core - known - seen.storages)
        counted.saved_and_input_bytes = _total_bytes(saved | entries)
        counted.input_bytes = sum(self.policy.save_input(tensor.detach())[0].nbytes for tensor in streams)
        if form == "ops" and not any(True for _ in recomputing_modules(module)):
            counted.saved_bytes += counted.gemm_output_bytes  # torch's checkpointing holds them by itself
            counted.saved_and_input_bytes = (
                counted.saved_bytes + self._unrecomputed_bytes
            )  # and makes all the rest again at once
        elif form == "none":
            self._unrecomputed_bytes = counted.saved_bytes
        return counted, out

    # -- the choice ---------------------------------------------------------------------------------------------------

    def _decide(self, device: torch.device) -> None:
        numbers = torch.tensor(
            [list(astuple(each)) for name in self.layer_names for each in self._measurements[name].values()],
            dtype=torch.float64,
            device=device,
        )
        numbers = self.all_reduce_max(numbers)
        rows = iter(numbers.tolist())
        self.options = [
            self._layer_options({form: next(rows) for form in self._measurements[name]}, device)
            for name in self.layer_names
        ]
        least = [ways[-1] for ways in self.options]
        needed = max(peak_bytes(least, counts) for counts in self.in_flight)
        if needed > self.budget:
            raise ValueError(
                f"recompute={self.recompute} is less than it takes to repeat every layer ({needed / GIB:.4g} GiB for "
                f"{len(self.layer_names)} layers' inputs and the inside of one); use recompute={_sufficient_budget(needed)} or more, "
                "or a smaller microbatch"
            )
        self.chosen = self._solve() or least
        self._apply_forms([way.form for way in self.chosen])
        self._measurements.clear()
        self.recompute_work = self._shares(device)

    def _solve(self) -> list[CheckpointOption] | None:
        """For the moment with the most microbatches in flight; where that is too much at another, for all at once."""
        fullest = max(self.in_flight, key=sum)
        found = solve_knapsack(self.options, fullest, self.budget)
        if found is not None and all(peak_bytes(found, counts) <= self.budget for counts in self.in_flight):
            return found
        together = [max(counts) for counts in zip(*self.in_flight, strict=True)]
        return solve_knapsack(self.options, together, self.budget)

    def _layer_options(self, numbers: dict[str, list[float]], device: torch.device) -> list[CheckpointOption]:
        found = {form: LayerMeasurement(*row) for form, row in numbers.items()}
        self._layer_flops.append(found["none"])
        return checkpoint_options(found, device.type, copies_input=not self.policy.saves_input_as_is)

    @property
    def peak_bytes(self) -> float:
        """Bytes, predicted."""
        return max((peak_bytes(self.chosen, counts) for counts in self.in_flight), default=0.0)

    def _shares(self, device: torch.device) -> RecomputeWork:
        rows = torch.zeros(9, dtype=torch.float64, device=device)
        for way, ways, one in zip(self.chosen, self.options, self._layer_flops, strict=True):
            full, selective, ops = way.form == "full", "selective" in way.form, "ops" in way.form
            products = [one.flops, full * one.recompute_flops, one.core_flops, selective * one.core_recompute_flops]
            rows += rows.new_tensor([*products, ways[0].saved_bytes, 0.0 if full else way.saved_bytes, 1.0, full, ops])
        rows = self.all_reduce_sum(rows)
        total, forward, cores, attention, whole, kept, layers, inputs, ops = rows.tolist()
        return RecomputeWork(
            forward=forward / max(total, 1.0),
            attention=attention / max(cores, 1.0),
            elementwise=ops / max(layers, 1.0),
            saved=kept / max(whole, 1.0),
            inputs=inputs / max(layers, 1.0),
            segment_layers=int(inputs > 0),
        )

    def describe(self) -> tuple[str, str]:
        """What was chosen, and why, for people."""
        if self.is_undecided:
            return "each layer by itself", "chosen with the first microbatch"
        runs: list[list[Any]] = []
        for name, way in zip(self.layer_names, self.chosen, strict=True):
            if runs and runs[-1][0] == way.form:
                runs[-1][1].append(name)
            else:
                runs.append([way.form, [name]])
        text = ", ".join(f"{names[0]}{f' to {names[-1]}' if names[1:] else ''} {form}" for form, names in runs)
        full = total_seconds([ways[-1] for ways in self.options])
        share = total_seconds(self.chosen) / full if full else 0.0
        return text, (
            f"{self.peak_bytes / GIB:.4g} of {self.budget / GIB:.4g} GiB at the fullest moment, for {share:.0%} of the time "
            "that repeating every layer would take"
        )


def _sufficient_budget(needed: float) -> str:
    """The smallest budget, to three digits, that is no less."""
    digits = max(0, 3 - math.ceil(math.log10(needed / GIB)))
    return f"budget:{math.ceil(needed / GIB * 10**digits) / 10**digits:.{digits}f}GiB"


def _forward_in_core(seen: _SavedStorages, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    seen.in_core = True
    try:
        return forward(*args, **kwargs)
    finally:
        seen.in_core = False


def _no_backward(_packed: None) -> Tensor:
    raise RuntimeError("a rehearsal has no backward")


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _total_bytes(storages: set[Any]) -> int:
    return sum(int(storage.nbytes()) for storage in storages)


def _all_tensors(value: Any) -> Iterator[Tensor]:
    """With those inside dataclasses, which all layers are given alike."""
    if is_dataclass(value) and not isinstance(value, type):
        for part in vars(value).values():  # also what they have made of them since
            yield from _all_tensors(part)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _all_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _all_tensors(item)
    elif isinstance(value, Tensor):
        yield value
