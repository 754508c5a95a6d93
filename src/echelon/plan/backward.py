"""What comes and goes while the backward of one of our layers runs, beside what the forward pass kept.

[Note: inside a mixture's backward]

Rows are as wide as the model (w) or as what is inside their experts (f; what `up` gives is 2f with a gate). Each moment
has its own tensors, and has let go of what those before it read:

    moment               is there                                        is no longer there    gradients of experts
    results are weighed  gradients, weighed and times the results: 3w    -                     none
    down's gradients     of its output w, of its input f, its weight's   results w             none
    these are put away   of its input f, its weight's                    w, activation f       there
    the activation       of its output f, of its input 2f                w, f                  there
    up's gradients       of its output 2f, of its input w, its weight's  w, f, up's output 2f  there

A weight's gradient is made whole and then put in its place (flat_unit.py), for which there may be no memory before:
then it is not there at the first two. Beside all of these is the gradient of the stream, before and after.
"""

from __future__ import annotations

from echelon.parallel.expert import CEILING
from echelon.plan.activations import tensors
from echelon.plan.case import Case
from echelon.plan.shape import COLUMNS, Layer
from echelon.plan.units import gradient_bytes

WORKING = 0.45
"""times the activations of a layer that its backward needs while it runs, where our kernels do: the gradients of what
the activation reads are the most of it"""
STREAMS = 2


def room(case: Case, layer: Layer, *, held: bool) -> float:
    """Bytes at its fullest. `held`: gradients have memory throughout."""
    if not layer.is_mixture:
        return WORKING * tensors(case, layer)
    layout, size = case.layout, case.element_bytes
    up, down = sorted((product for product in layer.products if product.experts), key=lambda one: one.split != COLUMNS)
    ranks = layout.ep * layout.etp
    home = case.tokens * size * up.share / layout.tp
    rows = min(case.crowd, CEILING) * home * layout.etp
    width, inner, both = up.inputs, down.inputs / layout.etp, up.outputs / layout.etp
    missing = 0.0 if held else layer.expert_parameters / ranks * gradient_bytes(case)
    down_weight, up_weight = (product.parameters * size / ranks for product in (down, up))
    moments = (
        (2 * home + max(home, rows)) * width - missing,
        rows * (width + inner) + down_weight - home * width - missing,
        down_weight - home * width,
        rows * both - home * width,
        rows * (width - inner) + up_weight - home * width,
    )
    return max(moments) + STREAMS * case.tokens * case.shape.width * size / case.sliced
