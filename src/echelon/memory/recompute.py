"""Activation recomputation: what backward needs is computed again instead of kept.

    none   every layer keeps what its backward reads
    full   each layer keeps its input only; one more forward of the layers is executed in backward

The block's forward is replaced inside the module, so hooks on the module (gathering parameters, entering regions) run
once. Masks of dropout are functions of their place (rng.py), so the second forward draws the same ones with no state
saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def apply(model: nn.Module, names: Sequence[str]) -> None:
    """Makes the named modules recompute."""
    for name in names:
        module: Any = model.get_submodule(name)
        module.forward = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)
