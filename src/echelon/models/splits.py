"""How tensor parallelism divides our models: beside them, so that the models themselves stay written for one device.

The words are explained in parallel/tensor.py. A user's own model brings such a table as its attribute `split`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.models.sizes import ModelConfig

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

SPLITS: dict[str, dict[str, str]] = {
    "gpt": {**_TRANSFORMER, "positions": "positions"},
    "llama": {**_TRANSFORMER, "blocks.*.mlp.gate": "column"},
}
"""by family"""


def split_of(model: nn.Module) -> dict[str, str]:
    """The model's table, or a clear refusal."""
    config = getattr(model, "config", None)
    family = config.family if isinstance(config, ModelConfig) else ""
    table = getattr(model, "split", None) or SPLITS.get(family)
    if not table:
        raise ValueError(
            f"tensor parallelism needs to know how to divide {type(model).__name__}; "
            "give the class an attribute `split`, from module patterns to words "
            '(for instance {"mlp": "region", "mlp.up": "column", "mlp.down": "row"}), or use tp=1'
        )
    return dict(table)
