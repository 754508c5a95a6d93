"""Collectives of tensor grids in a step of the docs' example model, for tables.py."""

from __future__ import annotations

from dataclasses import replace

from echelon import models
from echelon.layout import Layout
from echelon.layout.collective import Collective
from echelon.parallel.tp.cost import TransformerSizes
from echelon.parallel.tp_grid import cost as tp_grid_cost

LAYOUTS = tuple(f"{text},microbatch=4" for text in ("tp=4,tp_kind=2d", "tp=8,tp_kind=2.5d,depth=2", "tp=8,tp_kind=3d"))


def costs(text: str, model: str, seq_len: int, element_bytes: int, loss_bytes: int) -> list[Collective]:
    """Return the collectives of all modules, without the once-a-step sums of partial gradients."""
    layout, shape = Layout.parse(text), models.find_model(model)
    width, ffn = shape.width, shape.ffn
    sizes = [*[(width, width, False)] * 3, (width, width, True), (width, ffn, False), (ffn, width, True)]  # q, k, v, o
    products = [
        tp_grid_cost.linear_sizes(layout, inputs, outputs, leaves_region=leaves, shares_input=index in (1, 2))
        for index, (inputs, outputs, leaves) in enumerate(sizes)
    ]
    norm = tp_grid_cost.NormSizes(reduced=2, gathered=2)
    parts = [
        *[norm, *products, norm] * shape.layers,
        norm,
        *tp_grid_cost.embedding_and_head_sizes(layout, shape.vocab, width),
    ]
    step = TransformerSizes(
        layers=shape.layers,
        width=width,
        batch=layout.microbatch,
        seq_len=seq_len,
        dropout=False,
        element_bytes=element_bytes,
        loss_bytes=loss_bytes,
    )
    found = tp_grid_cost.collectives([(part, 0) for part in parts], layout, step)
    return sorted((replace(item, purpose="blocks") for item in found), key=lambda item: (item.op, item.axis))
