"""Compressed and partitioned activations of a plan equal those of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_engines import SGD, batch_of, tiny

import echelon as ec
from echelon import models
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.models.model_config import ModelConfig
from echelon.parallel.parallel_options import ParallelOptions
from echelon.planning.cluster import cluster
from echelon.planning.cost.recompute_cost import recompute_plan, saved_layer_bytes
from echelon.planning.memory_options import MemoryOptions
from echelon.planning.model.model_sources import config_shape
from echelon.planning.scenario import Scenario
from echelon.training.engine import Engine

ROWS, LENGTH, LAYERS = 2, 128, 4
SIZES: dict[str, Any] = {"layers": LAYERS, "width": 128, "heads": 4, "ffn": 256, "max_seq_len": LENGTH}
SHAPES = {"llama": tiny(**SIZES), "gpt, dropout": tiny("gpt", **SIZES, kv_heads=4, dropout=0.1)}


def case_of(shape: ModelConfig, layout: str, thrift: MemoryOptions) -> Scenario:
    return Scenario(
        shape=config_shape(shape),
        cluster=cluster.parse_cluster("2xcpu"),
        layout=Layout.parse(layout),
        seq_len=LENGTH,
        precision="fp32",
        memory_options=thrift,
    )


def planned(case: Scenario) -> float:
    return sum(n * saved_layer_bytes(case, layer, recompute_plan(case)) for layer, n in case.shape.layers)


def packed(shape: ModelConfig, compress: str) -> int:
    """Bytes that the layers keep: two sizes tell them from embedding and head."""
    found = []
    for layers in (LAYERS, LAYERS // 2):
        smaller = replace(shape, layers=layers)
        engine = Engine(models.build(smaller, "meta"), Layout(microbatch=ROWS), SGD)
        engine.model.train()
        given = engine.prepare(next(engine.microbatches(batch_of(smaller, ROWS, LENGTH))))
        with ec.compressed(compress) as saving:
            out = engine.model(**given)
        found.append(saving.bytes)
        del out
    return 2 * (found[0] - found[1])


@pytest.mark.parametrize("compress", ["lossless", "lossless+fp16", "lossless+fp8", "lossless+int8"])
@pytest.mark.parametrize("name", SHAPES)
def test_compressed_bytes_are_predicted(name: str, compress: str) -> None:
    shape = SHAPES[name]
    found = packed(shape, compress)
    case = case_of(shape, f"dp=1,microbatch={ROWS}", MemoryOptions(compress=compress))
    print(f"{name}, {compress}: {found:,} kept, {planned(case):,.0f} planned ({planned(case) / found - 1:+.1%})")
    assert planned(case) == pytest.approx(found, rel=0.05)


def inputs_kept(shape: ModelConfig, layout: str, partition: bool) -> int:
    options = ParallelOptions(partition=partition)
    engine = Engine(models.build(shape, "meta"), Layout.parse(layout), SGD, options=options)
    keep = engine.parallel.checkpointing.segments[0].save_input
    stored, _ = keep(torch.zeros(ROWS, LENGTH, shape.width))
    return LAYERS * stored.nbytes


def test_partitioned_inputs_are_predicted(pool: RankPool) -> None:
    shape, layout = SHAPES["llama"], f"tp=2,sp=0,recompute=full,microbatch={ROWS}"
    for partition in (False, True):
        found = pool.run(inputs_kept, 2, shape, layout, partition)[0]
        assert planned(case_of(shape, layout, MemoryOptions(partition=partition))) == found
