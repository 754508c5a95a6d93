"""Transform of a custom model's head: its logits are not computed where only their cross entropy is read.

It needs the head's weight after the head has run, so that zero=3 and offload=params, which free it, keep the head as it
is; so do layouts that divide the vocabulary or run the model in parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.memory.offload.cost import offloads_params
from echelon.models.deferred_logits import defer_logits
from echelon.models.foreign.causal_lm import ForeignCausalLM
from echelon.models.traced.graph_model import GraphModel
from echelon.parallel.regional_compile import is_asked_for, is_user_class

if TYPE_CHECKING:
    from echelon.parallel.transform_context import TransformContext


def fuse_user_head(context: TransformContext) -> None:
    """Let the head of a user's model defer its logits under `compile`, if it runs whole and keeps its weights."""
    layout, model = context.layout, context.model
    runs_whole = layout.tp == layout.pp == layout.cp == 1 and not (isinstance(model, GraphModel) and model.runs_graph)
    keeps_weights = not context.policy.reshards_params and not offloads_params(layout.offload)
    is_wanted = is_asked_for(context.options) and is_user_class(type(model)) and not isinstance(model, ForeignCausalLM)
    if is_wanted and runs_whole and keeps_weights:
        defer_logits(model)
