"""Who holds which tokens of a sequence, and that everybody sees as much."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.parallel.cp.zigzag import AttentionBlock, ZigzagOrder

ORDERS = st.builds(ZigzagOrder, st.integers(1, 8), st.integers(1, 6), st.integers(1, 200))


@given(ORDERS)
def test_every_token_is_held_once(order: ZigzagOrder) -> None:
    ranks = order.ring_size * order.ulysses_size
    held = [order.rank_positions(rank) for rank in range(ranks)]
    assert len({len(places) for places in held}) == 1
    assert sorted(place for places in held for place in places) == list(range(order.padded_len))
    assert order.seq_len <= order.padded_len < order.seq_len + 2 * ranks


@given(ORDERS)
def test_neighbours_divide_what_their_group_holds(order: ZigzagOrder) -> None:
    for ring in range(order.ring_size):
        members = [order.rank_positions(ring * order.ulysses_size + inner) for inner in range(order.ulysses_size)]
        assert [place for places in members for place in places] == order.ring_positions(ring)


def num_pairs(block: AttentionBlock) -> int:
    """Return the query-key pairs of a block."""
    queries: int = block.queries.stop - block.queries.start
    keys: int = block.keys.stop - block.keys.start
    return queries * (queries + 1) // 2 if block.causal else queries * keys


def pairs(block: AttentionBlock, queries: list[int], keys: list[int]) -> set[tuple[int, int]]:
    rows, columns = queries[block.queries], keys[block.keys]
    return {(q, k) for i, q in enumerate(rows) for j, k in enumerate(columns) if not block.causal or j <= i}


@given(st.integers(1, 5), st.integers(1, 40), st.booleans())
def test_blocks_cover_the_causal_mask(ring: int, length: int, causal: bool) -> None:
    """Around the ring, and of the whole sequence at once: each pair of tokens that may see each other, once."""
    order = ZigzagOrder(ring, 1, length)
    for mine in range(ring):
        queries = order.ring_positions(mine)
        wanted = {(q, k) for q in queries for k in range(order.padded_len) if k <= q or not causal}
        around = [
            pair
            for theirs in range(ring)
            for pair in pairs(order.block(mine, theirs, causal=causal), queries, order.ring_positions(theirs))
        ]
        at_once = [
            pair
            for block in order.gathered_blocks(mine, causal=causal)
            for pair in pairs(block, queries, list(range(order.padded_len)))
        ]
        assert sorted(around) == sorted(at_once) == sorted(wanted)


def test_pairs_are_counted() -> None:
    assert num_pairs(AttentionBlock(slice(0, 4), slice(0, 3), False)) == 12
    assert num_pairs(AttentionBlock(slice(2, 5), slice(2, 5), True)) == 6


@pytest.mark.parametrize("ring", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("length", [37, 512, 32768])
def test_the_busiest_rank_does_little_more_than_the_mean(ring: int, length: int) -> None:
    """The bar is 1.05; in chunks of the sequence's order the last rank would do nearly twice the mean."""
    order = ZigzagOrder(ring, 1, length)
    work = [sum(num_pairs(order.block(m, t, causal=True)) for t in range(ring)) for m in range(ring)]
    at_once = [sum(num_pairs(block) for block in order.gathered_blocks(m, causal=True)) for m in range(ring)]
    assert work == at_once
    assert max(work) <= 1.05 * sum(work) / ring
    in_order = [sum(q + 1 for q in range(m * length // ring, (m + 1) * length // ring)) for m in range(ring)]
    assert max(in_order) > 1.3 * sum(in_order) / ring


@pytest.mark.parametrize("ring", [2, 4, 8])
def test_every_step_of_the_ring_is_balanced_over_ranks(ring: int) -> None:
    order = ZigzagOrder(ring, 1, 4096)
    for step in range(1, ring):
        assert len({num_pairs(order.block(mine, (mine - step) % ring, causal=True)) for mine in range(ring)}) == 1
