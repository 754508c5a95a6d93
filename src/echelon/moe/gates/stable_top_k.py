"""The k best of a row, the same ones on every device: of equals the first comes first."""

from __future__ import annotations

from torch import Tensor


def stable_top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(values, indices) of the k largest along the last dim, the largest first. Values have a gradient.

    `torch.topk` may take any of equal values, and which one it takes changes with the shape of the whole tensor: a
    token would be routed differently in another layout.
    """
    indices = scores.detach().sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return scores.gather(-1, indices), indices


def scatter_dense(indices: Tensor, values: Tensor, size: int) -> Tensor:
    """[..., size]: the values at their indices, 0 elsewhere. No index comes twice; `size` itself is left out."""
    zeros = values.new_zeros(*values.shape[:-1], size + 1)
    return zeros.scatter(-1, indices, values)[..., :size]
