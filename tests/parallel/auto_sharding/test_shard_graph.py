"""Splits derived of traced modules: Megatron-LM's where that is best, the same on every rank, overridden by states."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import traced_modules
from torch import Tensor, nn
from traced_modules import PlainGPT, PlainLlama, build

from echelon.layout import ValidationError
from echelon.models.traced.graph_model import EXAMPLE_ROWS, make_traceable, with_rows
from echelon.models.traced.traced_graph import PARAM
from echelon.parallel.auto_sharding.shard_graph import ModuleSplit, find_repeats, reference_link, split_module
from echelon.parallel.auto_sharding.sharding import REPLICATE, ShardableOp, Sharding, Strategy, shard
from echelon.parallel.auto_sharding.solve_sharding import solve

LENGTH, ROWS = 1024, 2
MEGATRON: dict[str, Sharding] = {
    **dict.fromkeys(("qkv", "q", "k", "v", "up", "gate_up", "embed", "head"), shard(0)),
    **dict.fromkeys(("out", "o", "down"), shard(1)),
}
"""the dimension of each weight that Megatron-LM shards"""


@cache
def wide(family: str, width: int) -> Any:
    """A model of two layers on the meta device, in bfloat16."""
    sizes = {"WIDTH": width, "LENGTH": LENGTH, "HEADS": width // 64, "VOCAB": 32768}
    before = {name: getattr(traced_modules, name) for name in sizes}
    vars(traced_modules).update(sizes)
    try:
        with torch.device("meta"):
            model = PlainGPT(vocab=32768) if family == "gpt" else PlainLlama()
        if family == "llama":
            model.rates = torch.zeros(32)
        batch = {key: torch.zeros(ROWS, LENGTH, dtype=torch.long) for key in ("tokens", "targets")}
        traced = make_traceable(model, batch)
        traced.retype(torch.bfloat16)
        traced.example_graph()
        # One more row shows what varies with the batch; traced later, it would have the number of heads of other tests.
        traced.graph_of(with_rows(traced.example_inputs, EXAMPLE_ROWS + 1), training=True)
        return traced
    finally:
        vars(traced_modules).update(before)


@cache
def split_of(family: str, width: int, size: int) -> ModuleSplit:
    return split_module(wide(family, width), size)


def by_hand(split: ModuleSplit) -> dict[int, Sharding]:
    """Megatron-LM's states of the weights of linears, by position."""
    fixed = {}
    for position, op in enumerate(split.problem.ops):
        word = op.param.removesuffix(".weight").rpartition(".")[2]
        # A tied weight is one parameter; biases follow.
        if op.param.endswith(".weight") and word in MEGATRON and len(op.shape) == 2:
            fixed[position] = MEGATRON[word]
    return fixed


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize(("family", "width"), [("gpt", 1024), ("gpt", 4096), ("llama", 1024), ("llama", 4096)])
def test_a_derived_split_is_megatrons_or_cheaper(family: str, width: int, size: int) -> None:
    split = split_of(family, width, size)
    fixed = by_hand(split)
    assert len(fixed) == (2 * 4 + 1 if family == "gpt" else 2 * 6 + 2)
    hand = solve(split.problem, split.link, fixed=fixed)
    assert split.solution.optimal
    assert split.solution.cost.total <= hand.cost.total * (1 + 1e-9)
    weights = [op.param for op in split.problem.ops if op.param and len(op.shape) == 2 and op.shape[0] >= width]
    assert len(weights) >= 9
    for name in weights:
        assert split.param_states[name].kind == "S", name
    # By columns, then by rows, in attention and in the MLP.
    linears = ("qkv", "out", "up", "down") if family == "gpt" else ("q", "k", "v", "o", "gate_up", "down")
    assert sharded_dims(split) == {word: {MEGATRON[word].dim} for word in linears}
    cores = [strategy for op, strategy in strategies(split) if op.op in ("scaled_dot_product_attention", "softmax")]
    assert [strategy.output for strategy in cores] == [shard(1)] * 2  # heads


def strategies(split: ModuleSplit) -> list[tuple[ShardableOp, Strategy]]:
    return list(zip(split.problem.ops, split.strategies, strict=True))


