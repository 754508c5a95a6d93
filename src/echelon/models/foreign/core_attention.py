"""`CoreAttention` in a transformers model: its attention modules call it through transformers' attention interface.

transformers looks the function up by a name in the config. Under the name below it finds `attend`, which hands queries,
keys and values to a core of the module, so that context parallelism reaches the keys of other ranks. Masks are left out
for an unknown name, so the core itself makes attention causal and keeps documents apart.

Each layer gets the positions and documents of its microbatch as one more argument: backward may recompute it when
another microbatch has begun.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from echelon.models.attention import AttentionContext, CoreAttention
from echelon.rng import Dropout, RandomStream

CORE_ATTENTION = "echelon_core"
"""the name in the config"""
CONTEXT_ARGUMENT = "attention_context"
"""keyword of a layer, which never reaches transformers' code"""
UNSUPPORTED = {"sliding_window": "a sliding window", "softcap": "capped scores", "s_aux": "attention sinks"}


class AttentionState:
    """What the cores of one layer read while it runs."""

    def __init__(self) -> None:
        self.context: AttentionContext | None = None


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    """The function that transformers calls: [B, heads, T, head_dim] to [B, T, heads, head_dim]."""
    scaling = options.get("scaling")
    if scaling is not None:
        query = query * (scaling * query.shape[-1] ** 0.5)  # the core divides by the root
    context = module.core_state.context
    return module.core(query, key, value, context).transpose(1, 2).contiguous(), None


def find_core_problem(model: Any) -> str:
    """Why the attention of a foreign model is not what a core computes; empty if it is."""
    stack = model.layer_stack
    problems = {
        name: what
        for calls in stack.attention_calls
        for name, options in calls.items()
        for what in unsupported(options)
    }
    without = [name for name, calls in zip(stack.layer_names, stack.attention_calls, strict=True) if len(calls) != 1]
    if without:
        return f"{without[0]} does not attend through transformers' attention interface"
    return "{} has {}".format(*next(iter(problems.items()))) if problems else ""


def install_cores(model: Any) -> None:
    """Give each attention module of a foreign model a core. Raises ValueError where one computes something else."""
    from transformers import AttentionInterface

    stack = model.layer_stack
    if problem := find_core_problem(model):
        raise ValueError(
            f"context parallelism cannot divide the sequences of {type(model).__name__}: {problem}; use cp=1"
        )
    AttentionInterface.register(CORE_ATTENTION, attend)
    for name, calls, kinds in zip(stack.layer_names, stack.attention_calls, stack.attention_dropouts, strict=True):
        layer = model.get_submodule(name)
        state = layer.attention_state = AttentionState()
        module = model.get_submodule(next(iter(calls)))
        core: Any = CoreAttention()
        core.dropout = Dropout(0.0, f"{name}.core.dropout", RandomStream(0))
        sites = list(getattr(layer, "functional_dropouts", ()))
        for index in kinds:
            core.dropout = sites[index]
        layer.called_dropouts = tuple(site for index, site in enumerate(sites) if index not in kinds)
        module.core, module.core_state = core.train(module.training), state
    for module in model.modules():
        config = vars(module).get("config")
        if config is not None:
            config._attn_implementation = CORE_ATTENTION


def unsupported(options: Mapping[str, Any]) -> list[str]:
    """What an attention call asks for and a core does not compute."""
    return [words for key, words in UNSUPPORTED.items() if options.get(key) is not None]
