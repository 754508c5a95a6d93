"""Every way to recompute on one device: equal gradients, and what is kept and repeated as the costs say."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from live_tensor_bytes import LivingBytes
from tiny_engines import SGD, batch_of, float64, largest_error, tiny, whole
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from echelon import models
from echelon.layout import Layout
from echelon.memory.checkpointing import memory_budget
from echelon.memory.checkpointing.checkpoint_policy import recomputing_modules
from echelon.memory.checkpointing.cost import (
    GIB,
    RecomputedLayers,
    ineffective_options,
    recompute_work,
    segment_length,
)
from echelon.memory.checkpointing.memory_budget import MemoryBudget
from echelon.memory.checkpointing.saved_inputs import InputArena
from echelon.models import model_config
from echelon.models.model_config import ModelConfig
from echelon.models.moe_config import MoEConfig
from echelon.parallel.parallel_options import ParallelOptions
from echelon.training.engine import Engine

KINDS = ("full", "every:2", "every:3", "sqrt", "selective", "ops")
MIXTURE = MoEConfig(experts=4, k=2, ffn=16, gate="mixtral", dropout=0.2, dense_layers=1)
SHAPES = {
    "llama": tiny(layers=4, dropout=0.1),
    "gpt": tiny("gpt", layers=5, dropout=0.1, kv_heads=4),
    "head norms": tiny(layers=3, dropout=0.1, qk_norm=True),
    "mixture": tiny(layers=4, dropout=0.1, moe=MIXTURE),
}


def engine_of(shape: ModelConfig, recompute: str, **options: Any) -> Engine:
    model = models.build(shape, "meta", dtype=torch.float64)
    engine = Engine(model, f"recompute={recompute},accumulate=2", SGD, options=float64(**options))
    engine.model.train()
    return engine


def gradients(shape: ModelConfig, recompute: str, **options: Any) -> dict[str, Tensor]:
    """After two steps, of the second."""
    engine = engine_of(shape, recompute, **options)
    for step in range(2):
        engine.step(batch_of(shape, 4, seed=step))
    return whole(engine.parallel)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_equal_with_dropout(shape: str) -> None:
    expected = gradients(SHAPES[shape], "none")
    within = f"budget:{0.6 * kept_by_layers(SHAPES[shape]) / GIB:.9f}GiB"
    for kind in (*KINDS, within):
        assert largest_error(gradients(SHAPES[shape], kind), expected) < 1e-12, kind


def kept_by_layers(shape: ModelConfig) -> float:
    """Bytes of a microbatch that `none` keeps, as a rehearsal counts them."""
    engine = engine_of(shape, "budget:1GiB")
    engine.rehearse_memory_budget(next(engine.microbatches(batch_of(shape, 4))))
    assert isinstance(engine.parallel.checkpointing, MemoryBudget)
    return engine.parallel.checkpointing.peak_bytes


def test_experts_are_counted_once() -> None:
    loads = []
    for kind in ("none", "every:2", "selective"):
        engine = engine_of(SHAPES["mixture"], kind)
        engine.step(batch_of(SHAPES["mixture"], 4))
        loads.append([load.counts for load in engine.expert_loads.start_read()()])
    assert loads[0] == loads[1] == loads[2]


# -- what is kept -----------------------------------------------------------------------------------------------------


def kept(model: nn.Module, recompute: str, batch: dict[str, Tensor]) -> int:
    return kept_by(Engine(model, f"recompute={recompute}", SGD), batch)


def kept_by(engine: Engine, batch: dict[str, Tensor]) -> int:
    """Bytes that forward leaves for backward, every storage once, parameters left out."""
    engine.model.train()
    microbatch = next(engine.microbatches(batch))
    engine.rehearse_memory_budget(microbatch)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in engine.model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        total, _ = engine.model(**engine.prepare(microbatch))
    found_bytes = sum(found.values())
    del total
    return found_bytes


@pytest.mark.parametrize(("name", "share"), [("llama-tiny", 0.8), ("gpt-tiny", 0.85)])
def test_ops_saves_less_than_none_and_more_than_full(name: str, share: float) -> None:
    size = replace(model_config.find_model(name), dropout=0.0)
    batch = batch_of(size, 4, 64)
    whole, some, least = (kept(models.build(size, "meta"), kind, batch) for kind in ("none", "ops", "full"))
    assert least < some < share * whole


def test_only_every_nth_input_is_saved() -> None:
    size = replace(model_config.find_model("gpt-tiny"), layers=7, dropout=0.1)
    batch = batch_of(size, 4, 64)
    found = {kind: kept(models.build(size, "meta"), kind, batch) for kind in ("full", "every:2", "every:3", "sqrt")}
    entry = 4 * 64 * size.width * 4
    outside = found["full"] - 7 * entry
    assert found["every:2"] == outside + 4 * entry
    assert found["every:3"] == found["sqrt"] == outside + 3 * entry


def test_selective_does_not_save_quadratic_tensors() -> None:
    size = replace(model_config.find_model("gpt-tiny"), layers=2, dropout=0.1)
    none, less = (
        [kept(models.build(size, "meta"), kind, batch_of(size, 1, length)) for length in (64, 128)]
        for kind in ("none", "selective")
    )
    assert less[1] < 2.1 * less[0] < 2.1 * none[0] < none[1]


class Deep(nn.Module):
    """Layers of a transformer's sizes; inside, each saves eight times its input."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Tanh()) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        for layer in self.layers:
            x = layer(x)
        return x.sum(), len(x)


