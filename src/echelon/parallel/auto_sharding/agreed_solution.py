"""One solution for all ranks: the first rank of an axis solves, and the others run what it found.

The integer program has the same answer on every rank, unless its time limit ends the search at different points. Then
each rank would have a legal sharding of its own, and collectives would not match.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from zlib import crc32

import torch

from echelon.parallel.auto_sharding.sharding_problem import ShardingCost, ShardingProblem, ShardingSolution
from echelon.parallel.comm.mesh_axis import MeshAxis


def agree_on_solution(
    solve: Callable[[], ShardingSolution], axis: MeshAxis, device: torch.device | None
) -> ShardingSolution:
    """Return the first rank's solution, or raise its ValueError, on every rank of the axis."""
    answer = json.loads(_broadcast(_solved(solve) if axis.index == 0 else "", axis, device))
    if "error" in answer:
        raise ValueError(answer["error"])
    answer |= {key: tuple(answer[key]) for key in ("strategies", "recomputed_layers")}
    return ShardingSolution(**answer | {"cost": ShardingCost(**answer["cost"])})


def _solved(solve: Callable[[], ShardingSolution]) -> str:
    try:
        return json.dumps(asdict(solve()))
    except ValueError as error:
        return json.dumps({"error": str(error)})


def _broadcast(text: str, axis: MeshAxis, device: torch.device | None) -> str:
    """Send the first rank's text to all ranks."""
    sent = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    length = int(axis.broadcast(torch.tensor(len(sent), device=device)))
    received = sent if axis.index == 0 else sent.new_empty(length)
    return bytes(axis.broadcast(received).tolist()).decode()


def check_equal_problems(problem: ShardingProblem, axis: MeshAxis, device: torch.device | None) -> None:
    """Raise on all ranks of the axis if their graphs differ: they cannot share a solution."""
    facts = [(op.name, op.op, op.inputs, op.shape, op.strategies) for op in problem.ops]
    checksums = axis.all_gather(torch.tensor([crc32(repr(facts).encode()), len(facts)], device=device)).tolist()
    different = next((index for index, checksum in enumerate(checksums) if checksum != checksums[0]), 0)
    if different:
        numbers = f"rank {axis.ranks[0]}: {checksums[0][1]} operators, rank {axis.ranks[different]}: "
        raise ValueError(
            f"ranks traced different graphs ({numbers}{checksums[different][1]}); let the forward depend on its inputs "
            "alone, not on the rank"
        )
