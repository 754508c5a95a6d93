"""Windows, capped scores, sinks and own scales: on one device against the formula, over ranks against one device."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from counting import CountCollectives
from torch import Tensor, nn

from echelon.kernels.attention import blockwise_attention
from echelon.kernels.attention.blockwise_attention import ScoreOptions, attend, attend_backward
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout, Mesh
from echelon.models.attention import AttentionContext, CoreAttention
from echelon.parallel.comm.mesh_axis import MeshAxes
from echelon.parallel.cp import cost
from echelon.parallel.cp.cp_attention import MaskSpec
from echelon.parallel.cp.window_attention import WindowAttention
from echelon.parallel.cp.zigzag import ZigzagOrder
from echelon.verification.verifier import verify

LENGTH, HEADS, KV_HEADS, HEAD_DIM = 37, 4, 2, 4
ALL = ScoreOptions(scale=0.9, softcap=1.5, window=7)


def formula(q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions, sinks: Tensor | None) -> Tensor:
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (options.scale or HEAD_DIM**-0.5)
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    visible = (distance >= 0) & (distance < (options.window or LENGTH))
    weights = scores.exp() * visible
    total = weights.sum(-1, keepdim=True)
    return weights / (total if sinks is None else total + sinks.exp()[:, None, None]) @ v


def tensors() -> list[Tensor]:
    source = torch.Generator().manual_seed(3)
    shapes = [(2, heads, LENGTH, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=source, dtype=torch.float64).requires_grad_() for shape in (*shapes, (HEADS,))]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("options", [ALL, ScoreOptions(window=1), ScoreOptions(softcap=2.0), ScoreOptions(scale=0.3)])
def test_the_core_computes_the_formula(options: ScoreOptions, with_sinks: bool) -> None:
    *qkv, sinks = tensors()
    context = AttentionContext(torch.arange(LENGTH)[None])
    given = sinks if with_sinks else None
    found = CoreAttention(scores=options)(*qkv, context, sinks=given)
    close(found, formula(*qkv, options, given))


@pytest.mark.parametrize("rows", [3, 128])
def test_a_block_far_from_its_keys(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries 20 to 36 and the keys of 8 to 29, in chunks that read only keys in their window; caps in backward."""
    monkeypatch.setattr(blockwise_attention, "MIN_WINDOW_ROWS", rows)
    q, k, v, _ = (x.detach() for x in tensors())
    q, k, v = q[:, :, 20:], k[:, :, 8:30].clone().requires_grad_(), v[:, :, 8:30].clone().requires_grad_()
    q.requires_grad_()
    distance = 12 + torch.arange(17)[:, None] - torch.arange(22)
    scores = 1.5 * torch.tanh(q @ k.repeat_interleave(2, 1).transpose(2, 3) * 0.9 / 1.5)
    scores = scores.masked_fill((distance < 0) | (distance >= 9), float("-inf"))
    weights = scores.softmax(-1).nan_to_num()
    expected = weights @ v.repeat_interleave(2, 1)
    options = {"causal": True, "scores": ScoreOptions(scale=0.9, softcap=1.5, window=9), "shift": 12}
    out, lse = attend(q, k, v, **options)
    close(out, expected.detach())
    close(lse, scores.logsumexp(-1).detach())
    g = torch.randn(out.shape, dtype=torch.float64)
    wanted = torch.autograd.grad((expected * g).sum(), (q, k, v))
    for gradient, other in zip(attend_backward(g, q, k, v, out, lse, **options), wanted, strict=True):
        close(gradient, other)


@pytest.mark.parametrize("window", [1, 2, 5, 6, 7, 13, 25, 40])
@pytest.mark.parametrize("ring", [1, 2, 3, 4])
def test_every_pair_in_the_window_is_in_one_block(ring: int, window: int) -> None:
    order = ZigzagOrder(ring, 1, LENGTH)
    for rank in range(ring):
        queries = order.ring_positions(rank)
        expected = {(i, j) for i in queries for j in range(max(i - window + 1, 0), i + 1)}
        seen: list[tuple[int, int]] = []
        for other in range(ring):
            keys, hull = order.ring_positions(other), order.window_keys(rank, other, window)
            for block in order.window_blocks(rank, other, window):
                assert hull.start <= block.keys.start < block.keys.stop <= hull.stop
                for a, i in enumerate(queries[block.queries]):
                    for b, j in enumerate(keys[block.keys]):
                        assert i - j == block.shift + a - b
                        if not (block.causal and j > i) and (block.window is None or i - j < block.window):
                            seen.append((i, j))
        assert sorted(seen) == sorted(expected)
        gathered = [
            (i, j)
            for block in order.gathered_blocks(rank, causal=True, window=window)
            for a, i in enumerate(queries[block.queries])
            for b, j in enumerate(range(block.keys.start, block.keys.stop))
            if block.shift + a - b >= 0 and block.shift + a - b < window
        ]
        assert sorted(gathered) == sorted(expected)


