"""Uneven layers on stages: the printed split covers each layer once; too few layers are refused at once."""

from __future__ import annotations

import pytest
from cpu_clock import cpu_seconds
from tiny_engines import engine_of, tiny

from echelon.layout import Layout, ValidationError, check_layout
from echelon.training.logging.resolved_settings import _pipeline_settings

HEAD = tiny().vocab * tiny().width
"""the cost of the costliest layer: the largest error of a balanced split"""


def split_on(layers, layout):
    engine = engine_of(tiny(layers=layers), layout)
    held = {name.split(".")[1] for name, _ in engine.model.named_parameters() if name.startswith("blocks.")}
    return engine.pipeline.stages.split, list(_pipeline_settings(engine.pipeline, 9)), held


@pytest.mark.parametrize(
    ("layers", "layout"),
    [
        (7, "pp=2"),
        (7, "pp=3"),
        (7, "pp=4"),
        (9, "pp=2,schedule=interleaved"),
        (9, "pp=4,schedule=zb-v"),
        (9, "pp=3,schedule=dualpipe-v"),
    ],
)
def test_the_printed_split_covers_each_layer_once(pool, layers, layout):
    ranks = pool.run(split_on, Layout.parse(layout).world, layers, layout)
    expected = ["embed", *(f"blocks.{i}" for i in range(layers)), "head"]
    for split, rows, _ in ranks:
        assert [name for stage in split.layers for name in stage] == expected
        shown = [row for row in rows if row[0].startswith("stage")]
        assert len(shown) == split.stages
        assert all(
            links[0] in text and links[-1] in text for links, (_, text, _) in zip(split.layers, shown, strict=True)
        )
    costs = ranks[0][0].costs
    assert max(costs) <= sum(costs) / len(costs) + HEAD, "balanced, with the head counted"
    held = [layer for _, _, mine in ranks for layer in mine]
    assert sorted(held, key=int) == [str(i) for i in range(layers)], "each layer is on one rank"


def test_too_few_layers_are_refused_with_the_legal_values():
    started = cpu_seconds()
    with pytest.raises(ValidationError, match=r"pp=3.*2 layers.*legal: 1, 2") as caught:
        check_layout("pp=3", model=tiny(layers=2))
    assert cpu_seconds() - started < 2
    assert [fault.key for fault in caught.value.issues] == ["pp"]
