"""How a tensor lies over the ranks of a mesh axis, and what moves it from one such state to another. No torch.

[Note: four states]

A state says what a rank holds of a tensor in forward and of its gradient in backward:

    state          forward                     gradient in backward          Megatron-LM's place of it
    R   replicate  the tensor                  the gradient                  between regions
    B   broadcast  the tensor                  a partial sum                 inside a region, at its entry
    S0  shard      a slice of dimension 0      a slice of dimension 0        inside a region: heads, ffn
    P   partial    a partial sum               the gradient                  behind the row-parallel linear

Moving forward from a state to another is moving the gradient backward, so each pair has two collectives:

    from  to    forward          backward                  from  to    forward          backward
    R     B     -                all-reduce (enter)        P     R     all-reduce       - (leave)
    R     S     slice            all-gather                S     R     all-gather       slice
    P     S     reduce-scatter   all-gather                S     B     all-gather       reduce-scatter
    P     B     all-reduce       all-reduce                S0    S1    all-to-all       all-to-all
    B     S     slice            zeros elsewhere           S0    S0/3  all-gather       all-gather

`B` to `S` takes a slice of what every rank has: the gradients of the slices are already the parts of a sum. What
cannot be moved has no conversion (`P` is never made from a whole tensor, nor is `R` from `B`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

KINDS = ("R", "B", "P", "S")


@dataclass(frozen=True, order=True)
class Sharding:
    """The state of one tensor over one mesh axis."""

    kind: str
    """one of `KINDS`"""
    dim: int = -1
    """the sharded dimension of S, counted from the first"""
    blocks: int = 1
    """equal blocks of that dimension, of each of which a rank has a slice: q, k and v of a fused linear are three"""

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        return f"S{self.dim}" if self.blocks == 1 else f"S{self.dim}/{self.blocks}"

    @classmethod
    def parse(cls, text: str) -> Sharding:
        """Read what `str` writes."""
        match = re.fullmatch(r"([RBP])|S(\d+)(?:/(\d+))?", text)
        if match is None:
            raise ValueError(f"expected R, B, P or S with a dimension (S0, S1/3 for three blocks), got {text!r}")
        return cls(match[1]) if match[1] else shard(int(match[2]), int(match[3] or 1))


REPLICATE, BROADCAST, PARTIAL = Sharding("R"), Sharding("B"), Sharding("P")


def shard(dim: int, blocks: int = 1) -> Sharding:
    """Return the state of a tensor whose dimension `dim` is sharded, in each of its blocks."""
    return Sharding("S", dim, blocks)


@dataclass(frozen=True)
class ShardingConversion:
    """The collectives that move a tensor from one state to another; empty: none."""

    forward: str = ""
    backward: str = ""


_CONVERSIONS = {
    ("R", "B"): ShardingConversion("", "all_reduce"),
    ("R", "S"): ShardingConversion("", "all_gather"),
    ("S", "R"): ShardingConversion("all_gather", ""),
    ("S", "B"): ShardingConversion("all_gather", "reduce_scatter"),
    ("S", "S"): ShardingConversion("all_to_all", "all_to_all"),
    ("P", "R"): ShardingConversion("all_reduce", ""),
    ("P", "B"): ShardingConversion("all_reduce", "all_reduce"),
    ("P", "S"): ShardingConversion("reduce_scatter", "all_gather"),
    ("B", "S"): ShardingConversion(),
}


def conversion(source: Sharding, target: Sharding) -> ShardingConversion | None:
    """Return what moves a tensor from `source` to `target`; None where nothing can."""
    if source == target:
        return ShardingConversion()
    if source.kind == target.kind == "S" and source.dim == target.dim:  # other blocks
        return ShardingConversion("all_gather", "all_gather")
    return _CONVERSIONS.get((source.kind, target.kind))


@dataclass(frozen=True)
class Strategy:
    """One legal way to run an operator on the ranks of an axis: each rank runs it on what it holds."""

    inputs: tuple[Sharding, ...]
    """the state of each tensor that it reads, in order"""
    output: Sharding
    """that of its result; an operator with several results gives all of them the same"""
    compute_share: float = 1.0
    """share of the whole operator's FLOPs and memory traffic that one rank executes"""


@dataclass(frozen=True, kw_only=True)
class ShardableOp:
    """An operator of a traced graph, as the solver sees it. Operators stand in the order in which they run."""

    name: str
    """the node's name in the graph"""
    op: str
    """what it computes, as `linear` or `add`; `input` and `param` for what enters, `output` for the result"""
    inputs: tuple[int, ...]
    """positions of the operators whose results it reads"""
    strategies: tuple[Strategy, ...]
    """the ways to run it; at least one"""
    shape: tuple[int, ...]
    """of its result"""
    element_bytes: int
    flops: float = 0.0
    """FLOPs of its GEMMs or convolutions in forward"""
    traffic_bytes: float = 0.0
    """bytes that it reads and writes in forward"""
    saved_bytes: float = 0.0
    """bytes that it saves for backward, unsharded, beside what it reads from `param`"""
    param: str = ""
    """the name of the parameter, for `param`"""
