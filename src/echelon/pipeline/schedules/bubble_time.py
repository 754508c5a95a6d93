"""Seconds that a rank waits in a step: the formulas behind the schedules' `bubble` and the planner's search.

[Note: bubbles]

With f, i and w the seconds of a rank's forward, input-gradient and weight-gradient passes of one microbatch, on d ranks
with m microbatches and v chunks, a step is longer than m (f + i + w) by

    1f1b          (d - 1) (f + i + w) / v, and where m < d by (d - m) (v - 1) / v times (f + i + w) more
    zb-h1         (d - 1) (f + i) - min(d - 1, m - 1) w: weight gradients fill the bubble, as far as there are any
    zb-v          m <= d: (d - 1) (f + i) - (m - 1) f, a traversal there and back
                  m >  d: the larger of (d - 1) i - (n - d) w and ((d - 1 + k) i - k w) / 2, n = min(m, 2d - 1) and
                          k = 2d - 1 - n: from 2d - 1 microbatches up, (d - 1) max(i / 2, i - w)
    dualpipe-v    m <= d: the traversal and (d - 1) w / 2
                  m >  d: the larger of (d - 1) (f + i) / 2 and (d - 1) i - f / 2, and ((d - 1) / 2 - (n - d - 1)) w
                          with n = min(m, 2d): the two of a pair run one after the other, so none of it is hidden

as the simulator has it where w <= f <= i. That is so for every transformer: a weight gradient is GEMMs alone, and an
input gradient is as many GEMMs as forward, with attention and recomputation that cost more. Every number may be a NumPy
array: each line is of one layout or of thousands.
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
    beyond = np.minimum(np.maximum(microbatches, ranks), 2 * ranks - 1) - ranks  # n - d of zb-v
    left = ranks - 1 - beyond  # k
    way_back = np.maximum(
        (ranks - 1) * input_grad - beyond * weight_grad,
        ((ranks - 1 + left) * input_grad - left * weight_grad) / 2,
    )
    pairs = (ranks - 1) / 2 + ranks + 1 - np.minimum(np.maximum(microbatches, ranks + 1), 2 * ranks)
    in_pairs = np.maximum((ranks - 1) * (forward + input_grad) / 2, (ranks - 1) * input_grad - forward / 2)
    return [
        (ranks - 1 + unfilled) / chunks * microbatch,
        (ranks - 1) * (forward + input_grad) - np.minimum(ranks - 1, microbatches - 1) * weight_grad,
        np.maximum(traversal, way_back),
        np.maximum(traversal + (ranks - 1) * weight_grad / 2, in_pairs + pairs * weight_grad),
    ]


def unit_bubble(schedule: int, ranks: int, chunks: int, microbatches: int) -> Fraction:
    """The bubble as a share of the step, with F = I = W = 1."""
    sizes = (Fraction(size) for size in (ranks, microbatches, chunks, 1, 3, 1))
    waiting: Fraction = bubble_times(*sizes)[schedule]
    return waiting / (3 * microbatches + waiting)