def living(layers: int, recompute: str) -> int:
    """Most bytes that are alive at once in a step, of what is made in it."""
    engine = Engine(Deep(layers), f"recompute={recompute}", SGD)
    batch = {"x": torch.randn(4096, 8)}
    engine.step(batch)
    with LivingBytes() as seen:
        engine.step(batch)
    return seen.peak


def slope(points: dict[int, int]) -> float:
    """Of a line through the logarithms."""
    xs, ys = [math.log(x) for x in points], [math.log(y) for y in points.values()]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    rise = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return rise / sum((x - mean_x) ** 2 for x in xs)


def test_peak_activations_grow_with_the_square_root_of_the_layers() -> None:
    depths = (4, 16, 64)
    slopes = {kind: slope({layers: living(layers, kind) for layers in depths}) for kind in ("none", "full", "sqrt")}
    print(f"slopes of peak bytes over layers: {slopes}")
    assert 0.9 < slopes["none"] < 1.02
    assert 0.4 < slopes["sqrt"] < 0.55
    assert slopes["full"] < 0.7


# -- what is repeated -------------------------------------------------------------------------------------------------


def flops(model: nn.Module, recompute: str, batch: dict[str, Tensor]) -> int:
    return flops_of(Engine(model, f"recompute={recompute}", SGD), batch)


def flops_of(engine: Engine, batch: dict[str, Tensor]) -> int:
    engine.model.train()
    with FlopCounterMode(display=False) as counter:
        engine.step(batch)
    return int(counter.get_total_flops())


def test_recomputed_flops_equal_the_cost() -> None:
    size = replace(model_config.find_model("gpt-tiny"), layers=6, dropout=0.1)
    batch = batch_of(size, 2, 64)
    found = {kind: flops(models.build(size, "meta"), kind, batch) for kind in ("none", *KINDS)}
    tokens, width = 2 * 64, size.width
    products = 2 * tokens * (4 * width * width + 2 * width * size.ffn)
    core = 2 * 2 * tokens * 64 * width
    assert found["ops"] == found["none"]
    for kind in ("full", "every:2", "every:3", "sqrt"):
        again, count = (
            recompute_work(kind, layers=6, layer_bytes=1.0, input_bytes=0.0),
            RecomputedLayers.from_policy(kind, layers=6),
        )
        assert again.inputs * 6 == count.segments
        # Dropout behind it reads what the last product of a segment's last layer gives: it is repeated too.
        assert found[kind] - found["none"] == again.forward * 6 * (products + core), kind
    # Probabilities times values are not: what they give is kept.
    share = recompute_work("selective", layers=6, layer_bytes=1.0, input_bytes=0.0, materialized_scores=True).attention
    assert found["selective"] - found["none"] == share * 6 * core


def test_segments_grow_with_the_microbatches_in_flight() -> None:
    """Every microbatch saves the inputs of its segments; the activations of one segment are in memory once."""
    lengths = {
        (layers, flying): segment_length("sqrt", layers=layers, in_flight=flying)
        for layers in (4, 16)
        for flying in (1, 4)
    }
    assert lengths == {(4, 1): 2, (4, 4): 4, (16, 1): 4, (16, 4): 8}
    assert segment_length("sqrt", layers=4, in_flight=9) == 4  # at most all layers of the stage
    assert segment_length("every:3", layers=4, in_flight=4) == 3


