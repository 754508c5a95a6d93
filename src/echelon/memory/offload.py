"""What lives off the device, and what that moves: the cost of `offload`. No torch.

    optimizer     optimizer states and master copies on the host, which makes the update: gradients down, weights up
    params        parameters and gradients too, paged layer by layer in every pass
    activations   to the host after forward, back before backward
    disk          states that would be on the host, and with `params` the parameters, go on to disk

A share of the states may stay on the device: then the last layers' go to the host, since the next step needs them last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.layout.placement import Unit

UPDATES = 4e9
"""parameters that a host updates in a second (ZeRO-Offload's CPU-Adam: a billion in 0.3 s, ten in 2.6 s)"""
STATE_BYTES = 12
"""of one parameter's master copy and moments"""


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Of one rank, in a step."""

    link: float = 0.0
    """bytes between device and host"""
    updated: float = 0.0
    """parameters that the host updates"""
    disk: float = 0.0
    """bytes to and from disk"""


def moved(
    offload: str,
    *,
    updated: float,
    parameters: float,
    activations: float,
    accumulate: int,
    compute_bytes: int,
    gradient_bytes: int,
) -> Moved:
    """`updated` and `parameters` are a rank's shard and what it computes with; `activations` bytes of a microbatch."""
    kinds = offload.split("+")
    link = 0.0
    if "optimizer" in kinds or "params" in kinds:
        link += updated * (gradient_bytes + compute_bytes)
    if "params" in kinds:
        link += 2 * accumulate * parameters * compute_bytes
    if "activations" in kinds:
        link += 2 * accumulate * activations
    by_host = updated if "optimizer" in kinds or "params" in kinds else 0.0
    disk = 2 * STATE_BYTES * updated if "disk" in kinds else 0.0
    return Moved(link=link, updated=by_host if not disk else updated, disk=disk)


def left(offload: str, parts: dict[str, int], *, layers: float) -> dict[str, int]:
    """A rank's bytes by category, without what is elsewhere; `layers` are those whose activations it would hold."""
    kinds, found = offload.split("+"), dict(parts)
    if {"optimizer", "params", "disk"} & set(kinds):
        found["optimizer"] = found["master"] = 0
    if "params" in kinds:
        found["gradients"] = found["parameters"] = 0
    if "activations" in kinds:
        # Two layers' worth: the one at work and the one on its way.
        found["activations"] = int(parts.get("activations", 0) * min(1.0, 2 / max(layers, 1.0)))
    return found


def has_states(offload: str) -> bool:
    """Optimizer states leave the device."""
    return bool({"optimizer", "params", "disk"} & set(offload.split("+")))


def chosen(units: Sequence[Unit], share: float) -> frozenset[str]:
    """The units whose states leave the device, by name: at least `share` of all elements, in whole units.

    The last layers come first. What is whole from the start of a forward to its end comes last: the next step needs it
    at once.
    """
    wanted = share * sum(unit.shard_numel for unit in units)
    found: list[str] = []
    for unit in sorted(reversed(units), key=lambda unit: unit.kept):
        if wanted <= 0:
            break
        found.append(unit.name)
        wanted -= unit.shard_numel
    return frozenset(found)


def least_share(units: Sequence[Unit], *, room: float, stay: float, leave: float) -> float:
    """The smallest share that fits: `room` are the bytes for states on the device, of which an element whose states
    stay needs `stay`, and one whose states leave needs `leave`.
    """
    total = sum(unit.shard_numel for unit in units)
    if total * stay <= room or stay <= leave:
        return 0.0
    return min(1.0, (total * stay - room) / (total * (stay - leave)))
