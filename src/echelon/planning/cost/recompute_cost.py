"""What a layout's recomputation does: which form each layer has, what is made again for that, and what is sent again.

[Note: a budget]

A run counts its layers with the first microbatch, and solves for the forms that fit and take the least time
(memory/checkpointing/memory_budget.py). A plan counts them by its own formulas and asks the same solver (memory/checkpointing/knapsack.py) with the same
speeds: for the first stage of a pipeline, which has the most in flight. Other stages have room to repeat less, and wait
for that one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from echelon.memory.checkpointing.checkpoint_options import Counted, ways_of
from echelon.memory.checkpointing.cost import GIB, Again, segment_length
from echelon.memory.checkpointing.knapsack import Way, solve
from echelon.planning.cost.activation_memory import entry, kept, kept_entry, layers_in_flight, masks, scores, tensors
from echelon.planning.cost.elementwise_traffic import passing_of
from echelon.planning.model.model_shape import Layer
from echelon.planning.scenario import Case

SEGMENTS = ("full", "every", "sqrt")
"""kinds whose layers are repeated whole"""


@dataclass(frozen=True)
class Doing:
    """What the layers do."""

    forms: tuple[tuple[str, float], ...] = (("none", 1.0),)
    """shares of the layers that have each form (activations.py)"""
    length: int = 1
    """of those that are repeated, how many at once"""

    def share(self, word: str) -> float:
        return sum(share for form, share in self.forms if word in form)

    @property
    def full(self) -> float:
        return self.share("full")


def doing(case: Case) -> Doing:
    kind = case.layout.recompute.partition(":")[0]
    if kind == "none":
        return Doing()
    if kind == "budget":
        return _solved(case)
    if kind not in SEGMENTS:
        return Doing(((kind, 1.0),))
    layers = _layers_of_stage(case)
    flights = layers_in_flight(case, 0) / layers
    return Doing((("full", 1.0),), segment_length(case.layout.recompute, layers=layers, in_flight=flights))


def _layers_of_stage(case: Case) -> int:
    stages = case.layout.pp * case.layout.vpp
    return -(-case.shape.num_layers // stages)


def kept_of(case: Case, layer: Layer, done: Doing) -> float:
    """Bytes of one layer and microbatch that stay until backward."""
    return sum(
        share * (kept_entry(case) / done.length if form == "full" else kept(case, layer, form))
        for form, share in done.forms
    )


def made_again(case: Case, layer: Layer, done: Doing) -> float:
    """Bytes that are there while layers go backward that did not keep them: all of a segment, or attention's core."""
    if done.full:
        counted = case.has_kernels or case.is_plain
        own = entry(case) if counted and not divides_or_copies(case) else 0.0  # its input is kept already
        return done.length * (tensors(case, layer) + scores(case, layer)) - own
    if done.share("selective"):
        return tensors(case, layer) - tensors(case, layer, "selective") + scores(case, layer)
    return 0.0


def divides_or_copies(case: Case) -> bool:
    """A layer's input is made of what is kept, in memory of its own."""
    return kept_entry(case) != entry(case) or case.thrift.arena


def moved_to_keep(case: Case) -> float:
    """Bytes that a microbatch moves to keep activations in fewer bits, or in an arena, and to have them back."""
    thrift, size = case.thrift, case.element_bytes
    if not thrift.packs and not thrift.arena:
        return 0.0
    done, total = doing(case), 0.0
    for layer, n in case.shape.layers:
        for form, share in done.forms:
            if form == "full":
                kept_here, flags = entry(case) / done.length, 0.0
                total += n * share * (4 * kept_here if thrift.arena else 0.0)
            else:
                flags = masks(case, layer, form)
                kept_here = tensors(case, layer, form) + (0.0 if "selective" in form else scores(case, layer)) - flags
            total += n * share * thrift.moved(kept_here, flags, size)
    return total


