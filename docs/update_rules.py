"""What the code says of optimizers: for tables.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from echelon import models
from echelon.config.sections import OptimizerConfig
from echelon.optim import cost
from echelon.optim.update_rule import UpdateRule

Table = tuple[Sequence[str], Iterable[Sequence[str]]]
"""head and rows"""

MODEL = "gpt2-124m"
OPTIMIZERS: dict[str, tuple[UpdateRule, str, str, str]] = {
    "`adamw`": (OptimizerConfig(), "Loshchilov and Hutter 2019", "none", "the default"),
    "`adamw`, `states=bfloat16`": (
        OptimizerConfig(states="bfloat16"),
        "the same, moments stochastically rounded",
        "none",
        "half the moments, at no cost that could be seen",
    ),
    "`adamw`, `states=int8`": (
        OptimizerConfig(states="int8"),
        "Dettmers and others 2022: blocks of 256, dynamic tree",
        "none",
        "a quarter of the moments",
    ),
    "`sgd`": (OptimizerConfig(name="sgd"), "", "none", "convolutions; comparisons"),
    "`sgd`, `momentum=0.9`": (OptimizerConfig(name="sgd", momentum=0.9), "", "none", "convolutions"),
    "`lion`": (
        OptimizerConfig(name="lion"),
        "Chen and others 2023: the sign of a running mean",
        "none",
        "half the moments; a third to a tenth of AdamW's lr",
    ),
    "`lamb`": (
        OptimizerConfig(name="lamb"),
        "You and others 2020: AdamW, scaled to the norm of the weights",
        "1 all-reduce: two norms per matrix",
        "very large batches",
    ),
    "`adafactor`": (
        OptimizerConfig(name="adafactor"),
        "Shazeer and Stern 2018: means of rows and columns",
        "2 all-reduces: rows and columns; a norm per matrix",
        "no memory for moments",
    ),
    "`sm3`": (
        OptimizerConfig(name="sm3"),
        "Anil and others 2019, SM3-II: maxima of rows and columns",
        "1 all-reduce: rows and columns",
        "no memory for moments, sparse gradients",
    ),
    "`muon`": (
        OptimizerConfig(name="muon"),
        "Jordan 2024, Moonlight's scale: orthogonalized momentum",
        "2 all-to-alls: each matrix's parts to its owner, and back",
        "the layers' matrices; its authors need fewer steps than with AdamW",
    ),
}


def optimizers() -> Table:
    shapes = {name: tuple(p.shape) for name, p in models.build(models.find_model(MODEL), "meta").named_parameters()}
    total = sum(p.numel() for p in models.build(models.find_model(MODEL), "meta").parameters())
    rows = []
    for name, (rule, source, collectives, when) in OPTIMIZERS.items():
        size = sum(cost.state_bytes(rule, shape, name=parameter) for parameter, shape in shapes.items()) / total
        rows.append((name, source, f"{cost.state_bytes_per_element(rule):.3g}", f"{size:.2f}", collectives, when))
    head = (
        "`optimizer.name`",
        "rule",
        "bytes per matrix element",
        f"bytes per parameter of {MODEL}",
        "collectives",
        "when",
    )
    return head, rows
