"""How well an expert suits a token, from its logit."""

from __future__ import annotations

import torch
from torch import Tensor

AFFINITIES = ("softmax", "sigmoid")


def affinity(logits: Tensor, kind: str) -> Tensor:
    """In (0, 1): the experts of a token compete in a softmax, each stands alone in a sigmoid."""
    return logits.softmax(-1) if kind == "softmax" else logits.sigmoid()


def normalised(x: Tensor) -> Tensor:
    """Along the last dim with sum 1."""
    # Sigmoids can all underflow.
    return x / x.sum(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)


def wrong_affinity(kind: str) -> list[str]:
    if kind in AFFINITIES:
        return []
    return [f"score is not one of {', '.join(AFFINITIES)} (score={kind}); use one of them"]