# -- what is repeated -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """Shares of the layers' forward that are done again in backward."""

    forward: float = 0.0
    attention: float = 0.0
    """beside that"""
    passing: float = 0.0
    """of operators between products, beside that"""


def repeated_of(case: Case) -> Repeated:
    if case.layout.recompute == "none":
        return Repeated()
    done = doing(case)
    some, core = done.share("ops"), done.share("selective")
    own = case.has_kernels or case.is_plain
    passing = some * passing_of(case, remakes=True).again if some else 0.0
    if core:
        passing += core * (passing_of(case).core if own else 0.5)
    # A repetition ends with the probabilities: what they make of the values is kept.
    attention = core * (0.5 if own and case.writes_scores else 1.0)
    return Repeated(forward=done.full, attention=attention, passing=passing)


def again_of(case: Case) -> Again:
    """Layers that are repeated, for counting messages; of a budget, as many as come of it."""
    shape, done = case.shape, doing(case)
    if case.layout.recompute.partition(":")[0] in SEGMENTS:
        return Again.of(f"every:{done.length}", layers=shape.num_layers, mixtures=shape.mixtures)
    whole, mixed = round(done.full * shape.num_layers), round(done.full * shape.mixtures)
    cores = round(done.share("selective") * shape.num_layers)
    return Again(plain=whole - mixed, plain_tails=whole - mixed, mixed=mixed, mixed_tails=mixed, cores=cores)


# -- a budget ---------------------------------------------------------------------------------------------------------


def _solved(case: Case) -> Doing:
    """See [Note: a budget]. Where it is less than `full` takes, every layer is repeated: a run refuses that."""
    kinds = tuple(tuple(ways_here(case, layer)) for layer, _ in case.shape.layers)
    counts = tuple(n for _, n in case.shape.layers)
    layers = _layers_of_stage(case)
    flights = max(1, round(layers_in_flight(case, 0) / layers))
    budget = float(case.layout.recompute.partition(":")[2].removesuffix("GiB")) * GIB
    return _forms(kinds, counts, layers, flights, budget)


@lru_cache(maxsize=512)
def _forms(
    kinds: tuple[tuple[Way, ...], ...], counts: tuple[int, ...], layers: int, flights: int, budget: float
) -> Doing:
    total = sum(counts)
    stage = [ways for ways, n in zip(kinds, counts, strict=True) for _ in range(max(1, round(n * layers / total)))]
    found = solve(stage, [flights] * len(stage), budget)
    chosen = [way.form for way in found] if found is not None else ["full"] * len(stage)
    return Doing(tuple((form, chosen.count(form) / len(chosen)) for form in sorted(set(chosen))))


def ways_here(case: Case, layer: Layer) -> list[Way]:
    """What a layer can do, as a run would count it."""
    found = {"none": _counted(case, layer, "none")}
    if not (case.thrift.packs and case.layout.recompute == "ops"):
        found["ops"] = _counted(case, layer, "ops")
    if layer.attention is not None:
        found["selective"] = _counted(case, layer, "selective")
        found["ops+selective"] = _counted(case, layer, "ops+selective")
    return ways_of(found, "cuda" if case.on_gpu else "cpu", copied=divides_or_copies(case))


def _counted(case: Case, layer: Layer, form: str) -> Counted:
    none = tensors(case, layer) + scores(case, layer)
    selective = tensors(case, layer, "selective")
    flops = layer.flops(case.seq_len) * case.tokens / case.layout.tp
    core = layer.attention.flops(case.seq_len) * case.tokens / case.layout.tp if layer.attention else 0.0
    return Counted(
        kept=kept(case, layer, form),
        core=none - selective,
        whole=kept(case, layer, form),  # what `ops` makes again is used at once
        entry=kept_entry(case),
        flops=flops,
        again=flops,
        core_flops=core,
        core_again=core / 2 if case.writes_scores else core,
    )
