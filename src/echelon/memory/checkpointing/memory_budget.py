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

from echelon.compat import operator_mode
from echelon.memory.checkpointing.checkpoint_options import Counted, ways_of
from echelon.memory.checkpointing.checkpoint_policy import PRODUCTS, Part, Policy, Recomputed, makers
from echelon.memory.checkpointing.checkpoint_wrapper import Layer, mapped, tensors_in
from echelon.memory.checkpointing.cost import GIB, Repeats
from echelon.memory.checkpointing.knapsack import Way, cost, peak, solve
from echelon.models.attention import Core


@dataclass
class _Seen:
    """What a forward saved, held until it is counted: memory that is freed is used again."""

    counted: Counted
    storages: set[Any] = field(default_factory=set)
    core: set[Any] = field(default_factory=set)
    inside: bool = False
    """the core is at work"""

    def pack(self, tensor: Tensor) -> None:
        """Backward never comes. A tensor that is given back here is held by the graph that it holds, for ever."""
        self.counted.again = self.counted.flops
        if self.inside:
            self.counted.core_again = self.counted.core_flops
        (self.core if self.inside else self.storages).add(tensor.untyped_storage())


class _Work(operator_mode()):  # type: ignore[misc]
    """Counts FLOPs, and bytes that products and attention make."""

    def __init__(self, seen: _Seen):
        super().__init__()
        self.seen, self.counted = seen, seen.counted

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        name = packet.__name__
        if name in PRODUCTS or "attention" in name:
            self.counted.products += sum(tensor.nbytes for tensor in tensors_in(out))
        if "attention" in name and len(args) > 2 and args[0].dim() == 4:
            # torch's own formula refuses heads that share keys, and does not know every kernel.
            (batch, heads, queries, dim), keys = args[0].shape, args[1].shape[2]
            flops = 2 * batch * heads * queries * keys * (dim + args[2].shape[3])
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        else:
            return out
        self.counted.flops += flops
        if self.seen.inside:
            self.counted.core_flops += flops
        return out


