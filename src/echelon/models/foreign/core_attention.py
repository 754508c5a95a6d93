"""`CoreAttention` in a transformers model: its attention modules call it through transformers' attention interface.

transformers looks the function up by a name in the config. Under the name below it finds `attend`, which hands queries,
keys and values to a core of the module, so that context parallelism reaches the keys of other ranks. Masks are left out
for an unknown name, so the core itself makes attention causal, applies a window and keeps documents apart. Whether it
then computes what the model's own function does is tried (parallel/cp/sequence_plan.py).

Each layer gets the positions and documents of its microbatch as one more argument: backward may recompute it when
another microbatch has begun.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Any

from torch import Tensor, nn

from echelon.kernels.attention.blockwise_attention import ScoreOptions
from echelon.models.attention import AttentionContext, CoreAttention
from echelon.rng import Dropout, RandomStream

CORE_ATTENTION = "echelon_core"
"""the name in the config"""
IGNORED = {"sdpa": ("softcap", "s_aux")}
"""what the attention functions of transformers take and do not read; some classes pass it to them all the same"""
CONTEXT_ARGUMENT = "attention_context"
"""keyword of a layer, which never reaches transformers' code"""


class AttentionState:
    """What the core of one layer reads while it runs."""

    def __init__(self) -> None:
        self.context: AttentionContext | None = None


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    """The function that transformers calls: [B, heads, T, head_dim] to [B, T, heads, head_dim]."""
    options = {key: value for key, value in options.items() if key not in module.core_ignores}
    scaling, softcap = options.get("scaling"), options.get("softcap")
    module.core.scores = ScoreOptions(
        scale=None if scaling is None else float(scaling),
        softcap=None if softcap is None else float(softcap),
        window=options.get("sliding_window") or None,
    )
    context = module.core_state.context
    out = module.core(query, key, value, context, sinks=options.get("s_aux"))
    return out.transpose(1, 2).contiguous(), None


def install_cores(model: Any, names: Iterable[str]) -> None:
    """Give these attention modules of a foreign model a core. Other modules keep the model's own function."""
    stack, wanted = model.layer_stack, set(names)
    for name, calls, kinds in zip(stack.layer_names, stack.attention_calls, stack.attention_dropouts, strict=True):
        for attention in wanted & calls.keys():
            layer = model.get_submodule(name)
            sites = list(getattr(layer, "functional_dropouts", ()))
            dropouts = [sites[index] for index in kinds] or [Dropout(0.0, f"{name}.core.dropout", RandomStream(0))]
            install_core(layer, model.get_submodule(attention), dropouts[0])
            layer.called_dropouts = tuple(site for index, site in enumerate(sites) if index not in kinds)


def install_core(layer: Any, module: Any, dropout: nn.Module) -> CoreAttention:
    """Let an attention module of a layer call a core, which drops probabilities by `dropout`."""
    from transformers import AttentionInterface

    AttentionInterface.register(CORE_ATTENTION, attend)
    core: Any = CoreAttention()
    core.dropout = dropout
    layer.attention_state = AttentionState()
    module.core, module.core_state, module.core_ignores = core.train(module.training), layer.attention_state, ()
    for part in module.modules():
        config = vars(part).get("config")
        if config is not None:
            module.core_ignores = IGNORED.get(str(config._attn_implementation), ())
            vars(part)["config"] = copy(config)
            vars(part)["config"]._attn_implementation = CORE_ATTENTION
    made: CoreAttention = core
    return made