def sharded_dims(split: ModuleSplit) -> dict[str, set[int]]:
    """The dimension of each linear's weight that its ranks read a slice of, by the last word of its name."""
    found: dict[str, set[int]] = {}
    for op, strategy in strategies(split):
        if op.op == "linear" and "." in op.name:
            found.setdefault(op.name.rpartition(".")[2], set()).add(strategy.inputs[1].dim)
    return found


def test_equal_layers_share_a_split() -> None:
    split = split_of("llama", 1024, 2)
    assert split.problem.num_layers == 2
    first = {name: state for name, state in split.param_states.items() if name.startswith("layers.0.")}
    assert first == {
        name.replace("layers.1.", "layers.0."): state
        for name, state in split.param_states.items()
        if name.startswith("layers.1.")
    }
    graph = wide("llama", 1024).example_graph()
    repeats = find_repeats(graph, split.problem.ops)
    assert all(
        graph.ops[earlier].name.replace(".0.", ".1.") == graph.ops[number].name for number, earlier in repeats.items()
    )
    # A parameter that both layers read is none of either.
    assert {graph.ops[i].name for i in repeats if graph.ops[i].kind == PARAM} == {
        name for name in split.param_states if name.startswith("layers.1.")
    }


def test_a_split_is_the_same_every_time() -> None:
    splits = []
    for step in range(2):
        model, batch = build("two-tower")
        splits.append(split_module(make_traceable(model, batch(4, step)), 4))
    assert splits[0].strategies == splits[1].strategies


def test_rows_of_a_batch_are_never_sharded() -> None:
    """That is data parallelism's, and dropouts draw by rows."""
    for name in ("gpt", "u-net"):
        model, batch = build(name)
        split = split_module(make_traceable(model, batch(4, 0)), 2)
        graph = model.example_graph()
        rows = {
            index
            for index, op in enumerate(graph.ops)
            if op.kind not in ("param", "buffer") and op.shape[:1] == (EXAMPLE_ROWS,)
        }
        assert rows
        legal = {graph.ops[i].name: {strategy.output for strategy in split.problem.ops[i].strategies} for i in rows}
        assert [name for name, states in legal.items() if shard(0) in states] == []


def test_without_sequence_parallelism_activations_are_whole_between_layers() -> None:
    model, batch = build("gpt")
    traced = make_traceable(model, batch(4, 0))
    split, graph = split_module(traced, 2, sequence_parallel=False), traced.example_graph()
    for segment in graph.segments:
        assert {split.strategies[index].output for index in segment.gives} == {REPLICATE}
    scattered = split_module(traced, 2)
    assert {scattered.strategies[i].output.kind for segment in graph.segments for i in segment.gives} != {"R"}


def test_states_of_the_attribute_split_override() -> None:
    model, batch = build("gpt")
    model.split = {"blocks.*.up.weight": "R", "blocks.*.qkv.weight": "S0"}
    states = split_module(make_traceable(model, batch(4, 0)), 2).param_states
    assert {str(states[f"blocks.{i}.up.weight"]) for i in (0, 1)} == {"R"}
    assert {str(states[f"blocks.{i}.qkv.weight"]) for i in (0, 1)} == {"S0"}
    model.split = {"blocks.*.upp.weight": "S0"}
    with pytest.raises(ValidationError, match=r"blocks\.\*\.upp\.weight.*matches no operator"):
        split_module(model, 2)


class Narrow(nn.Module):
    """Nothing that two ranks could divide."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum()


def test_what_the_ranks_do_not_divide_stays_whole() -> None:
    split = split_module(make_traceable(Narrow(), {"x": torch.zeros(3, 7)}), 2)
    assert {state.kind for state in split.param_states.values()} <= {"R", "B"}


def test_convolutions_count_as_products() -> None:
    """Of a narrow model without a linear, too, sharding must be worth something."""
    model, batch = build("u-net")
    traced = make_traceable(model, batch(4, 0))
    assert (
        reference_link(traced.example_graph(), 2).bandwidth
        > reference_link(wide("gpt", 4096).example_graph(), 2).bandwidth
    )
    states = split_module(traced, 2).param_states
    whole = {name for name, state in states.items() if name.endswith("weight") and state.kind != "S"}
    assert whole <= {"down.0.conv1.weight", "down.0.norm1.weight"}
