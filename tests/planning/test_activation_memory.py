"""Activations in flight on the ranks of a pipeline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.layout import Layout
from echelon.models.model_config import find_model
from echelon.planning.cluster import cluster
from echelon.planning.cost.activation_memory import layers_in_flight
from echelon.planning.cost.memory_model import stage_memory
from echelon.planning.model.model_sources import config_shape
from echelon.planning.scenario import Scenario


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("", [10]),
        ("pp=4,accumulate=8", [4 * 3, 3 * 3, 2 * 3, 1 * 3]),
        ("pp=4,schedule=gpipe,accumulate=8", [8 * 3] * 4),
        ("pp=2,schedule=interleaved,vpp=2,accumulate=8", [5 * 3, 3 * 3]),
    ],
)
def test_the_fullest_stage_is_counted_where_stages_do_not_divide_the_layers(layout: str, expected: list[int]) -> None:
    shape = config_shape(replace(find_model("llama-tiny"), layers=10))
    nodes = cluster.parse_cluster("4xcpu")
    case = Scenario(shape=shape, cluster=nodes, layout=Layout.parse(layout), seq_len=64)
    assert [layers_in_flight(case, rank) for rank in range(len(expected))] == expected


def test_a_pipeline_of_one_microbatch_writes_no_gradients_while_others_are_reduced() -> None:
    def buffers(accumulate: int) -> int:
        layout = Layout.parse(f"dp=2,pp=2,zero=2,accumulate={accumulate}")
        nodes = cluster.parse_cluster("4xcpu")
        case = Scenario(shape=config_shape(find_model("llama-tiny")), cluster=nodes, layout=layout, seq_len=64)
        return stage_memory(case, 0).parts["buffers"]

    assert buffers(4) == buffers(2) == 2 * buffers(1)
