"""What lives off the device, and what that moves: the cost of `offload`. No torch.

    optimizer     optimizer states and master copies on the host, which makes the update: gradients down, weights up
    params        parameters and gradients too, paged layer by layer in every pass
    activations   to the host after forward, back before backward
    disk          states that would be on the host, and with `params` the parameters, go on to disk

A share of the states may stay on the device: then the last layers' go to the host, since the next step needs them last.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from echelon.layout.placement import ParamGroupSpec

HOST_UPDATE_BYTES_PER_S = 1.1e11
"""bytes that a host reads and writes in a second of its update: 16 cores beside an H200, AdamW in float32"""
LOW_PRECISION_STATE_SECONDS = {"bfloat16": 8e-9, "int8": 1.3e-8}
"""that an element's update takes longer there with such moments: torch has no kernel for all of it"""
STATE_BYTES = 12
"""of one parameter's master copy and moments, with AdamW in float32"""


@dataclass(frozen=True, kw_only=True)
class OffloadTraffic:
    """Of one rank, in a step."""

    link_bytes: float = 0.0
    """bytes between device and host"""
    host_updated_params: float = 0.0
    """parameters that the host updates"""
    disk_bytes: float = 0.0
    """bytes to and from disk"""


def offload_traffic(
    offload: str,
    *,
    shard_params: float,
    activation_bytes: float,
    accumulate: int,
    compute_bytes: int,
    gradient_bytes: int,
    state_bytes: float = STATE_BYTES,
    offloaded_share: float = 1.0,
) -> OffloadTraffic:
    """`updated` are the parameters of a rank's shard, `activations` bytes of a microbatch, `state_bytes` a parameter's.

    `share` is that of the states which are away. Only a rank's own part of the parameters crosses its link.
    """
    kinds, away = offload.split("+"), offloaded_share * shard_params
    link = disk = 0.0
    if "params" in kinds:
        link += accumulate * away * (gradient_bytes + 2 * compute_bytes)
    elif offloads_optimizer(offload):
        link += away * (gradient_bytes + compute_bytes)
    if "activations" in kinds:
        link += 2 * accumulate * activation_bytes
    if "disk" in kinds:
        disk += 2 * state_bytes * away
        if "params" in kinds:
            disk += (2 * accumulate + 1) * compute_bytes * away
    return OffloadTraffic(
        link_bytes=link, host_updated_params=away if offloads_optimizer(offload) else 0.0, disk_bytes=disk
    )


def host_update_seconds(moment_bytes: float, states: str = "float32", *, gradient_on_host: bool) -> float:
    """Of one parameter on the host, which reads and writes the master value, two moments, the gradient, and a cast.

    A gradient that the host has of its `own`, before the update, is made longer, and multiplied by what clipping leaves
    of it.
    """
    moved = 2 * (4 + 2 * moment_bytes) + 4 + 6 + (18 if gradient_on_host else 0)
    return moved / HOST_UPDATE_BYTES_PER_S + LOW_PRECISION_STATE_SECONDS.get(states, 0.0)


def step_link_bytes(
    units: Sequence[ParamGroupSpec],
    *,
    with_params: bool,
    accumulate: int,
    compute_bytes: int,
    gradient_bytes: Mapping[str, int],
    reshard_after_forward: bool = True,
    last: str = "",
    stages: Mapping[str, int] | None = None,
    recomputed: Container[str] = (),
) -> dict[str, int]:
    """What one step moves for units that are away, to the byte: gradients down, parameters up.

    `gradient_bytes` are of an element of each unit's gradient, where it lies. `last` is the layer that backward needs
    first, which is not freed in between. In a pipeline `stages` says how many of a rank's stages use each unit: there a
    unit that is kept comes once a step, and gradients leave after the backward of every stage. Units in `repeated` lie
    inside layers that are repeated, for which they come once more.
    """
    down = up = 0
    for unit in units:
        again = stages is not None or (reshard_after_forward and unit.name != last)
        again = again and not unit.stays_unsharded
        comes = (1 + again + (again and unit.name in recomputed)) * accumulate
        if stages is not None and unit.stays_unsharded:
            comes = 1
        goes = accumulate * (stages[unit.name] if stages is not None else 1)
        down += unit.shard_numel * gradient_bytes[unit.name] * (goes if with_params else 1)
        up += unit.shard_numel * compute_bytes * (comes if with_params else 1)
    return {"gradients": down, "parameters": up}


