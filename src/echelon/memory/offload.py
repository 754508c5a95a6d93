"""What lives off the device, and what that moves: the cost of `offload`, for planning; plan only. No torch.

optimizer     optimizer states and master copies on the host, which makes the update: gradients down, weights up
params        parameters and gradients too, paged layer by layer in every pass
activations   to the host after forward, back before backward
disk          what would be on the host goes on to disk
"""

from __future__ import annotations

from dataclasses import dataclass

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
