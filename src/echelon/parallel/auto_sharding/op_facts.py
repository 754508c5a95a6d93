"""What the rules of sharding ask of one traced operator, and the strategies that they offer for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from echelon.models.traced.traced_graph import TracedOp, ValueRef
from echelon.parallel.auto_sharding.sharding import BROADCAST, PARTIAL, REPLICATE, Sharding, Strategy, shard


@dataclass(frozen=True)
class OpFacts:
    """One operator, the tensors that it reads, and the size of the axis."""

    op: TracedOp
    operands: tuple[TracedOp, ...]
    """the tensors among its arguments, in order; one that stands twice is there twice"""
    num_ranks: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its result."""
        return self.op.shape

    def shape_of(self, position: int) -> tuple[int, ...]:
        return self.operands[position].shape

    def arg(self, index: int, name: str = "", default: Any = None) -> Any:
        """An argument that is no tensor."""
        if name in self.op.kwargs:
            return self.op.kwargs[name]
        return self.op.args[index] if index < len(self.op.args) else default

    def divides(self, size: int, blocks: int = 1) -> bool:
        """Whether the ranks divide a dimension, in each of its blocks."""
        return size % (blocks * self.num_ranks) == 0 and size > 0

    @cached_property
    def operand_of_arg(self) -> dict[int, int]:
        """From the position of a positional argument that is a tensor to that of its operand."""
        positions = [index for index, arg in enumerate(self.op.args) if isinstance(arg, ValueRef)]
        return {index: number for number, index in enumerate(positions)}


@dataclass(frozen=True)
class OpStrategy:
    """A strategy by operands, before those of one tensor are joined."""

    operands: tuple[Sharding, ...]
    output: Sharding
    compute_share: float = 1.0


Rule = Callable[[OpFacts], Iterator[OpStrategy]]
"""yields what an operator offers beside running whole on every rank"""


def sharded(operands: Sequence[Sharding], output: Sharding, facts: OpFacts) -> OpStrategy:
    """A strategy by which each rank computes its share."""
    return OpStrategy(tuple(operands), output, 1 / facts.num_ranks)


def whole_strategies(facts: OpFacts) -> Iterator[OpStrategy]:
    """Every rank runs the whole operator: on what lies outside of a region, or inside it."""
    count = len(facts.operands)
    yield OpStrategy((REPLICATE,) * count, REPLICATE)
    if facts.op.is_differentiable:
        yield OpStrategy((BROADCAST,) * count, BROADCAST)


def linear_in_one(facts: OpFacts, position: int = 0) -> Iterator[OpStrategy]:
    """Strategies of an operator that is linear in one operand: a partial sum gives a partial sum."""
    states = [BROADCAST] * len(facts.operands)
    states[position] = PARTIAL
    yield OpStrategy(tuple(states), PARTIAL)


def join_operands(facts: OpFacts, strategy: OpStrategy) -> Strategy | None:
    """The strategy by distinct inputs; None where one tensor would need two states, or cannot have its state."""
    by_input: dict[int, Sharding] = {}
    refs = _refs_in_order(facts.op)
    for ref, operand, state in zip(refs, facts.operands, strategy.operands, strict=True):
        known = REPLICATE if state == BROADCAST and not operand.is_differentiable else state
        if by_input.setdefault(ref, known) != known or not _can_have(operand, known, facts.num_ranks):
            return None
    output = strategy.output
    if output == BROADCAST and not facts.op.is_differentiable:
        output = REPLICATE
    return Strategy(tuple(by_input[index] for index in facts.op.inputs), output, strategy.compute_share)


def _refs_in_order(op: TracedOp) -> list[int]:
    return [ref.index for ref in tensor_refs((op.args, dict(op.kwargs)))]


def tensor_refs(value: Any) -> Iterator[ValueRef]:
    """All references among arguments, in order, one for each place."""
    if isinstance(value, ValueRef):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensor_refs(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensor_refs(item)


def _can_have(operand: TracedOp, state: Sharding, num_ranks: int) -> bool:
    if state.kind == "P":
        return operand.dtype.is_floating_point
    if state.kind != "S":
        return True
    return state.dim < len(operand.shape) and operand.shape[state.dim] % (num_ranks * state.blocks) == 0


def dim_states(facts: OpFacts, shape: Sequence[int]) -> Iterator[tuple[int, Sharding]]:
    """The dimensions that the ranks divide, and the state of each."""
    for dim, size in enumerate(shape):
        if facts.divides(size):
            yield dim, shard(dim)