class Budgeted(Recomputed):
    """Layers that repeat themselves until it is decided what each of them does."""

    def __init__(
        self,
        policy: Policy,
        recompute: str,
        parts: Sequence[Part],
        flights: Sequence[Sequence[int]],
        *,
        agree: Callable[[Tensor], Tensor],
        add_up: Callable[[Tensor], Tensor],
    ):
        """`agree` takes the largest numbers of all ranks of a stage, which choose alike; `add_up` sums over stages."""
        super().__init__()
        self.policy, self.recompute, self.agree, self.add_up = policy, recompute, agree, add_up
        self.budget = float(recompute.partition(":")[2].removesuffix("GiB")) * GIB
        here = [[name for name in part.names if policy.is_here(name)] for part in parts]
        self.names = [name for names in here for name in names]
        self.flights = [[count for count, names in zip(counts, here, strict=True) for _ in names] for counts in flights]
        self.ways: list[list[Way]] = []
        """of each layer, once it was rehearsed"""
        self.chosen: list[Way] = []
        self._counted: dict[str, dict[str, Counted]] = {}
        self._flops: list[Counted] = []
        """of each layer"""
        self._none_kept = 0
        self.repeats = Repeats()
        """what was chosen, as shares of the layers of all stages"""
        self._ready: Callable[[nn.Module], None] | None = None
        self._set(["full"] * len(self.names))

    @property
    def undecided(self) -> bool:
        return not self.chosen and bool(self.names)

    def tell(self, ready: Callable[[nn.Module], None]) -> None:
        self._ready = ready
        super().tell(ready)

    def _set(self, forms: Sequence[str]) -> None:
        for segment in self.segments:
            for layer in segment.layers:
                layer.restore()
        self.segments.clear()
        self.tails.clear()
        for name, form in zip(self.names, forms, strict=True):
            self.policy.set(name, form, self)
        if self._ready is not None:
            self.tell(self._ready)

    # -- the rehearsal ------------------------------------------------------------------------------------------------

    @contextmanager
    def rehearsal(self, device: torch.device) -> Iterator[None]:
        """Around a forward of one microbatch without gradients; after it, it is decided."""
        before: dict[str, Any] = {}
        for name in self.names:
            module = self.policy.model.get_submodule(name)
            assert isinstance(module.forward, Layer)
            before[name], plain = module.forward, module.forward.forward
            module.forward = partial(self._rehearse, name, plain)
        try:
            yield
        finally:
            for name, forward in before.items():
                self.policy.model.get_submodule(name).forward = forward
        missing = [name for name in self.names if name not in self._counted]
        if missing:
            raise ValueError(
                f"a forward pass did not call {missing[0]}, so what it keeps is not known "
                f"(recompute={self.recompute}); use another recompute"
            )
        self._decide(device)

    def _rehearse(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        module = self.policy.model.get_submodule(name)
        given = mapped((args, kwargs), _as_leaf)
        found: dict[str, Counted] = {}
        out: Any = None
        with torch.enable_grad():
            for form in self.policy.forms_of(name):
                if form == "full":
                    continue
                with self._trying(name, module, form, forward):
                    counted, made = self._count(module, form, given)
                found[form] = counted
                out = made if form == "none" else out
        self._counted[name] = found
        return mapped(out, Tensor.detach)

    @contextmanager
    def _trying(self, name: str, module: nn.Module, form: str, forward: Callable[..., Any]) -> Iterator[None]:
        """The layer as it would be."""
        now, done = module.forward, Recomputed()
        remakes = [(part, part.remake) for part in makers(module)]
        module.forward = forward
        try:
            if form != "none":
                self.policy.set(name, form, done)
            yield
        finally:
            for segment in done.segments:
                for layer in segment.layers:
                    layer.restore()
            for part, remake in remakes:
                part.remake = remake
            module.forward = now

    def _count(self, module: nn.Module, form: str, given: Any) -> tuple[Counted, Any]:
        counted = Counted()
        seen = _Seen(counted)
        args, kwargs = given
        cores: list[Any] = [part for part in module.modules() if isinstance(part, Core)] if form == "none" else []
        plain = [core.forward for core in cores]
        for core, inner in zip(cores, plain, strict=True):
            core.forward = partial(_inside, seen, inner)
        try:
            with saved_tensors_hooks(seen.pack, _never), _Work(seen):
                out = module.forward(*args, **kwargs)
        finally:
            for core, inner in zip(cores, plain, strict=True):
                core.forward = inner
        streams = [tensor for tensor in tensors_in(given) if tensor.requires_grad]
        entries = {tensor.untyped_storage() for tensor in streams}
        known = {parameter.untyped_storage() for parameter in module.parameters()}
        known |= {tensor.untyped_storage() for tensor in _all_tensors(given)} - entries
        known |= {buffer.untyped_storage() for buffer in module.buffers()}
        saved = (seen.storages | seen.core) - known
        counted.kept = _size(saved)
        counted.core = _size(seen.core - known - seen.storages)
        counted.whole = _size(saved | entries)
        counted.entry = sum(self.policy.keep(tensor.detach())[0].nbytes for tensor in streams)
        if form == "ops" and not any(True for _ in makers(module)):
            counted.kept += counted.products  # torch's checkpointing holds them by itself
            counted.whole = counted.kept + self._none_kept  # and makes all the rest again at once
        elif form == "none":
            self._none_kept = counted.kept
        return counted, out

    # -- the choice ---------------------------------------------------------------------------------------------------

    def _decide(self, device: torch.device) -> None:
        numbers = torch.tensor(
            [list(astuple(each)) for name in self.names for each in self._counted[name].values()],
            dtype=torch.float64,
            device=device,
        )
        numbers = self.agree(numbers)
        rows = iter(numbers.tolist())
        self.ways = [self._ways({form: next(rows) for form in self._counted[name]}, device) for name in self.names]
        least = [ways[-1] for ways in self.ways]
        needed = max(peak(least, counts) for counts in self.flights)
        if needed > self.budget:
            raise ValueError(
                f"recompute={self.recompute} is less than it takes to repeat every layer ({needed / GIB:.4g} GiB for "
                f"{len(self.names)} layers' inputs and the inside of one); use recompute={_enough(needed)} or more, "
                "or a smaller microbatch"
            )
        self.chosen = self._solved() or least
        self._set([way.form for way in self.chosen])
        self._counted.clear()
        self.repeats = self._shares(device)

    def _solved(self) -> list[Way] | None:
        """For the moment with the most microbatches in flight; where that is too much at another, for all at once."""
        fullest = max(self.flights, key=sum)
        found = solve(self.ways, fullest, self.budget)
        if found is not None and all(peak(found, counts) <= self.budget for counts in self.flights):
            return found
        together = [max(counts) for counts in zip(*self.flights, strict=True)]
        return solve(self.ways, together, self.budget)

    def _ways(self, numbers: dict[str, list[float]], device: torch.device) -> list[Way]:
        found = {form: Counted(*row) for form, row in numbers.items()}
        self._flops.append(found["none"])
        return ways_of(found, device.type, copied=not self.policy.keeps_whole)

    @property
    def peak(self) -> float:
        """Bytes, predicted."""
        return max((peak(self.chosen, counts) for counts in self.flights), default=0.0)

    def _shares(self, device: torch.device) -> Repeats:
        rows = torch.zeros(9, dtype=torch.float64, device=device)
        for way, ways, one in zip(self.chosen, self.ways, self._flops, strict=True):
            full, selective, ops = way.form == "full", "selective" in way.form, "ops" in way.form
            products = [one.flops, full * one.again, one.core_flops, selective * one.core_again]
            rows += rows.new_tensor([*products, ways[0].kept, 0.0 if full else way.kept, 1.0, full, ops])
        rows = self.add_up(rows)
        total, forward, cores, attention, whole, kept, layers, inputs, ops = rows.tolist()
        return Repeats(
            forward=forward / max(total, 1.0),
            attention=attention / max(cores, 1.0),
            passing=ops / max(layers, 1.0),
            kept=kept / max(whole, 1.0),
            inputs=inputs / max(layers, 1.0),
            together=int(inputs > 0),
        )

    def told(self) -> tuple[str, str]:
        """What was chosen, and why, for people."""
        if self.undecided:
            return "each layer by itself", "chosen with the first microbatch"
        runs: list[list[Any]] = []
        for name, way in zip(self.names, self.chosen, strict=True):
            if runs and runs[-1][0] == way.form:
                runs[-1][1].append(name)
            else:
                runs.append([way.form, [name]])
        text = ", ".join(f"{names[0]}{f' to {names[-1]}' if names[1:] else ''} {form}" for form, names in runs)
        full = cost([ways[-1] for ways in self.ways])
        share = cost(self.chosen) / full if full else 0.0
        return text, (
            f"{self.peak / GIB:.4g} of {self.budget / GIB:.4g} GiB at the fullest moment, for {share:.0%} of the time "
            "that repeating every layer would take"
        )


def _enough(needed: float) -> str:
    """The smallest budget, to three digits, that is no less."""
    digits = max(0, 3 - math.ceil(math.log10(needed / GIB)))
    return f"budget:{math.ceil(needed / GIB * 10**digits) / 10**digits:.{digits}f}GiB"


def _inside(seen: _Seen, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    seen.inside = True
    try:
        return forward(*args, **kwargs)
    finally:
        seen.inside = False


def _never(_packed: None) -> Tensor:
    raise RuntimeError("a rehearsal has no backward")


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _size(storages: set[Any]) -> int:
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
