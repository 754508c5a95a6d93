"""The table of tensor splits: what it must say, and what it does to a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from echelon import models
from echelon.layout.placement import DimSplit, LogicalParam
from echelon.models import model_config
from echelon.models.tp_splits import get_tp_split
from echelon.parallel.comm.mesh_axis import MeshAxis
from echelon.parallel.tp import tensor_parallel
from echelon.parallel.transform_context import logical_params


class MLP(nn.Module):
    def __init__(self, width: int = 6, ffn: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, ffn), nn.Linear(ffn, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.mlp = nn.Embedding(9, 6), nn.LayerNorm(6), MLP()


TABLE = {"embed": "vocabulary", "norm": "sequence", "mlp": "region", "mlp.up": "column", "mlp.down": "row"}


def axis(size: int, index: int = 0) -> MeshAxis:
    return MeshAxis("tp", range(size), index, None, frozenset())


def split(
    model: nn.Module, table: dict[str, str], size: int, *, sp: bool = False, index: int = 0
) -> dict[str, LogicalParam]:
    found, _ = tensor_parallel.shard_modules(
        model, logical_params(model), table, axis(size, index), sequence_parallel=sp
    )
    return {entry.name: entry for entry in found}


def test_patterns_name_modules() -> None:
    assert tensor_parallel.match_roles(Model(), TABLE) == TABLE
    assert tensor_parallel.match_roles(Model(), {"mlp.*": "column"}) == {"mlp.up": "column", "mlp.down": "column"}


def test_a_later_pattern_overrides_an_earlier_one() -> None:
    assert tensor_parallel.match_roles(Model(), {"mlp.*": "column", "mlp.down": "row"})["mlp.down"] == "row"


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"mpl": "region"}, ["'mpl' matches no module of Model"]),
        ({"mlp": "regoin"}, ["'regoin' of 'mlp' is not one of region, column, column/heads, row"]),
        ({"mlp": "regoin", "mlp.gate": "column"}, ["'regoin'", "'mlp.gate' matches no module"]),
    ],
    ids=["no module", "no word", "both"],
)
def test_a_table_that_does_not_fit_is_refused_with_everything_wrong(table: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ValueError, match="does not fit the model") as error:
        split(Model(), table, 2)
    for word in words:
        assert word in str(error.value)


def test_a_refused_table_leaves_the_model_alone() -> None:
    model = Model()
    with pytest.raises(ValueError, match="does not fit"):
        split(model, {**TABLE, "nowhere": "row"}, 2)
    assert type(model.mlp.down) is nn.Linear
    assert not model.mlp._forward_pre_hooks


def test_a_model_without_a_table_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"requires inputs of the forward of Model.* or an attribute `split`.* or use tp=1"
    ):
        get_tp_split(Model())


def test_a_models_own_table_comes_first() -> None:
    model = Model()
    model.split = TABLE  # type: ignore[assignment]
    assert get_tp_split(model) == TABLE


@pytest.mark.parametrize(
    ("size", "words"),
    [(3, r"tp=3 does not divide the outputs of mlp.up \(8 of 1\)"), (5, "tp=5 does not divide the outputs of mlp.up")],
)
def test_a_degree_that_does_not_divide_is_refused(size: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        split(Model(), TABLE, size)


def test_inputs_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tp=3 does not divide the inputs of mlp.down \(8\)"):
        split(Model(), {"mlp.down": "row"}, 3)


def test_columns_are_cut_by_outputs_and_rows_by_inputs() -> None:
    entries = split(Model(), TABLE, 2)
    cuts = {name: entry.splits for name, entry in entries.items()}
    assert cuts == {
        "embed.weight": (DimSplit(axis="tp", dim=0, num_parts=2),),
        "norm.weight": (),
        "norm.bias": (),
        "mlp.up.weight": (DimSplit(axis="tp", dim=0, num_parts=2),),
        "mlp.up.bias": (DimSplit(axis="tp", dim=0, num_parts=2),),
        "mlp.down.weight": (DimSplit(axis="tp", dim=1, num_parts=2),),
        "mlp.down.bias": (),
    }
    assert not any(entry.partial_grad_axes for entry in entries.values())


def test_sequence_parallelism_needs_an_embedding_to_begin_at() -> None:
    with pytest.raises(ValueError, match=r'calls no module "vocabulary" \(sp=1\); use sp=0'):
        split(Model(), {"mlp": "region", "mlp.up": "column", "mlp.down": "row"}, 2, sp=True)


def test_under_sequence_parallelism_params_between_regions_have_partial_gradients() -> None:
    entries = split(Model(), TABLE, 2, sp=True)
    summed = {name for name, entry in entries.items() if entry.partial_grad_axes == ("tp",)}
    assert summed == {"norm.weight", "norm.bias", "mlp.down.bias"}


LLAMA = replace(model_config.find_model("llama-tiny"), layers=1)


@pytest.mark.parametrize(
    ("tp", "parts", "copies"), [(2, 2, 1), (4, 2, 2)], ids=["two heads on two ranks", "two heads on four ranks"]
)
def test_kv_heads_are_replicated_if_tp_is_a_multiple_of_them(tp: int, parts: int, copies: int) -> None:
    model = models.build(LLAMA, "meta")
    entries = split(model, get_tp_split(model), tp)
    for word in ("k", "v"):
        entry = entries[f"blocks.0.attn.{word}.weight"]
        assert entry.splits == (DimSplit(axis="tp", dim=0, num_parts=parts, num_copies=copies),)
        assert entry.partial_grad_axes == ((f"tp/{copies}",) if copies > 1 else ())
    assert entries["blocks.0.attn.q.weight"].splits == (DimSplit(axis="tp", dim=0, num_parts=tp),)


def test_heads_that_neither_divide_nor_are_divided_are_refused() -> None:
    model = models.build(replace(LLAMA, heads=6, kv_heads=3, width=48), "meta")
    with pytest.raises(ValueError, match=r"tp=2 does not divide the outputs of blocks.0.attn.k \(3 of 8\)"):
        split(model, get_tp_split(model), 2)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_weight_is_cut_once(tied: bool) -> None:
    model = models.build(replace(LLAMA, tied=tied), "meta")
    entries = split(model, get_tp_split(model), 2)
    assert ("head.weight" in entries) == (not tied)
    assert entries["embed.weight"].names == (("embed.weight", "head.weight") if tied else ("embed.weight",))
    assert entries["embed.weight"].local_shape == (129, 64)


@pytest.mark.parametrize("family", ["gpt-tiny", "llama-tiny"])
def test_every_matrix_of_our_models_is_divided(family: str) -> None:
    """What the table forgets would be held and computed whole on every rank."""
    model = models.build(replace(model_config.find_model(family), layers=1), "meta")
    whole = [e.name for e in split(model, get_tp_split(model), 2).values() if len(e.shape) == 2 and not e.splits]
    assert whole == (["positions.weight"] if family == "gpt-tiny" else [])


def test_dropout_masks_follow_the_local_part() -> None:
    class Windowed(nn.Module):
        window: dict[int, tuple[int, int]] = {}  # noqa: RUF012

        def forward(self, x: Tensor) -> Tensor:
            return x

    model = nn.Module()
    model.embed, model.heads, model.between = nn.Embedding(9, 6), Windowed(), Windowed()
    split(model, {"embed": "vocabulary", "heads": "heads", "between": "sequence"}, 4, sp=True, index=3)
    model.heads(torch.zeros(2, 5, 7))
    assert model.heads.window == {1: (15, 20)}
    model.between(torch.zeros(2, 9, 7))
    assert model.between.window == {1: (27, 36)}
