"""The overhead of ring attention on one GPU, without communication: all ranks' work, one after another.

    python bench/ring_attention.py --ranks 4 8
    python bench/ring_attention.py --ranks 8 --together 4

Zigzag: the sequence is 2 n chunks, and rank i holds chunks i and 2 n - 1 - i, so that every rank has the same to do.
Of its own keys a rank sees a causal square; of those of a rank before it, the first chunk, with all queries; of those
of a rank after it, both, with its second chunk of queries. The peer is one call of cuDNN's attention over the whole
sequence. Pairs are interleaved; the ratio is the median of the pairs'. Exits with 1 where forward+backward of causal
attention is above the bar.

    --together g    keys that came in g steps are attended to at once: fewer calls, and fewer parts of each row. A run
                    does not: a rank would wait for g messages where it now waits for one
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from echelon.kernels.attention import blockwise_attention

HEADS, HEAD_DIM = 32, 128
WARM_UP = 2
AHEAD = 8192
"""width of the matmuls that the GPU begins with, so that the program is ahead of it as it is in training"""
BAR = 1.10
TOLERANCE = 2e-2
"""of what is computed in bfloat16, relative to the largest"""
ALL = slice(None)

Heads = tuple[Tensor, Tensor, Tensor]
"""q, k and v"""


@dataclass(frozen=True, kw_only=True)
class Problem:
    length: int
    kv_heads: int
    causal: bool

    def inputs(self) -> tuple[Heads, Tensor]:
        """As a model has them: heads of one matmul, and the gradient of what the heads make, token by token."""
        widths = (HEADS, self.kv_heads, self.kv_heads)
        product = torch.randn(1, self.length, sum(widths), HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        q, k, v = product.transpose(1, 2).split(widths, dim=1)
        gradient = torch.randn(1, self.length, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        return (q, k, v), gradient.transpose(1, 2)


class Whole:
    """One call over the full sequence."""

    def __init__(self, problem: Problem, heads: Heads, gradient: Tensor):
        self.causal, self.gradient = problem.causal, gradient
        self.q, self.k, self.v = (x.detach().requires_grad_() for x in heads)

    def forward(self) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(self.q, self.k, self.v, is_causal=self.causal, enable_gqa=True)

    def both(self) -> tuple[Tensor, ...]:
        out = self.forward()
        return out, *torch.autograd.grad(out, (self.q, self.k, self.v), self.gradient)


class Ring:
    """The same in blocks, as `ranks` ranks would."""

    def __init__(self, problem: Problem, heads: Heads, gradient: Tensor, ranks: int, together: int = 1):
        self.causal, self.ranks, self.together = problem.causal, ranks, together
        self.half = problem.length // ranks // 2
        order = [chunk for rank in range(ranks) for chunk in (rank, 2 * ranks - 1 - rank)]
        self.order = torch.cat([torch.arange(c * self.half, (c + 1) * self.half) for c in order]).to("cuda")
        parts = [self.split(x) for x in (*heads, gradient)]
        self.local = list(zip(*parts, strict=True))

    def split(self, x: Tensor) -> list[Tensor]:
        """Each rank's rows, in memory token by token."""
        parts = x.transpose(1, 2).index_select(1, self.order).chunk(self.ranks, dim=1)
        return [part.contiguous().transpose(1, 2) for part in parts]

    def joined(self, parts: list[Tensor]) -> Tensor:
        """What `split` takes."""
        together = torch.cat(parts, dim=2)
        return torch.empty_like(together).index_copy_(2, self.order, together)

    def rounds(self) -> list[range]:
        """Steps whose keys are attended to at once: first its own, then `together` that came."""
        return [range(1), *(range(s, min(s + self.together, self.ranks)) for s in range(1, self.ranks, self.together))]

    def calls(self, rank: int, steps: range) -> Iterator[tuple[list[int], slice, slice, bool]]:
        """(whose keys, which rows see them, which keys are seen, causal)"""
        owners = [(rank - step) % self.ranks for step in steps]
        if owners == [rank] or not self.causal:
            yield owners, ALL, ALL, self.causal
            return
        before, after = [o for o in owners if o < rank], [o for o in owners if o > rank]
        if before:
            yield before, ALL, slice(0, self.half), False
        if after:
            yield after, slice(self.half, None), ALL, False

    def keys_of(self, owners: list[int], keys: slice) -> list[Tensor]:
        """k and v"""
        if len(owners) == 1:
            return [x[:, :, keys] for x in self.local[owners[0]][1:3]]
        parts = zip(*([x[:, :, keys].transpose(1, 2) for x in self.local[owner][1:3]] for owner in owners), strict=True)
        return [torch.cat(part, dim=1).transpose(1, 2) for part in parts]

    def forward(self) -> list[tuple[Tensor, Tensor]]:
        found = []
        for rank, (q, _, _, _) in enumerate(self.local):
            merged = blockwise_attention.AttentionMerger(q)
            for steps in self.rounds():
                for owners, rows, keys, causal in self.calls(rank, steps):
                    k, v = self.keys_of(owners, keys)
                    merged.add(rows, *blockwise_attention.attend(q[:, :, rows], k, v, causal=causal))
            found.append(merged.result())
        return found

    def both(self) -> tuple[list[Tensor], ...]:
        found = self.forward()
        queries = [blockwise_attention.GradientAccumulator(q) for q, _, _, _ in self.local]
        sums = [[blockwise_attention.GradientAccumulator(x) for x in heads[1:3]] for heads in self.local]
        for steps in self.rounds():
            for rank, ((q, _, _, gradient), (out, lse)) in enumerate(zip(self.local, found, strict=True)):
                for owners, rows, keys, causal in self.calls(rank, steps):
                    k, v = self.keys_of(owners, keys)
                    g, o, ls = (x[:, :, rows] for x in (gradient, out, lse))
                    dq, dk, dv = blockwise_attention.attend_backward(g, q[:, :, rows], k, v, o, ls, causal=causal)
                    queries[rank].add(rows, dq)
                    for index, owner in enumerate(owners):
                        for total, part in zip(sums[owner], (dk, dv), strict=True):
                            total.add(keys, part.chunk(len(owners), dim=2)[index])
        dks, dvs = ([totals[which].result() for totals in sums] for which in range(2))
        return [out for out, _ in found], [total.result() for total in queries], dks, dvs


