"""A narrow model of the same class, on which a split of a foreign model is tried.

A trial runs layers in float64 on every rank of tp at once (region_trial.py). What it finds are names of modules, and
those do not depend on how wide the layers are. So a wide model is tried by a twin whose config has the same numbers of
layers, heads and experts, and sizes that are smaller by one factor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from echelon.models.foreign.causal_lm import ForeignCausalLM, adapt
from echelon.models.foreign.init_rules import materialize_buffers
from echelon.models.foreign.layer_stack import own_class

NARROW_NUMEL = 1 << 21
"""elements of a layer that is tried as it is"""
FACTORS = (64, 32, 16, 8, 4, 2)
MIN_SIZE = 8
"""a size that is not made smaller: rotary embeddings halve and quarter a head"""
SIZE_WORDS = ("size", "dim", "embd", "inner", "d_model", "ffn", "rank", "width")
NO_SIZES = ("vocab", "kernel", "chunk", "window", "max", "image", "patch", "block", "init")
"""words of keys that are sizes of something else than a layer's tensors"""


def shrunken_twin(model: ForeignCausalLM, change: Callable[[Any], None] | None = None) -> ForeignCausalLM | None:
    """Return the narrowest twin that the class can build, on the meta device; as wide as the model if that is narrow.

    None if the model's modules are not those that its class builds from its config, to which `change` may do more.
    """
    for factor in FACTORS if _layer_numel(model) > NARROW_NUMEL else (1,):
        twin = _twin(model, factor, change)
        if twin is not None:
            return twin
    return _twin(model, 1, change)


def _layer_numel(model: ForeignCausalLM) -> int:
    layers = (model.get_submodule(name) for name in model.layer_stack.layer_names)
    return max((sum(p.numel() for p in layer.parameters()) for layer in layers), default=0)


def _twin(model: Any, factor: int, change: Callable[[Any], None] | None) -> ForeignCausalLM | None:
    """The twin with sizes divided by a factor; none if the class has no such model."""
    config = copy.deepcopy(model.config)
    for key, value in vars(model.config).items():
        if _is_size(key, value) and value % factor == 0 and value // factor >= MIN_SIZE:
            setattr(config, key, value // factor)
    if change is not None:
        change(config)
    own = own_class(model)
    try:
        with torch.device("meta"):
            twin = own(config)
        materialize_buffers(twin)
        adapted: ForeignCausalLM = adapt(twin)
    except Exception:  # whatever a class raises for sizes that do not fit together
        return None
    is_usable = factor == 1 or _has_wide_heads(adapted)
    return adapted if is_usable and _has_equal_modules(model, adapted) else None


def _is_size(key: str, value: Any) -> bool:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return is_number and any(word in key for word in SIZE_WORDS) and not any(word in key for word in NO_SIZES)


def _has_wide_heads(twin: ForeignCausalLM) -> bool:
    heads = (vars(module).get("head_dim") for module in twin.modules())
    return all(head_dim >= MIN_SIZE for head_dim in heads if isinstance(head_dim, int))


def _has_equal_modules(model: ForeignCausalLM, twin: ForeignCausalLM) -> bool:
    return {name: p.dim() for name, p in model.named_parameters()} == {
        name: p.dim() for name, p in twin.named_parameters()
    }
