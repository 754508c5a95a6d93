"""What a sharding costs: seconds of operators and of conversions, and bytes held. No torch.

An operator takes the longer of its FLOPs and its bytes, at the share that one rank executes. A conversion takes its
collectives: latency, and wire bytes of a ring over the bandwidth. Backward computes two gradients for one result.
Collectives are exposed: what needs them comes right behind. The gradients of parameters in `B` are summed in one
all-reduce of all of them a step, so none pays a latency of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from echelon.layout.collective import Collective, wire_bytes
from echelon.parallel.auto_sharding.sharding import BROADCAST, ShardableOp, Sharding, Strategy, conversion
from echelon.parallel.auto_sharding.sharding_problem import AxisLink, ShardingCost

BACKWARD_WORK = 2.0
"""FLOPs and bytes of an operator's backward over those of its forward"""


def result_bytes(op: ShardableOp) -> int:
    """Return the bytes of an operator's unsharded result."""
    return prod(op.shape) * op.element_bytes


def local_share(state: Sharding, ranks: int) -> float:
    """Return the share of a tensor that a rank holds."""
    return 1 / ranks if state.kind == "S" else 1.0


def forward_cost(op: ShardableOp, strategy: Strategy, link: AxisLink) -> ShardingCost:
    """Return the seconds of one forward of an operator, without conversions."""
    compute = strategy.compute_share * op.flops / link.flops_rate
    traffic = strategy.compute_share * op.traffic_bytes / link.memory_bandwidth
    return ShardingCost(compute=compute) if compute >= traffic else ShardingCost(traffic=traffic)


def conversion_collectives(
    op: ShardableOp, source: Sharding, target: Sharding, ranks: int, *, axis: str = "tp"
) -> Iterator[Collective]:
    """Yield the collectives, of forward and then of backward, that convert an operator's result once."""
    found = conversion(source, target)
    assert found is not None, (source, target)
    for kind, purpose in ((found.forward, "forward"), (found.backward, "backward")):
        if kind and ranks > 1:
            # An all-to-all starts from what a rank holds, the others from or at the full tensor.
            size = result_bytes(op) // (ranks if kind == "all_to_all" else 1)
            yield Collective(op=kind, axis=axis, bytes=size, purpose=purpose)


def conversion_seconds(op: ShardableOp, source: Sharding, target: Sharding, link: AxisLink) -> tuple[float, float]:
    """Return the seconds of converting an operator's result once, and its gradient."""
    seconds = {"forward": 0.0, "backward": 0.0}
    for item in conversion_collectives(op, source, target, link.size):
        seconds[item.purpose] += link.latency + wire_bytes(item.op, item.bytes, link.size) / link.bandwidth
    return seconds["forward"], seconds["backward"]


def partial_grad_reduction(op: ShardableOp, state: Sharding, ranks: int, *, axis: str = "tp") -> Collective | None:
    """Return a parameter's part of the all-reduce of partial gradients, once a step; None where its state has none."""
    if not op.param or state != BROADCAST or ranks == 1:
        return None
    return Collective(op="all_reduce", axis=axis, bytes=result_bytes(op), purpose="partial gradients")


def step_cost(op: ShardableOp, strategy: Strategy, link: AxisLink, microbatches: int, recomputed: bool) -> ShardingCost:
    """Return the seconds of an operator in a step, without conversions of its inputs."""
    cost = forward_cost(op, strategy, link) * (microbatches * (1 + BACKWARD_WORK + recomputed))
    if reduction := partial_grad_reduction(op, strategy.output, link.size):
        seconds = wire_bytes(reduction.op, reduction.bytes, link.size) / link.bandwidth
        cost += ShardingCost(collectives=seconds)
    return cost


def param_state_bytes(op: ShardableOp, strategy: Strategy, ranks: int, param_bytes: float) -> float:
    """Return the bytes of a parameter and its states on a rank."""
    return prod(op.shape) * param_bytes * local_share(strategy.output, ranks) if op.param else 0.0


def saved_activation_bytes(op: ShardableOp, strategy: Strategy, ranks: int, input_bytes: tuple[int, ...]) -> float:
    """Return the bytes that an operator saves for backward on a rank.

    It saves what it reads, in the state in which it reads it: a column-parallel linear its full input, a row-parallel
    one a slice. `input_bytes` weighs its inputs (0: a parameter, which is held anyway).
    """
    if not sum(input_bytes):
        return op.saved_bytes * local_share(strategy.output, ranks)
    shares = [local_share(state, ranks) for state in strategy.inputs]
    return op.saved_bytes * sum(s * n for s, n in zip(shares, input_bytes, strict=True)) / sum(input_bytes)
