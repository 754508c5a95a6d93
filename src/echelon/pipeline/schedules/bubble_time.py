"""Seconds that a rank waits in a step: the formulas behind the schedules' `bubble` and the planner's search.

[Note: bubbles]

With f, i and w the seconds of a rank's forward, input-gradient and weight-gradient passes of one microbatch, on d ranks
with m microbatches and v chunks, a step is longer than m (f + i + w) by

    1f1b          (d - 1) (f + i + w) / v, and where m < d by (d - m) (v - 1) / v times (f + i + w) more
    zb-h1         (d - 1) (f + i) - min(d - 1, m - 1) w: weight gradients fill the bubble, as far as there are any
    zb-v          (d - 1) max(f / 2, i - w), but at least one traversal there and back: (d - 1) (f + i) - (m - 1) f
    dualpipe-v    the same, with a traversal that is (d - 1) w / 2 longer; up to f more where d < m < 2 d

in agreement with the simulator. Every number may be a NumPy array: each line is of one layout or of thousands.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

INTERLEAVED, ZB_H1, ZB_V, DUALPIPE_V, NO_BUBBLE = range(5)
"""indices of what `bubble_times` returns, and the one behind it; 1f1b is interleaved with one chunk"""


def bubble_times(ranks: Any, microbatches: Any, chunks: Any, forward: Any, microbatch: Any, weight_grad: Any) -> Any:
    """Seconds that a rank waits in a step under 1f1b, zb-h1, zb-v and dualpipe-v. See [Note: bubbles].

    `forward`, `microbatch` (forward and backward) and `weight_grad` are seconds of one microbatch on a rank.
    """
    import numpy as np  # slow, and `train --keys` reads the schedules without it

    input_grad = microbatch - forward - weight_grad
    unfilled = np.maximum(ranks - microbatches, 0) * (chunks - 1)
    traversal = (ranks - 1) * (forward + input_grad) - (microbatches - 1) * forward
    zb_v = (ranks - 1) * np.maximum(forward / 2, input_grad - weight_grad)
    return [
        (ranks - 1 + unfilled) / chunks * microbatch,
        (ranks - 1) * (forward + input_grad) - np.minimum(ranks - 1, microbatches - 1) * weight_grad,
        np.maximum(zb_v, traversal),
        np.maximum(zb_v, traversal + (ranks - 1) * weight_grad / 2),
    ]


def unit_bubble(schedule: int, ranks: int, chunks: int, microbatches: int, added: int = 0) -> Fraction:
    """The bubble as a share of the step, with F = I = W = 1; `added` are seconds that the formula lacks."""
    sizes = (Fraction(size) for size in (ranks, microbatches, chunks, 1, 3, 1))
    waiting: Fraction = bubble_times(*sizes)[schedule] + added
    return waiting / (3 * microbatches + waiting)
