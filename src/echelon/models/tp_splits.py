"""Tensor-parallel roles of the modules of our models, beside them: the models are written for one device.

parallel/tp/cost.py explains the roles. A custom model has such a table as its attribute `split`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.models.model_config import ModelConfig
from echelon.models.moe_config import MoEConfig

if TYPE_CHECKING:
    from torch import nn

_TRANSFORMER = {
    "embed": "vocabulary",
    "drop": "sequence",
    "blocks.*.norm1": "sequence",
    "blocks.*.attn": "region",
    "blocks.*.attn.q": "column/heads",
    "blocks.*.attn.k": "column/heads",
    "blocks.*.attn.v": "column/heads",
    "blocks.*.attn.core.dropout": "heads",
    "blocks.*.attn.o": "row",
    "blocks.*.drop1": "sequence",
    "blocks.*.norm2": "sequence",
    "blocks.*.mlp": "region",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
    "blocks.*.drop2": "sequence",
    "norm": "sequence",
    "head": "head",
}

_MLA = {
    "blocks.*.attn.q_down": "sequence",
    "blocks.*.attn.q_norm": "sequence",
    "blocks.*.attn.kv_down": "sequence",
    "blocks.*.attn.kv_norm": "sequence",
    "blocks.*.attn.heads": "region",
    # tp divides the heads, so that a rank's columns are complete heads.
    "blocks.*.attn.heads.q": "column",
    "blocks.*.attn.heads.kv": "column",
    "blocks.*.attn.heads.core.dropout": "heads",
    "blocks.*.attn.o": "row",
}
"""replaces the roles of attention: a rank projects its own tokens to latents, which enter the region"""

_QK_NORM = {"blocks.*.attn.q_norm": "inside", "blocks.*.attn.k_norm": "inside"}

ATTENTION, MLP = "blocks.*.attn", "blocks.*.mlp"

SPLITS: dict[str, dict[str, str]] = {
    "gpt": {**_TRANSFORMER, "positions": "positions"},
    "llama": {**_TRANSFORMER, "blocks.*.mlp.gate": "column"},
}
"""by family"""


def _split_table(config: ModelConfig) -> dict[str, str]:
    """The table of one of our models."""
    table = SPLITS.get(config.family, {})
    if config.qk_norm:
        table = {**table, **_QK_NORM}
    if config.mla is not None:
        roles = {pattern: role for pattern, role in _MLA.items() if ".q_" not in pattern or config.mla.query_rank}
        table = {**{pattern: role for pattern, role in table.items() if not pattern.startswith(ATTENTION)}, **roles}
    return table if config.moe is None else _with_moe_layers(table, config, config.moe)


def _with_moe_layers(table: dict[str, str], config: ModelConfig, moe: MoEConfig) -> dict[str, str]:
    """Give the roles of the MLP to the shared expert of MoE layers; parallel/ep splits the routed experts."""
    inner = {pattern: role for pattern, role in table.items() if pattern.startswith(MLP)}
    result = {pattern: role for pattern, role in table.items() if pattern not in inner}
    for layer in range(config.layers):
        experts = moe.is_moe_layer(layer)
        if experts and not moe.shared_ffn:
            continue
        module = f"blocks.{layer}.mlp" + (".shared" if experts else "")
        result.update({pattern.replace(MLP, module): role for pattern, role in inner.items()})
    return result


def find_tp_split(model: nn.Module) -> dict[str, str]:
    """The model's table of tensor-parallel roles; empty if it has none."""
    config = getattr(model, "config", None)
    table = getattr(model, "split", None) or (_split_table(config) if isinstance(config, ModelConfig) else {})
    return dict(table)


def get_tp_split(model: nn.Module) -> dict[str, str]:
    """The model's table of tensor-parallel roles. Raises ValueError if it has none."""
    table = find_tp_split(model)
    if not table:
        raise ValueError(
            f"tp > 1 requires inputs of the forward of {type(model).__name__}, from which its split is derived, or an "
            "attribute `split`; give `inputs`, or a table from module patterns to roles "
            '(for instance {"mlp": "region", "mlp.up": "column", "mlp.down": "row"}), or use tp=1'
        )
    return table
