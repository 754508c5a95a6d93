"""How well an expert suits a token, from its logit."""

from __future__ import annotations

import torch
from torch import Tensor

SCORE_FUNCTIONS = ("softmax", "sigmoid")


def affinity(logits: Tensor, score_function: str) -> Tensor:
    """In (0, 1): the experts of a token compete in a softmax, each stands alone in a sigmoid."""
    return logits.softmax(-1) if score_function == "softmax" else logits.sigmoid()


def normalise(x: Tensor) -> Tensor:
    """Along the last dim with sum 1."""
    # Sigmoids can all underflow.
    return x / x.sum(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)


def score_function_errors(score_function: str) -> list[str]:
    if score_function in SCORE_FUNCTIONS:
        return []
    return [f"score is not one of {', '.join(SCORE_FUNCTIONS)} (score={score_function}); use one of them"]
