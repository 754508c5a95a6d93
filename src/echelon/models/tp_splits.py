"""How tensor parallelism divides our models: beside them, so that the models themselves stay written for one device.

The words are explained in parallel/tp/cost.py. A user's own model brings such a table as its attribute `split`.
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
    # tp divides the heads, so that the columns of one rank are whole heads.
    "blocks.*.attn.heads.q": "column",
    "blocks.*.attn.heads.kv": "column",
    "blocks.*.attn.heads.core.dropout": "heads",
    "blocks.*.attn.o": "row",
}
"""in place of attention's words: narrow vectors are made of a rank's own tokens, and pass into the region"""

_QK_NORM = {"blocks.*.attn.q_norm": "inside", "blocks.*.attn.k_norm": "inside"}

ATTENTION, MLP = "blocks.*.attn", "blocks.*.mlp"

SPLITS: dict[str, dict[str, str]] = {
    "gpt": {**_TRANSFORMER, "positions": "positions"},
    "llama": {**_TRANSFORMER, "blocks.*.mlp.gate": "column"},
}
"""by family"""


def _split_table(config: ModelConfig) -> dict[str, str]:
    """One of our own models'."""
    table = SPLITS.get(config.family, {})
    if config.qk_norm:
        table = {**table, **_QK_NORM}
    if config.mla is not None:
        words = {pattern: word for pattern, word in _MLA.items() if ".q_" not in pattern or config.mla.query_rank}
        table = {**{pattern: word for pattern, word in table.items() if not pattern.startswith(ATTENTION)}, **words}
    return table if config.moe is None else _with_moe_layers(table, config, config.moe)


def _with_moe_layers(table: dict[str, str], config: ModelConfig, mixture: MoEConfig) -> dict[str, str]:
    """The feed-forward part's words are those of its shared expert where there are experts: these go by expert.py."""
    inner = {pattern: word for pattern, word in table.items() if pattern.startswith(MLP)}
    found = {pattern: word for pattern, word in table.items() if pattern not in inner}
    for layer in range(config.layers):
        experts = mixture.is_moe_layer(layer)
        if experts and not mixture.shared_ffn:
            continue
        place = f"blocks.{layer}.mlp" + (".shared" if experts else "")
        found.update({pattern.replace(MLP, place): word for pattern, word in inner.items()})
    return found


def get_tp_split(model: nn.Module) -> dict[str, str]:
    """The model's table, or a clear refusal."""
    config = getattr(model, "config", None)
    table = getattr(model, "split", None) or (_split_table(config) if isinstance(config, ModelConfig) else None)
    if not table:
        raise ValueError(
            f"tensor parallelism needs to know how to divide {type(model).__name__}; "
            "give the class an attribute `split`, from module patterns to words "
            '(for instance {"mlp": "region", "mlp.up": "column", "mlp.down": "row"}), or use tp=1'
        )
    return dict(table)