def resident_bytes(
    offload: str,
    categories: Mapping[str, float],
    *,
    layers: float,
    outside_share: float = 0.0,
    offloaded_share: float = 1.0,
    final: bool = False,
) -> dict[str, int]:
    """A rank's bytes by category, without what is elsewhere; `layers` are those whose activations it would hold.

    `share` is that of the states which are away. `ends` is the share of the parameters that lie around the layers: once
    they are there they stay until backward is through. Gradients that are `final` when they come leave at once.
    """
    # Of what comes and goes, two layers' worth is there: the one at work and the one on its way.
    some = min(1.0, 2 / max(layers, 1.0))
    stays = dict.fromkeys(categories, 1.0)
    if offloads_optimizer(offload):
        stays |= {"optimizer": 1 - offloaded_share, "master": 1 - offloaded_share}
    if offloads_params(offload):
        stays["parameters"] = 1 - min(offloaded_share, 1 - outside_share) * (1 - some)
    if offloads_params(offload) or (offloads_optimizer(offload) and final):
        stays["gradients"] = 1 - offloaded_share * (1 - some)
    if "activations" in offload.split("+"):
        stays["activations"] = some
    return {name: int(size * stays[name]) for name, size in categories.items()}


def offloads_params(offload: str) -> bool:
    """Parameters and gradients leave the device."""
    return "params" in offload.split("+")


def offloads_optimizer(offload: str) -> bool:
    """Optimizer states leave the device."""
    return bool({"optimizer", "params", "disk"} & set(offload.split("+")))


def choose_offloaded_units(units: Sequence[ParamGroupSpec], offloaded_share: float) -> frozenset[str]:
    """The units whose states leave the device, by name: at least `share` of all elements, in whole units.

    The last layers come first. What is whole from the start of a forward to its end comes last: the next step needs it
    at once.
    """
    wanted = offloaded_share * sum(unit.shard_numel for unit in units)
    found: list[str] = []
    layers, kept = ([unit for unit in units if unit.stays_unsharded is kept] for kept in (False, True))
    for unit in [*layers[::-1], *kept[::-1]]:
        if wanted <= 0:
            break
        found.append(unit.name)
        wanted -= unit.shard_numel
    return frozenset(found)


def min_offloaded_share(
    units: Sequence[ParamGroupSpec], *, state_budget: float, bytes_if_resident: float, bytes_if_offloaded: float
) -> float:
    """The smallest share that fits: `room` are the bytes for states on the device, of which an element whose states
    stay needs `stay`, and one whose states leave needs `leave`.
    """
    total = sum(unit.shard_numel for unit in units)
    if total * bytes_if_resident <= state_budget or bytes_if_resident <= bytes_if_offloaded:
        return 0.0
    return min(1.0, (total * bytes_if_resident - state_budget) / (total * (bytes_if_resident - bytes_if_offloaded)))


def off_device_bytes(
    units: Sequence[ParamGroupSpec],
    *,
    with_params: bool,
    disk: bool,
    compute_bytes: int,
    master_bytes: int,
    state_bytes: float,
    host_gradient_bytes: Mapping[str, int],
) -> dict[str, int]:
    """Bytes that units hold off the device between steps, by place: on the `host`, and on `disk` in two generations.

    `early_bytes` are of an element of a gradient that has a room of its own on the host, 0 where it has none. Buffers
    that units share are not counted.
    """
    size = sum(unit.shard_numel for unit in units)
    states = size * master_bytes + round(size * state_bytes) + (size * compute_bytes if with_params else 0)
    gradients = sum(
        unit.shard_numel * (master_bytes if with_params else host_gradient_bytes[unit.name]) for unit in units
    )
    return {"host": gradients + (0 if disk else states), "disk": 2 * states if disk else 0}
