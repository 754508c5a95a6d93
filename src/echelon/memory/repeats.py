"""What each way to recompute keeps of a layer, and what it does again: the cost of `recompute`. No torch.

none         everything that backward reads is kept
full         a layer keeps its input; its forward is done again
every:N      only every Nth layer keeps its input; N layers are repeated, and are there at once
sqrt         every:N with N the root of the layers: the least memory of all
selective    attention's scores and what follows from them are not kept, and done again
ops          outputs of products and of attention are kept; operators between them are done again
budget:NGiB  as many layers as it takes keep their input only, so that the others fit
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GIB = 1 << 30
OPERATORS = 0.45
"""share of a layer's activations that operators between products made, where nobody counted them"""


@dataclass(frozen=True, kw_only=True)
class Repeats:
    forward: float = 0.0
    """share of the layers' forward that is done again"""
    attention: float = 0.0
    """share of attention, beside that"""
    passing: float = 0.0
    """share of the operators between products, beside that"""
    kept: float = 1.0
    """share of a layer's activations that is kept"""
    inputs: float = 0.0
    """inputs that are kept, per layer"""
    together: int = 0
    """layers that are repeated at once"""
    drops_scores: bool = False
    """attention's scores are not kept"""


def repeats(
    recompute: str,
    *,
    layers: float,
    whole: float,
    entry: float,
    operators: float = OPERATORS,
    passing: float = 1.0,
) -> Repeats:
    """`layers` are those in flight on a rank, `whole` the bytes of one's activations, `entry` those of its input.

    Of a model that was counted: `operators` is the share of its activations that operators between products made, and
    `passing` what making them again takes of what those operators took.
    """
    kind, _, number = recompute.partition(":")
    if kind in ("full", "every", "sqrt"):
        every = 1 if kind == "full" else int(number) if kind == "every" else max(1, round(math.sqrt(layers)))
        return Repeats(forward=1.0, kept=0.0, inputs=1 / every, together=every)
    if kind == "selective":
        return Repeats(attention=1.0, passing=0.5, drops_scores=True)
    if kind == "ops":
        return Repeats(passing=passing, kept=1 - operators)
    if kind == "budget":
        room = float(number.removesuffix("GiB")) * GIB
        share = min(1.0, max(0.0, (layers * whole - room) / max(layers * (whole - entry), 1.0)))
        return Repeats(forward=share, kept=1 - share, inputs=share, together=int(share > 0))
    return Repeats()
