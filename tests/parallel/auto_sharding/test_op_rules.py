"""The strategies that rules offer for one operator, and those that they must not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from traced_operators import SQUARE, Operators, classes, images, inputs

from echelon.models.traced.graph_model import make_traceable
from echelon.models.traced.traced_graph import CALL
from echelon.parallel.auto_sharding.op_rules import op_flops, shardable_ops
from echelon.parallel.auto_sharding.shape_rules import view_groups
from echelon.parallel.auto_sharding.sharding import Strategy


def offered(op: str, function: Callable[[Any, Tensor, Tensor], Any], **shapes: tuple[int, ...]) -> set[str]:
    """The strategies of the first operator of a kind, over two ranks, as "S0 B -> S0"."""
    graph = make_traceable(Operators(function, **shapes), inputs()).graph_of(inputs(), training=True)
    ops = shardable_ops(graph, 2)
    first = next(number for number, each in enumerate(graph.ops) if each.kind == CALL and each.op == op)
    return {text(strategy) for strategy in ops[first].strategies}


def text(strategy: Strategy) -> str:
    return f"{' '.join(map(str, strategy.inputs))} -> {strategy.output}"


def test_a_linear_is_column_or_row_parallel_or_sharded_over_tokens() -> None:
    found = offered("linear", lambda m, x, ids: F.linear(F.linear(x, m.w), m.w, m.b), **SQUARE, b=(16,))
    # Its first input is no result of a parameter: what would be B is R.
    assert {"R S0 -> S2", "R S0/2 -> S2/2", "S2 S1 -> P", "S0 B -> S0", "S1 B -> S1"} <= found
    biased = offered("linear", lambda m, x, ids: F.linear(x, m.w, m.b), **SQUARE, b=(16,))
    assert {"R S0 S0 -> S2", "S2 S1 R -> P", "S1 B B -> S1"} <= biased
    assert "P B B -> P" not in biased


def test_a_nonlinear_operator_takes_no_partial_sum() -> None:
    for op, function in (("gelu", F.gelu), ("softmax", lambda y: y.softmax(-1)), ("pow", lambda y: y.pow(2))):
        found = offered(op, lambda m, x, ids, f=function: f(x * m.w), w=(16,))
        assert not any("P" in states for states in found), op
        assert "S1 -> S1" in found
    assert "P -> P" in offered("sum", lambda m, x, ids: (x * m.w).sum(-1), w=(16,))
    # A tensor times itself is no linear function of it.
    assert not any("P" in states for states in offered("mul", lambda m, x, ids: m.w * m.w, w=(16,)))


def test_only_zeros_are_padded_to_partial_sums() -> None:
    def padded(value: float, mode: str = "constant") -> set[str]:
        return offered("pad", lambda m, x, ids: F.pad(x @ m.w, (1, 1), mode=mode, value=value or None), **SQUARE)

    assert {"P -> P", "S0 -> S0", "S1 -> S1"} <= padded(0.0)
    assert padded(0.0) - padded(2.0) == {"P -> P"}
    assert "P -> P" in padded(0.0, "reflect")
    assert not any(states.startswith("S2") for states in padded(0.0))


def test_causal_attention_is_not_divided_over_queries() -> None:
    def attention(causal: bool) -> set[str]:
        def function(m: Any, x: Tensor, ids: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x * m.q, x * m.k, x, is_causal=causal)

        return offered("scaled_dot_product_attention", function, q=(16,), k=(16,))

    assert "S1 B R -> S1" in attention(False)
    assert attention(True) == attention(False) - {"S1 B R -> S1"}
    assert "S0 S0 S0 -> S0" in attention(True)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("plain", lambda m, x, ids: F.cross_entropy(classes(m, x), ids.flatten(), reduction="sum")),
        ("probabilities", lambda m, x, ids: F.cross_entropy(classes(m, x), x.flatten(0, 1).softmax(-1))),
        ("smoothed", lambda m, x, ids: F.cross_entropy(classes(m, x), ids.flatten(), label_smoothing=0.1)),
        ("ignored", lambda m, x, ids: F.cross_entropy(classes(m, x), ids.flatten(), ignore_index=3)),
    ],
)
def test_only_a_plain_loss_has_a_sharded_vocabulary(name: str, function: Any) -> None:
    found = offered("cross_entropy_loss", function, **SQUARE)
    assert ("S1 R -> R" in found) == (name == "plain")
    assert ("S0 S0 -> P" in found) == (name == "plain")


def test_a_lookup_that_counts_tokens_stays_whole() -> None:
    plain = offered("embedding", lambda m, x, ids: F.embedding(ids, m.w), **SQUARE)
    assert {"S0 R -> P", "S1 R -> S2", "B S1 -> S1"} <= plain
    counted = offered("embedding", lambda m, x, ids: F.embedding(ids, m.w, scale_grad_by_freq=True), **SQUARE)
    assert counted == {"R R -> R", "B R -> B"}


def test_one_image_has_no_dimension_of_images() -> None:
    def convolution(m: Any, x: Tensor, ids: Tensor) -> Tensor:
        return F.max_pool2d(F.conv2d(images(m, x)[0], m.c, padding=1), 3, 1, 1)

    for op in ("conv2d", "max_pool2d"):
        assert not any("S" in states for states in offered(op, convolution, w=(16,), c=(8, 8, 3, 3)))


def test_a_view_keeps_the_first_of_merged_dimensions() -> None:
    merged = offered("view", lambda m, x, ids: (x * m.w).view(32, 16), w=(16,))
    assert "S0 -> S0" in merged
    assert "S1 -> S0/4" in merged
    assert "S1 -> S0" not in merged
    split = offered("view", lambda m, x, ids: (x * m.w).view(4, 8, 2, 8), w=(16,))
    assert {"S2 -> S2", "S2/2 -> S3"} <= split
    assert "S2 -> S3" not in split
    assert offered("view", lambda m, x, ids: (x.view(torch.int64), m.w), w=(16,)) == {"R -> R"}


def test_view_groups_are_as_small_as_they_can_be() -> None:
    assert view_groups((4, 6, 5), (4, 2, 3, 5)) == [([0], [0]), ([1], [1, 2]), ([2], [3])]
    assert view_groups((4, 6), (24,)) == [([0, 1], [0])]
    assert view_groups((2, 3, 4), (6, 4)) == [([0, 1], [0]), ([2], [1])]
    assert view_groups((4, 6), (5, 5)) == []


def test_products_are_counted() -> None:
    """Two FLOPs for each multiplication."""
    model = Operators(
        lambda m, x, ids: (F.linear(x, m.w), torch.einsum("bti,io->bto", x, m.w), F.conv1d(x, m.c), x @ x.mT),
        **SQUARE,
        c=(4, 8, 3),
    )
    graph = make_traceable(model, inputs()).graph_of(inputs(), training=True)
    found = {op.op: op_flops(op, [graph.ops[i] for i in op.inputs]) for op in graph.ops if op.kind == CALL}
    tokens = 4 * 8
    assert found["linear"] == found["einsum"] == 2 * tokens * 16 * 16
    assert found["conv1d"] == 2 * 4 * 4 * 14 * 8 * 3
    assert found["matmul"] == 2 * 4 * 8 * 8 * 16
