"""Tokens on their way to experts: what is held, what runs beside the messages, and what dropout drops."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from live_tensor_bytes import LivingBytes
from torch import Tensor, nn

from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout, Mesh
from echelon.moe import build_gate
from echelon.moe.experts import Experts
from echelon.moe.moe_layer import MoELayer
from echelon.parallel.comm.mesh_axis import MeshAxes, MeshAxis, PendingWork
from echelon.parallel.ep.cost import MAX_LOAD_FACTOR
from echelon.parallel.ep.token_dispatch import AllToAllTokenDispatcher

WIDTH, FFN, EXPERTS, TOKENS = 64, 96, 8, 500
LAYOUT = "dp=4,ep=4"


def spread(layout: str, *, crowded: bool, shared: nn.Module | None = None, k: int = 1) -> MoELayer:
    """On a rank: a layer of which this rank has some of the experts. Crowded: every token wants the second one."""
    torch.manual_seed(0)
    parsed = Layout.parse(layout)
    gate = build_gate("loss-free", WIDTH, EXPERTS, k)
    if crowded:
        gate.bias[1] = 1e6
    experts = Experts(EXPERTS // parsed.ep, WIDTH, FFN // parsed.etp)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    mixture = MoELayer(gate, experts, shared)
    axes = MeshAxes(Mesh(parsed), dist.get_rank(), ["tp"])
    mixture.dispatcher = AllToAllTokenDispatcher(parsed, axes, None, None, experts=EXPERTS)
    return mixture


def peak(ceiling: float, crowded: bool) -> tuple[int, int, int]:
    """On a rank: bytes that a layer's forward and backward have at most; the most rows at a time; their limit."""
    mixture = spread(LAYOUT, crowded=crowded)
    assert isinstance(mixture.dispatcher, AllToAllTokenDispatcher)
    mixture.dispatcher.max_load_factor = ceiling
    rows = [0]
    compute = mixture.experts.apply_weights

    def watched(x: Tensor, *others: Tensor | None) -> Tensor:
        rows.append(len(x))
        return compute(x, *others)

    mixture.experts.apply_weights = watched  # type: ignore[method-assign, assignment]
    x = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    with LivingBytes() as living:
        y, _ = mixture(x)
        y.square().sum().backward()
        del y
    return living.peak, max(rows), mixture.dispatcher.max_tokens_at_once(mixture, TOKENS)


def stated(rows: float, k: int = 1) -> float:
    """Bytes of these tokens: received and permuted, saved by experts, their gradients, and the tokens at home."""
    here = rows * (4 * WIDTH + 2 * 3 * FFN)
    home = k * TOKENS * 8 * WIDTH
    weights = 2 * EXPERTS / 4 * 3 * WIDTH * FFN
    return 4 * (here + home + weights)


def test_one_expert_that_gets_every_token_stays_below_the_limit(pool: RankPool) -> None:
    found = pool.run(peak, 4, MAX_LOAD_FACTOR, True)
    for size, rows, limit in found:
        assert limit == MAX_LOAD_FACTOR * TOKENS
        assert rows <= limit
        assert size <= stated(limit)
    assert max(rows for _, rows, _ in found) == MAX_LOAD_FACTOR * TOKENS  # it did get them all, in two rounds
    assert max(size for size, _, _ in found) > 0.8 * stated(MAX_LOAD_FACTOR * TOKENS)


def test_without_a_limit_the_same_load_takes_more_memory(pool: RankPool) -> None:
    found = pool.run(peak, 4, 1e6, True)
    assert max(rows for _, rows, _ in found) == 4 * TOKENS
    assert max(size for size, _, _ in found) > 1.1 * stated(MAX_LOAD_FACTOR * TOKENS)


def rows_by_nodes(layout: str) -> tuple[int, int]:
    """On a rank: bytes that a layer whose tokens want four experts has at most, and the rows that it is given."""
    mixture = spread(layout, crowded=False, k=4)
    x = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    with LivingBytes() as living:
        y, _ = mixture(x)
        y.square().sum().backward()
        del y
    assert isinstance(mixture.dispatcher, AllToAllTokenDispatcher)
    return living.peak, mixture.dispatcher.max_tokens_at_once(mixture, TOKENS)


def test_hierarchical_all_to_all_holds_tokens_of_its_node_alone(pool: RankPool) -> None:
    """They held one for every expert of a token, wherever it was: as many times too many as there are nodes."""
    straight, hops = (pool.run(rows_by_nodes, 8, f"dp=8,ep=8{inner}") for inner in ("", ",ep_inner=2"))
    assert max(size for size, _ in hops) < 1.5 * max(size for size, _ in straight)
    assert max(size for size, _ in hops) < stated(hops[0][1], k=4)


def uneven(layout: str) -> float:
    """On a rank: what comes out where ranks have different numbers of tokens, all of which want one expert."""
    mixture = spread(layout, crowded=True)
    x = torch.randn(1, TOKENS if dist.get_rank() else 3, WIDTH, requires_grad=True)
    y, _ = mixture(x)
    y.square().sum().backward()
    return float(y.detach().abs().sum())


def test_ranks_with_few_tokens_use_the_same_number_of_chunks(pool: RankPool) -> None:
    """They did not: each had a limit of its own."""
    assert all(value > 0 for value in pool.run(uneven, 4, LAYOUT))


# -- beside the shared expert -----------------------------------------------------------------------------------------


class Noted(nn.Linear):
    """Says when it is computed, forward and backward."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.events = events

    def forward(self, x: Tensor) -> Tensor:
        self.events.append("shared")
        out = super().forward(x)
        out.register_hook(lambda _: self.events.append("shared"))
        return out


def order_of_events(layout: str) -> list[str]:
    """On a rank: beginnings and ends of messages of rows, and what the shared expert does."""
    events: list[str] = []
    mixture = spread(layout, crowded=False, shared=Noted(events))

    class Waiting:
        def __init__(self, pending: PendingWork):
            self.pending = pending

        def wait(self) -> None:
            events.append("end")
            self.pending.wait()

    start = MeshAxis.start_all_to_all

    def noted(self: MeshAxis, received: Tensor, *others: object) -> Waiting:
        if received.is_floating_point() and received.shape[1:] == (WIDTH,):
            events.append("begin")
            return Waiting(start(self, received, *others))
        return start(self, received, *others)  # type: ignore[return-value]

    MeshAxis.start_all_to_all = noted  # type: ignore[method-assign, assignment]
    try:
        y, _ = mixture(torch.randn(1, TOKENS, WIDTH, requires_grad=True))
        events.append("backward")
        y.square().sum().backward()
    finally:
        MeshAxis.start_all_to_all = start  # type: ignore[method-assign]
    return events


@pytest.mark.parametrize("layout", ["dp=2,ep=2", "dp=4,ep=4,ep_inner=2"])
def test_all_to_alls_overlap_the_shared_expert(pool: RankPool, layout: str) -> None:
    """In forward the first message, in backward the last."""
    near = ["begin", "end"] * (2 if "inner" in layout else 0)
    forward = ["begin", "shared", "end", *near, "begin", "end"]
    for events in pool.run(order_of_events, Layout.parse(layout).world, layout):
        assert events == [
            *forward,
            "backward",
            *reversed([{"begin": "end", "end": "begin"}.get(e, e) for e in forward]),
        ]
