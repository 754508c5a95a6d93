"""The entropy-regularised assignment of tokens to experts.

[Note: the problem and its solution]
Of all A in R^(e x n),

    maximise  sum of S·A + lambda · H(A),   H(A) = sum of -A·log A + A
    so that   each row sums to k            (an expert takes k tokens)
              each column sums to b at most (a token goes to b experts)
              0 <= A <= 1

(The term + A in H is a constant, since all rows together sum to e·k.) The solution has the form

    A_ij = min(1, exp((S_ij - u_i - v_j) / lambda))      v_j >= 0, and v_j = 0 where column j is not full

Dykstra's method projects onto the three constraints in turn; with lambda = 0.001 it does not converge in 200 rounds.
Here the bound by 1 is part of both other projections, and each of those is exact, in closed form. The sum over j
of min(1, exp(x_j - t)) is the least, over m, of m + the sum of exp(x_j - t) over all but the m largest: a term is at
most 1 and at most its exponential, and the m largest are the best to cut. All of these fall with t, so that the t
at which the least is k is the least of the t at which each is k:

    t = min over m < k of  log(sum of exp(x_j) over all but the m largest) - log(k - m)

Rows and columns in turn are an ascent on the dual in two blocks. Steps half as long again (over-relaxation) get as far
in 20 rounds as steps of full length in 100.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

OVER_RELAXATION = 1.5
"""step length; 1 is exact block ascent, and steps near 2 do not converge"""


def solve_shift(x: Tensor, total: float) -> Tensor:
    """[..]: the t with sum of min(1, exp(x - t)) = total along the last dim; the total is at most the dim's size."""
    steps = math.ceil(total)
    largest, indices = x.topk(steps, dim=-1)
    # From behind: all that are never cut, then one more of the others at a time.
    others = x.scatter(-1, indices, float("-inf")).logsumexp(-1, keepdim=True)
    rest = torch.cat((others, largest.flip(-1)), dim=-1).logcumsumexp(-1).flip(-1)[..., :steps]
    left = total - torch.arange(steps, dtype=x.dtype, device=x.device)
    return (rest - left.log()).amin(-1)


def dual_prices(s: Tensor, k: int, cap: float, entropy: float, rounds: int) -> tuple[Tensor, Tensor]:
    """(u [.., e], v [.., n]) of scores [.., e, n].

    Rows sum to k exactly. After 100 rounds at an entropy of 0.001, columns of softmax scores exceed the cap by 1e-3 at
    most, and by 2e-2 where the cap is the mean, so that every column is full.
    """
    x = s / entropy
    u = solve_shift(x, k)
    v = torch.zeros_like(x[..., 0, :])
    full = min(cap, x.shape[-2])
    for _ in range(rounds):
        best = solve_shift((x - u.unsqueeze(-1)).transpose(-1, -2), full)
        v = (v + OVER_RELAXATION * (best - v)).clamp(min=0)
        u = u + OVER_RELAXATION * (solve_shift(x - v.unsqueeze(-2), k) - u)
    return solve_shift(x - v.unsqueeze(-2), k) * entropy, v * entropy
