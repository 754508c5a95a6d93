"""What operators between products move through the device's memory, in a microbatch through all layers."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.planning.cost.kernel_traffic import Part
from echelon.planning.scenario import Case

BACKWARD = 1.5
"""what operators of others move in backward, to forward"""
ELEMENT_BYTES = 2
"""bytes of an element, as they are counted here"""


@dataclass(frozen=True, kw_only=True)
class Passing:
    """Elements of 16 bits on one rank."""

    norms: float
    """by norms and residuals, forward"""
    others: float
    """by all other operators, forward"""
    backward: float
    """in backward, to forward"""
    again: float
    """where what operators made is made again: what that moves, to forward"""
    core: float = 0.0
    """where attention's core is done again: what its operators move, to forward"""


def passing_of(case: Case, *, remakes: bool | None = None) -> Passing:
    """`remakes`: what operators made is made again; where it is not said, as the layout has it."""
    remakes = case.layout.recompute == "ops" if remakes is None else remakes
    layout, layers, tokens, tp = case.layout, case.shape.layers, case.tokens, case.layout.tp
    if not case.has_kernels:
        norms = sum(n * tokens * layer.passed / case.sliced for layer, n in layers)
        others = sum(n * tokens * (layer.passed_split + case.crowd * layer.passed_experts) / tp for layer, n in layers)
        return Passing(norms=norms, others=others, backward=BACKWARD, again=1.0)
    forward, backward, again, core = Part(), Part(), Part(), Part()
    options = {"narrow": case.is_narrow, "remakes": remakes, "travels": layout.ep * layout.etp > 1}
    for layer, n in layers:
        assert layer.kernels is not None
        moved = layer.kernels.bytes_moved(element_bytes=case.element_bytes, **options)
        forward, backward, again = (a + n * b for a, b in zip((forward, backward, again), moved, strict=True))
        core += n * case.element_bytes * layer.kernels.core_again
    once, back, made, prepared = (
        part.on_rank(case.sliced, tp, etp=layout.etp, crowd=case.crowd) for part in (forward, backward, again, core)
    )
    return Passing(
        norms=tokens * forward.whole / case.sliced / ELEMENT_BYTES,
        others=tokens * (once - forward.whole / case.sliced) / ELEMENT_BYTES,
        backward=back / once,
        again=made / once,
        core=prepared / once,
    )
