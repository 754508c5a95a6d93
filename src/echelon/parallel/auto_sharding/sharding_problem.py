"""What the solver of automatic sharding is asked, and what it answers. No torch.

The rules that a solution assumes of whatever executes it:

1. An operator runs its strategy on its inputs, each converted from the state in which its producer left it.
2. The conversion of one result to one state happens once, and every reader of that state shares it: q, k and v read one
   `R` that became `B`, whose gradients are summed before one all-reduce.
3. A parameter lies as its strategy's output says. The gradients of one in `B` are partial, and are all-reduced once a
   step; a parameter that its readers convert moves in every microbatch.
4. An operator that repeats an earlier one takes its strategy.
5. A layer that is recomputed saves what it reads of other operators, in the state in which they left it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from echelon.parallel.auto_sharding.sharding import ShardableOp


@dataclass(frozen=True)
class AxisLink:
    """The ranks of a mesh axis, the link between them, and what one of their devices computes."""

    size: int
    """ranks"""
    bandwidth: float
    """bytes per second that a rank sends in a collective"""
    latency: float
    """seconds that a collective takes beside its bytes"""
    flops_rate: float
    """FLOPs per second that GEMMs reach"""
    memory_bandwidth: float
    """bytes per second that elementwise operators reach"""

    def __post_init__(self) -> None:
        positive = (self.size, self.bandwidth, self.flops_rate, self.memory_bandwidth)
        if min(positive) <= 0 or self.latency < 0:
            raise ValueError(f"a mesh axis needs ranks and rates above zero (got {self})")


@dataclass(frozen=True)
class ShardingProblem:
    """A traced step of a model whose operators each want a strategy."""

    ops: tuple[ShardableOp, ...]
    """in the order in which they run; an operator reads only earlier ones"""
    repeats: Mapping[int, int] = field(default_factory=dict)
    """from the position of an operator to that of the one at the same place of an earlier, equal layer"""
    microbatches: int = 1
    """of a step: what happens once a step counts once, all else as many times"""
    param_bytes: float = 16.0
    """bytes held for each element of a parameter: 16 in fp32 with its gradient and the two moments of AdamW"""

    def __post_init__(self) -> None:
        for position, op in enumerate(self.ops):
            where = f"operator {op.name} (position {position})"
            if not op.strategies:
                raise ValueError(f"{where} has no strategy")
            if any(not 0 <= source < position for source in op.inputs):
                raise ValueError(f"{where} reads {op.inputs}, expected positions before it")
            if any(len(strategy.inputs) != len(op.inputs) for strategy in op.strategies):
                raise ValueError(f"{where} reads {len(op.inputs)} tensors, its strategies another number")
        for position, earlier in self.repeats.items():
            if not 0 <= earlier < position < len(self.ops):
                raise ValueError(f"operator {position} repeats {earlier}, expected an earlier position")
            mine, first = self.ops[position], self.ops[earlier]
            if (mine.op, mine.strategies, mine.shape) != (first.op, first.strategies, first.shape):
                raise ValueError(
                    f"operator {mine.name} repeats {first.name}, which has another operation, shape or other strategies"
                )

    @cached_property
    def first_copies(self) -> tuple[int, ...]:
        """The position of the first copy of each operator; its own where it repeats none."""
        found: list[int] = []
        for position in range(len(self.ops)):
            earlier = self.repeats.get(position)
            found.append(position if earlier is None else found[earlier])
        return tuple(found)

    @cached_property
    def layer_numbers(self) -> tuple[int | None, ...]:
        """The number of the equal layer in which each operator lies; None of one that no other repeats."""
        copies: dict[int, list[int]] = {}
        for position, first in enumerate(self.first_copies):
            copies.setdefault(first, []).append(position)
        found: list[int | None] = [None] * len(self.ops)
        for positions in copies.values():
            for number, position in enumerate(positions if len(positions) > 1 else ()):
                found[position] = number
        return tuple(found)

    @cached_property
    def num_layers(self) -> int:
        """Equal layers; 0 where no operator repeats another."""
        return max((number + 1 for number in self.layer_numbers if number is not None), default=0)


@dataclass(frozen=True)
class ShardingCost:
    """Predicted seconds of a step by cause."""

    compute: float = 0.0
    """GEMMs and convolutions"""
    traffic: float = 0.0
    """operators that wait for memory"""
    collectives: float = 0.0
    """exposed collectives over the axis"""

    @property
    def total(self) -> float:
        return self.compute + self.traffic + self.collectives

    def __add__(self, other: ShardingCost) -> ShardingCost:
        return ShardingCost(
            self.compute + other.compute, self.traffic + other.traffic, self.collectives + other.collectives
        )

    def __mul__(self, factor: float) -> ShardingCost:
        return ShardingCost(self.compute * factor, self.traffic * factor, self.collectives * factor)


@dataclass(frozen=True, kw_only=True)
class ShardingSolution:
    """A strategy for every operator of a problem, and what it costs."""

    strategies: tuple[int, ...]
    """of each operator, an index into its `strategies`"""
    cost: ShardingCost
    memory_bytes: float
    """on one rank: parameters with their states, and what one microbatch saves for backward"""
    recomputed_layers: tuple[int, ...] = ()
    """numbers of the equal layers of which backward recomputes the forward"""
    optimal: bool
    """proven that no other assignment costs less"""
    seconds: float
    """that the search took"""
    note: str = ""
    """how the solution was found where it is not proven optimal"""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ShardingSolution:
        """Read what `dataclasses.asdict` gives, also through JSON."""
        tuples = {key: tuple(values[key]) for key in ("strategies", "recomputed_layers")}
        return cls(**dict(values) | tuples | {"cost": ShardingCost(**values["cost"])})
