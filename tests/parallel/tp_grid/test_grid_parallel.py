"""A model on a grid: what is divided how, what is refused, what a rank holds and moves beside the papers' formulas."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from counting import CountCollectives
from tiny_engines import batch_of, engine_of, float64, one_device, tiny
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from echelon import models
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout, Mesh
from echelon.layout.placement import DimSplit, LogicalParam, Placement, group_params
from echelon.models.attention import AttentionContext
from echelon.models.tp_splits import get_tp_split
from echelon.parallel.apply import apply
from echelon.parallel.comm.mesh_axis import MeshAxes
from echelon.parallel.tp_grid import grid_parallel
from echelon.parallel.tp_strategy import tp_strategy
from echelon.parallel.transform_context import logical_params
from echelon.rng import RandomStream, attach_stream

GRIDS = {
    "2d": "tp=4,tp_kind=2d",
    "2.5d": "tp=8,tp_kind=2.5d,depth=2",
    "3d": "tp=8,tp_kind=3d",
}

# -- what is divided how ----------------------------------------------------------------------------------------------


class Untouched(MeshAxes):
    """The axes of a mesh, without a process group."""

    def _find_process_group(self, groups: Any) -> None:
        return None


def split(model: nn.Module, table: dict[str, str], text: str, rank: int = 0) -> dict[str, LogicalParam]:
    layout = Layout.parse(text)
    attach_stream(model, RandomStream(0))
    found = grid_parallel.shard_modules(model, logical_params(model), table, layout, Untouched(Mesh(layout), rank, []))
    return {entry.name: entry for entry in found}


def cut(axis: str, dim: int, **more: int) -> DimSplit:
    return DimSplit(axis=axis, dim=dim, num_parts=more.get("parts", 2), num_copies=more.get("copies", 1))


def test_on_a_square_weights_are_divided_over_both_axes_and_vectors_follow_the_columns() -> None:
    model = models.build(tiny("gpt", layers=1), "meta")
    entries = split(model, get_tp_split(model), GRIDS["2d"])
    weights = {"q": "attn.q", "o": "attn.o", "up": "mlp.up", "down": "mlp.down"}
    for name in weights.values():
        assert entries[f"blocks.0.{name}.weight"].splits == (cut("x", 0), cut("y", 1))
        assert entries[f"blocks.0.{name}.weight"].partial_grad_axes == ()
        assert entries[f"blocks.0.{name}.bias"].splits == (cut("x", 0),)
        assert entries[f"blocks.0.{name}.bias"].partial_grad_axes == ("z*y",)
    assert entries["embed.weight"].splits == (cut("y", 0), cut("x", 1))
    assert entries["positions.weight"].splits == (cut("x", 1),)
    assert entries["blocks.0.norm1.weight"].splits == (cut("x", 0),)
    assert entries["blocks.0.norm1.weight"].partial_grad_axes == ("z*y",)


def test_2_5d_replicates_weights_over_its_layers() -> None:
    model = models.build(tiny(layers=1), "meta")
    for name, entry in split(model, get_tp_split(model), GRIDS["2.5d"]).items():
        assert entry.partial_grad_axes == (("z*y",) if "norm" in name else ("z",)), name


def test_on_a_cube_outputs_are_divided_twice_and_x_and_y_change_places_inside_a_region() -> None:
    model = models.build(tiny("gpt", layers=1), "meta")
    entries = split(model, get_tp_split(model), GRIDS["3d"])
    for name in ("attn.q", "mlp.up"):
        assert entries[f"blocks.0.{name}.weight"].splits == (cut("y", 0), cut("z", 0), cut("x", 1))
        assert entries[f"blocks.0.{name}.bias"].splits == (cut("y", 0),)
        assert entries[f"blocks.0.{name}.bias"].partial_grad_axes == ("z*x",)
    for name in ("attn.o", "mlp.down"):
        assert entries[f"blocks.0.{name}.weight"].splits == (cut("x", 0), cut("z", 0), cut("y", 1))
        assert entries[f"blocks.0.{name}.bias"].splits == (cut("x", 0),)
        assert entries[f"blocks.0.{name}.bias"].partial_grad_axes == ("z*y",)
    assert entries["embed.weight"].splits == (cut("y", 0), cut("z", 0), cut("x", 1))
    matrices = [entry for name, entry in entries.items() if len(entry.shape) == 2 and name != "positions.weight"]
    assert not any(entry.partial_grad_axes for entry in matrices)


@pytest.mark.parametrize(("name", "axis"), [("2d", "x"), ("3d", "y")])
def test_kv_heads_are_replicated_if_the_grid_side_is_a_multiple_of_them(name: str, axis: str) -> None:
    model = models.build(tiny(layers=1, kv_heads=1), "meta")
    entry = split(model, get_tp_split(model), GRIDS[name])["blocks.0.attn.k.weight"]
    assert entry.splits[0] == cut(axis, 0, parts=1, copies=2)
    assert entry.partial_grad_axes == (f"{axis}/2",)


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_every_element_has_one_owner(name: str, family: str) -> None:
    """Widths that the grid does not divide: padding and copies are not counted."""
    layout = Layout.parse(GRIDS[name])
    owned: Counter[str] = Counter()
    for rank in range(layout.world):
        model = models.build(tiny(family, layers=1, width=20, heads=2, kv_heads=1, ffn=9), "meta")
        entries = split(model, get_tp_split(model), GRIDS[name], rank)
        at = Mesh(layout).coordinates(rank)
        placement = Placement(
            param_groups=group_params(list(entries.values()), {}, 1), coordinates={**at, "shard": 0, "replica": 0}
        )
        for piece in placement.pieces():
            owned[piece.param.name] += sum(b - a for a, b in piece.unpadded_runs()) if piece.is_owner else 0
    assert owned == {name: torch.Size(entry.shape).numel() for name, entry in entries.items()}


# -- what is refused --------------------------------------------------------------------------------------------------


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.mlp, self.drop = nn.Embedding(9, 6), nn.LayerNorm(6), MLP(), nn.Dropout(0.1)
        self.scale, self.head = Scale(6), Scale(6)


TABLE = {
    "embed": "vocabulary",
    "norm": "sequence",
    "mlp": "region",
    "mlp.up": "column",
    "mlp.down": "row",
    "drop": "sequence",
    "head": "head",
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ["no role of the table divides scale.weight"]),
        ({"scale": "sequence"}, [r"scale would need all columns of what it reads \(Scale, which is no known norm\)"]),
        ({"scale": "column"}, [r'scale is called "column" and is no Linear \(Scale\)']),
        ({"embed": "region"}, ['begins at an embedding, and the table calls no module "vocabulary"', "embed.weight"]),
        ({"head": "region"}, ['ends in a language head, and the table calls no module "head"']),
        ({"drop": "region"}, ['drop is a dropout that the table calls neither "sequence" nor "heads"']),
    ],
    ids=["forgotten", "unknown norm", "no linear", "no embedding", "no head", "dropout"],
)
def test_modules_that_a_grid_cannot_divide_are_named(change: dict[str, str], words: list[str]) -> None:
    model = Model()
    with pytest.raises(ValueError, match=r"Model cannot be divided over a grid \(tp_kind=2d\).*or use tp_kind=1d") as e:
        split(model, {**TABLE, **change}, GRIDS["2d"])
    for word in words:
        assert e.match(word)
    assert type(model.mlp.down) is nn.Linear, "a refused model is left alone"
    assert not model.mlp._forward_pre_hooks


def test_heads_that_the_side_does_not_divide_are_refused() -> None:
    model = models.build(tiny(heads=6, kv_heads=3, width=48), "meta")
    with pytest.raises(ValueError, match=r"2 ranks do not divide the 3 heads of blocks.0.attn.k"):
        split(model, get_tp_split(model), GRIDS["2d"])


def test_a_tensor_after_a_regions_input_is_refused() -> None:
    """It may have a row for each sequence, of which a rank has some."""
    model = models.build(tiny(layers=1), "meta")
    split(model, get_tp_split(model), GRIDS["2d"])
    block: Any = model.get_submodule("blocks.0.attn")
    with pytest.raises(ValueError, match=r"blocks.0.attn is given a tensor after its first argument"):
        block(torch.zeros(1, 2, 8), torch.zeros(1))


def test_fp8_gemms_are_refused_on_a_grid() -> None:
    with pytest.raises(ValueError, match=r"a rank of a grid sees a block .*tp_kind=3d"):
        grid_parallel.check_matmul_precision(Layout.parse(GRIDS["3d"]), "fp8")
    layout = Layout.parse("tp=2")
    tp_strategy(layout).check_matmul_precision(layout, "fp8")


def test_the_local_attention_context_is_computed_once_for_all_layers() -> None:
    model = models.build(tiny(layers=1), "meta")
    split(model, get_tp_split(model), GRIDS["2d"], rank=2)
    seen = AttentionContext(torch.arange(3 * 4).view(3, 4), torch.zeros(3, 4))
    given = []
    attn: Any = model.get_submodule("blocks.0.attn")
    attn.forward = lambda x, seen: given.append(seen)
    for _ in range(2):
        attn(torch.zeros(2, 4, 8), seen)
    assert given[0] is given[1]
    assert given[0].positions.tolist() == [[8, 9, 10, 11]] * 2, "the third sequence, and padding that repeats it"
    attn(torch.zeros(1, 4, 8), seen)
    assert given[2].positions.tolist() == [[4, 5, 6, 7]]


# -- what a rank holds and moves, beside the papers' formulas ----------------------------------------------------------

WIDTH, BATCH, LENGTH, BYTES = 32, 4, 8, 8
SHAPE = tiny("gpt", layers=1, width=WIDTH, kv_heads=4, ffn=4 * WIDTH, vocab=16)
"""as in the papers: queries, keys and values of all heads, and a feed-forward part of four times the width"""


@dataclass(frozen=True)
class Held:
    weights: dict[str, float]
    """share of each matrix that this rank holds"""
    saved: int
    """bytes of the activations that a block keeps for backward"""
    forward: Counter[str]
    """bytes by kind of collective, of a block"""
    backward: Counter[str]


def hold(text: str, recompute: str = "none") -> Held:
    """On a rank: one block there and back."""
    layout = Layout.parse(text).replace(recompute=recompute)
    parallel = apply(models.build(SHAPE, "meta", dtype=torch.float64), layout, float64())
    model: Any = parallel.model.train()
    parallel.rng_stream.samples = torch.arange(BATCH)
    inputs = batch_of(SHAPE, BATCH, LENGTH)
    seen = model.attention_context(inputs["tokens"])
    x = model.embed_inputs(inputs["tokens"], seen).detach().requires_grad_()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with CountCollectives() as there, saved_tensors_hooks(keep, lambda tensor: tensor):
        y = model.blocks[0](x, seen)
    saved = sum(kept.values())
    with CountCollectives() as back:
        y.backward(torch.ones_like(y))
    entries = parallel.placement.params.values()
    shares = {e.name: e.local_numel / torch.Size(e.shape).numel() for e in entries if len(e.shape) == 2}
    return Held(shares, saved, _bytes(there), _bytes(back))


def _bytes(counter: CountCollectives) -> Counter[str]:
    found: Counter[str] = Counter()
    for (kind, _, size), times in counter.seen.items():
        found[kind] += size * times
    return found


def test_a_rank_holds_and_moves_the_bytes_of_the_papers(pool: RankPool) -> None:
    """A block of width h with a feed-forward part of 4 h, on b sequences of s tokens.

    Weights: 1/q^2 of each matrix on a square and on its d layers, 1/p^3 on a cube. Activations: 1/(all ranks) of what
    one device keeps; only the statistics of norms, two numbers a token, are divided by tokens and not by columns.
    Moved on a square (Optimus, table 1): (7 b s h + 12 h^2) / q forward and twice that backward, where Tesseract has
    b / d. On a cube inputs and weights are gathered, outputs (9 b s h, the three of attention among them) scattered.
    """
    h, side = WIDTH, 2
    tokens, weights = BATCH * LENGTH * h * BYTES, 12 * h * h * BYTES
    statistics = 2 * 2 * BATCH * LENGTH * BYTES
    alone = pool.run(hold, 1, "dp=1")[0]
    for name, text in GRIDS.items():
        world = Layout.parse(text).world
        for held in pool.run(hold, world, text):
            matrices = {key: share for key, share in held.weights.items() if key != "positions.weight"}
            assert set(matrices.values()) == {1 / (8 if name == "3d" else 4)}, name
            assert held.saved == alone.saved / world + statistics * (side - 1) / world, name
            of_norms = statistics * side**2 // world  # each rank of a row has all of theirs
            if name == "3d":
                assert held.forward["all_gather"] == (7 * tokens + weights) // side**2 + of_norms
                assert held.forward["reduce_scatter"] == 9 * tokens // side**2
                assert held.backward["all_gather"] == (9 * tokens + 7 * tokens + weights) // side**2
                assert held.backward["reduce_scatter"] == (7 * tokens + weights) // side**2
            else:
                moved = (7 * tokens // (world // side**2) + weights) // side
                assert held.forward == {"broadcast": moved, "all_gather": of_norms}
                assert held.backward["broadcast"] == held.backward["reduce"] == moved


def test_recompute_ops_saves_less_and_communicates_the_same(pool: RankPool) -> None:
    whole, less = (pool.run(hold, 4, GRIDS["2d"], recompute)[0] for recompute in ("none", "ops"))
    assert less.saved < 0.8 * whole.saved
    assert (less.forward, less.backward) == (whole.forward, whole.backward)


# -- beside training --------------------------------------------------------------------------------------------------


def text_logits(layout: str) -> tuple[Tensor, float | None]:
    """On a rank: what is said to come after a sequence, and the loss of an evaluation."""
    shape = tiny(dropout=0.1)
    engine = engine_of(shape, layout)
    tokens = batch_of(shape, 1, 7)["tokens"]
    engine.model.eval()
    with torch.no_grad(), engine.non_layer_params_unsharded():
        found = engine.next_token_logits(tokens, shape.vocab)
    return found, engine.evaluate(engine.microbatches(batch_of(shape, 4 * Layout.parse(layout).dp, seed=3)))


@pytest.mark.parametrize(
    "layout", [GRIDS["2d"], GRIDS["3d"], f"{GRIDS['2d']},pp=2,accumulate=1", f"dp=2,{GRIDS['2d']},zero=3"]
)
def test_generation_and_evaluation_equal_one_device(pool: RankPool, layout: str) -> None:
    shape = tiny(dropout=0.1)
    model: Any = one_device(shape).eval()
    with torch.no_grad():
        truth = model.logits(batch_of(shape, 1, 7)["tokens"])[0, -1]
        total, count = model(**batch_of(shape, 4 * Layout.parse(layout).dp, seed=3))
    for logits, loss in pool.run(text_logits, Layout.parse(layout).world, layout):
        torch.testing.assert_close(logits, truth, rtol=1e-12, atol=1e-12)
        assert loss == pytest.approx(float(total / count), rel=1e-12)