# -- budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "dropout"), [("llama", 0.0), ("gpt", 0.1)])
def test_a_budget_is_met_and_used(family: str, dropout: float) -> None:
    size = tiny(family, layers=16, dropout=dropout, kv_heads=4, width=32, ffn=96)
    batch = batch_of(size, 2, 32)
    full = Engine(models.build(size, "meta"), "recompute=full", SGD)
    most, outside = kept(models.build(size, "meta"), "none", batch), kept_by(full, batch) - 16 * 2 * 32 * size.width * 4
    repeated: int | None = flops_of(full, batch)
    for share in (0.3, 0.7):
        room = share * (most - outside)
        engine = Engine(models.build(size, "meta"), f"recompute=budget:{room / GIB:.9f}GiB", SGD)
        found, chosen = kept_by(engine, batch) - outside, engine.parallel.checkpointing
        assert isinstance(chosen, MemoryBudget)
        print(family, share, f"{chosen.peak_bytes / room:.3f} of the budget:", *chosen.describe())
        assert 0.95 * room <= chosen.peak_bytes <= room
        # Rotations are kept once, by whoever keeps anything of them.
        assert sum(way.saved_bytes for way in chosen.chosen) == pytest.approx(found, rel=0.005)
        assert found <= room
        assert repeated is None or flops_of(engine, batch) <= repeated
        repeated = None


def test_a_rehearsal_frees_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer in each of its ways stayed in memory for good: 49 GiB of a GPU beside a budget of 8."""
    saved: list[StorageWeakRef] = []
    pack = memory_budget._SavedStorages.pack

    def noted(self: Any, tensor: Tensor) -> Any:
        saved.append(StorageWeakRef(tensor.untyped_storage()))
        return pack(self, tensor)  # type: ignore[func-returns-value]

    monkeypatch.setattr(memory_budget._SavedStorages, "pack", noted)
    engine = engine_of(SHAPES["gpt"], "budget:1GiB")
    engine.step(batch_of(SHAPES["gpt"], 4))
    lasting = {parameter.untyped_storage()._cdata for parameter in engine.model.parameters()}
    living = [ref for ref in saved if not ref.expired() and ref.cdata not in lasting]
    assert len(saved) > 100
    assert not living


def test_a_budget_below_the_minimum_is_refused_with_the_minimum() -> None:
    shape = SHAPES["gpt"]
    with pytest.raises(ValueError, match=r"is too small to recompute every layer .* use recompute=budget:") as reported:
        gradients(shape, "budget:0.000001GiB")
    enough = str(reported.value).partition("use recompute=")[2].partition(" ")[0]
    assert largest_error(gradients(shape, enough), gradients(shape, "none")) < 1e-12


# -- how inputs are kept ----------------------------------------------------------------------------------------------


def test_an_arena_is_allocated_once_and_reused() -> None:
    shape = SHAPES["gpt"]
    assert largest_error(gradients(shape, "every:2", arena=True), gradients(shape, "none")) < 1e-12
    engine = engine_of(shape, "every:2", arena=True)
    arena = engine.parallel.checkpointing.segments[0].save_input
    assert isinstance(arena, InputArena)
    for step in range(3):
        engine.step(batch_of(shape, 4, seed=step))
        assert len(arena.blocks) == 1
        assert arena.num_in_use == 0
    assert arena.blocks[0].nbytes == 3 * 2 * 9 * shape.width * 8
    block = arena.blocks[0].data_ptr()
    engine.step(batch_of(shape, 4, 5))
    assert [found.data_ptr() for found in arena.blocks] == [block]
    engine.step(batch_of(shape, 4, 12))
    assert [found.nbytes for found in arena.blocks] == [3 * 2 * 12 * shape.width * 8]


def test_an_input_restored_from_an_arena_outlives_its_slot() -> None:
    """A layer may return its input, or a hook keep it, while the next input is copied into the same slot."""
    arena, first = InputArena(1), torch.arange(6.0).view(2, 3)
    saved, restore = arena(first)
    restored = restore(saved)
    del saved, restore
    assert arena.num_in_use == 0
    arena(torch.full((2, 3), 7.0))
    assert len(arena.blocks) == 1
    assert torch.equal(restored, first)


class OldNames(nn.Module):
    """A user's layer that was written for the attribute's old name."""

    remake = False


def test_the_old_name_of_recompute_output_is_refused_with_the_new_one() -> None:
    with pytest.raises(ValueError, match=r"OldNames has an attribute `remake`, now `recompute_output`; rename it"):
        list(recomputing_modules(nn.Sequential(nn.Linear(2, 2), OldNames())))


def test_ineffective_memory_options_are_refused() -> None:
    for layout, word, why in (
        ("recompute=full", "partition", "tp=1"),
        ("recompute=none", "arena", "recompute=none"),
        ("recompute=ops", "partition", "recompute=ops"),
    ):
        assert why in ineffective_options(Layout.parse(layout))[word]
        with pytest.raises(ValueError, match=f"memory.{word} has no effect with"):
            Engine(models.build(SHAPES["gpt"], "meta"), layout, options=ParallelOptions(**{word: True}))
    assert "sp=1" in ineffective_options(Layout.parse("tp=2,recompute=full"))["partition"]
    assert not ineffective_options(Layout.parse("tp=2,sp=0,recompute=full"))