def send_windows(ranks: int, window: int) -> Counter[int]:
    """On a rank: how many messages of how many bytes attention under a window sends, forward and backward."""
    axes = MeshAxes(Mesh(Layout(cp=ranks)), dist.get_rank(), ["cp"])
    order = ZigzagOrder(ranks, 1, 64)
    mine = torch.tensor(order.rank_positions(dist.get_rank()))
    q, k, v = (
        torch.ones(1, heads, len(mine), HEAD_DIM, dtype=torch.bfloat16, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    attention = WindowAttention(axes["cp"], order, window=window, device=torch.device("cpu"))
    with CountCollectives() as counter:
        attention.attend(q, k, v, MaskSpec(query_positions=mine, length=64, documents=None)).sum().backward()
    return Counter({size: n for (kind, _, size), n in counter.seen.items() if kind == "send"})


@pytest.mark.parametrize("window", [5, 8, 12])
def test_only_keys_in_reach_are_sent(window: int, pool: RankPool) -> None:
    """Chunks of 8 tokens on 4 ranks: under a window of 8 a rank sends each neighbour one chunk, whatever the ring."""
    layout, chunk = Layout.parse("cp=4"), 2 * 8 * KV_HEADS * HEAD_DIM * 2
    widths = cost.AttentionWidths(queries=HEADS * HEAD_DIM, keys_and_values=2 * KV_HEADS * HEAD_DIM, kv_heads=KV_HEADS)
    for rank, sent in enumerate(pool.run(send_windows, 4, 4, window)):
        given = {"layers": 1, "batch": 1, "seq_len": 64, "element_bytes": 2, "window": window, "ring_index": rank}
        predicted = sum(c.bytes * c.count for c in cost.collectives(layout, widths, **given))  # type: ignore[arg-type]
        assert sum(size * n for size, n in sent.items()) == predicted
        if window <= 9:
            assert sent == Counter({chunk: 3 * (1 + (0 < rank < 3))})


# -- over ranks -------------------------------------------------------------------------------------------------------


class TwoKinds(nn.Module):
    """A layer with a window, a cap and sinks, and one with a cap alone; packed documents, and dropout in training."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.where = nn.Embedding(31, 16), nn.Embedding(64, 16)
        self.qkv, self.out = nn.ModuleList(nn.Linear(16, 32) for _ in range(3)), nn.Linear(16, 31)
        self.sinks = nn.Parameter(torch.linspace(-1, 1, HEADS))
        kinds = (ALL, ScoreOptions(softcap=2.0), ScoreOptions(window=15, scale=0.2))
        self.cores = nn.ModuleList(CoreAttention(0.1 * i, scores) for i, scores in enumerate(kinds))

    def forward(
        self, tokens: Tensor, labels: Tensor, documents: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if positions is None:
            positions = torch.arange(tokens.shape[1])[None]
        x = self.embed(tokens) + self.where(positions)
        for index, (qkv, core) in enumerate(zip(self.qkv, self.cores, strict=True)):
            q, k, v = qkv(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
            y = core(q, k, v, AttentionContext(positions, documents), sinks=None if index == 1 else self.sinks)
            x = x + y.transpose(1, 2).flatten(2)
        losses = nn.functional.cross_entropy(
            self.out(x).flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100
        )
        return losses, (labels != -100).sum()


def two_kinds() -> TwoKinds:
    return TwoKinds()


def packed_batch(rows: int, seed: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, 31, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    documents = (torch.arange(LENGTH) // 14).expand(rows, -1)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "documents": documents}


LAYOUTS = (
    *("cp=2", "cp=3", "cp=3,cp_kind=gather", "cp=2,cp_kind=ulysses", "cp=4,cp_kind=ring-ulysses,ulysses=2"),
    "dp=2,cp=2,zero=3",
)


def test_every_kind_equals_one_device(pool: RankPool) -> None:
    report = verify(two_kinds, "; ".join(LAYOUTS), batch=packed_batch, pool=pool, steps=2)
    assert report.passed, [verdict.trouble or verdict.first_difference for verdict in report.verdicts]
