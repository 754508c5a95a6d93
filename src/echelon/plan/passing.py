"""What operators between products move through the device's memory, in a microbatch through all layers."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.plan.case import Case
from echelon.plan.kernels import Part

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


def passing_of(case: Case) -> Passing:
    layout, layers, tokens, tp = case.layout, case.shape.layers, case.tokens, case.layout.tp
    if not case.has_kernels:
        norms = sum(n * tokens * layer.passed / case.sliced for layer, n in layers)
        others = sum(n * tokens * (layer.passed_split + case.crowd * layer.passed_experts) / tp for layer, n in layers)
        return Passing(norms=norms, others=others, backward=BACKWARD, again=1.0)
    forward, backward, again = Part(), Part(), Part()
    options = {"narrow": case.is_narrow, "remakes": layout.recompute == "ops", "travels": layout.ep * layout.etp > 1}
    for layer, n in layers:
        assert layer.kernels is not None
        moved = layer.kernels.bytes_moved(element_bytes=case.element_bytes, **options)
        forward, backward, again = (a + n * b for a, b in zip((forward, backward, again), moved, strict=True))
    once, back, made = (
        part.on_rank(case.sliced, tp, etp=layout.etp, crowd=case.crowd) for part in (forward, backward, again)
    )
    return Passing(
        norms=tokens * forward.whole / case.sliced / ELEMENT_BYTES,
        others=tokens * (once - forward.whole / case.sliced) / ELEMENT_BYTES,
        backward=back / once,
        again=made / once,
    )