def seconds(call: Callable[[], object], ahead: Tensor) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(4):
        ahead @ ahead
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


@dataclass(frozen=True, kw_only=True)
class Row:
    attention: str
    kv_heads: int
    ranks: int
    part: str
    whole_s: float
    ring_s: float
    ratio: float


def timed(whole: Callable[[], object], ring: Callable[[], object], pairs: int) -> tuple[float, float, float]:
    """(median seconds of each, median ratio)"""
    found = []
    ahead = torch.randn(AHEAD, AHEAD, device="cuda", dtype=torch.bfloat16)
    for index in range(-WARM_UP, pairs):
        sides = {"whole": whole, "ring": ring}
        order = ("whole", "ring") if index % 2 else ("ring", "whole")
        took = {name: seconds(sides[name], ahead) for name in order}
        if index >= 0:
            found.append((took["whole"], took["ring"]))
    wholes, rings = zip(*found, strict=True)
    return statistics.median(wholes), statistics.median(rings), statistics.median(b / a for a, b in found)


def check(whole: Whole, ring: Ring) -> None:
    for name, one, parts in zip(("out", "dq", "dk", "dv"), whole.both(), ring.both(), strict=True):
        error = (ring.joined(parts).float() - one.float()).abs().max() / one.float().abs().max()
        if not error < TOLERANCE:
            raise SystemExit(f"{name} of the ring differs from the whole's ({float(error):.1e} of the largest)")


def rows_of(problem: Problem, asked: argparse.Namespace) -> Iterator[Row]:
    torch.manual_seed(0)
    heads, gradient = problem.inputs()
    whole = Whole(problem, heads, gradient)
    for count in asked.ranks:
        ring = Ring(problem, heads, gradient, count, asked.together)
        check(whole, ring)
        for part in ("forward", "both"):
            whole_s, ring_s, ratio = timed(getattr(whole, part), getattr(ring, part), asked.pairs)
            kind = "causal" if problem.causal else "full"
            yield Row(
                attention=kind, kv_heads=problem.kv_heads, ranks=count, part=part,
                whole_s=whole_s, ring_s=ring_s, ratio=ratio,
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--together", type=int, default=1)
    asked = parser.parse_args()
    print(f"{'attention':10}{'kv heads':>9}{'ranks':>7}  {'part':8}{'whole ms':>10}{'ring ms':>10}{'ratio':>8}")
    rows = []
    for causal in (True, False):
        for kv_heads in asked.kv_heads:
            problem = Problem(length=asked.length, kv_heads=kv_heads, causal=causal)
            for row in rows_of(problem, asked):
                times = f"{row.whole_s * 1e3:10.2f}{row.ring_s * 1e3:10.2f}{row.ratio:8.3f}"
                print(f"{row.attention:10}{row.kv_heads:9}{row.ranks:7}  {row.part:8}{times}", flush=True)
                rows.append(row)
    worst = max(row.ratio for row in rows if row.part == "both" and row.attention == "causal")
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, **vars(asked), "worst": worst}
    print(json.dumps({**about, "rows": [vars(row) for row in rows]}))
    raise SystemExit(0 if worst <= BAR else 1)


if __name__ == "__main__":
    main()
