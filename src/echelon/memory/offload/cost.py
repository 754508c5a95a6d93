"""Cost of `offload`: what is off the device, and the bytes that this moves. No torch.

    optimizer     optimizer states and master weights on the host, which updates: gradients to the host, weights back
    params        parameters and gradients too, paged layer by layer in every pass
    activations   to the host after forward, to the device before backward
    disk          states that would be on the host, and with `params` the parameters, are on disk

A share of the states may stay on the device: then the last layers' are offloaded, since the next step needs them last.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from echelon.layout.placement import ParamGroupSpec

HOST_UPDATE_BYTES_PER_S = 1.1e11
"""bytes that the host's update moves per second: 16 cores beside an H200, AdamW in float32"""
LOW_PRECISION_STATE_SECONDS = {"bfloat16": 8e-9, "int8": 1.3e-8}
"""additional seconds per element with such moments: torch has no fused kernel for them"""
PAGE_BYTES = 1 << 30
"""states that are copied to the device together where it updates them; a parameter group that is larger goes alone"""
NUM_PAGES = 3
"""pages on the device at once: one arrives, one is updated, one leaves"""
STATE_BYTES = 12
"""per parameter: master weight and moments of AdamW in float32"""


@dataclass(frozen=True, kw_only=True)
class OffloadTraffic:
    """What one rank moves in a step."""

    link_bytes: float = 0.0
    """bytes between device and host"""
    page_bytes: float = 0.0
    """bytes each way during an update on the device"""
    host_updated_params: float = 0.0
    """parameters that the host updates"""
    disk_bytes: float = 0.0
    """bytes to and from disk"""


@dataclass(frozen=True, kw_only=True)
class PagedUpdate:
    """States on the host that the device updates (optim/paged_optimizer.py)."""

    state_bytes: int
    """bytes of master weights and optimizer states"""
    host_gradient_bytes: Mapping[str, int]
    """bytes per element of each group's gradient on the host, 0 where it is on the device"""


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
    updates_on_device: bool = False,
    early_gradients: bool = False,
) -> OffloadTraffic:
    """Return a rank's traffic; only its own shard of the parameters crosses its link.

    `shard_params` are the parameters of its shard, `activation_bytes` those of a microbatch, `state_bytes` those of a
    parameter, and `offloaded_share` the share of the states that is off the device. Where the device updates them, the
    states travel each way, and gradients that are on the host, such as `early_gradients`, return.
    """
    parts, offloaded = offload.split("+"), offloaded_share * shard_params
    link = disk = page = 0.0
    if "params" in parts:
        link += accumulate * offloaded * (gradient_bytes + 2 * compute_bytes)
    elif offloads_optimizer(offload) and (early_gradients or not updates_on_device):
        link += offloaded * (gradient_bytes + (0 if updates_on_device else compute_bytes))
    if offloads_optimizer(offload) and updates_on_device:
        page += offloaded * (state_bytes + (gradient_bytes if early_gradients or "params" in parts else 0))
    if "activations" in parts:
        link += 2 * accumulate * activation_bytes
    if "disk" in parts:
        disk += 2 * state_bytes * offloaded
        if "params" in parts:
            disk += (2 * accumulate + 1) * compute_bytes * offloaded
    host_updated = offloaded if offloads_optimizer(offload) and not updates_on_device else 0.0
    return OffloadTraffic(link_bytes=link, page_bytes=page, host_updated_params=host_updated, disk_bytes=disk)


def host_update_seconds(moment_bytes: float, states: str = "float32", *, gradient_on_host: bool) -> float:
    """Return the seconds of one parameter's update on the host: master weight, two moments, gradient, and a cast.

    With `gradient_on_host` the host also converts the gradient to fp32 and multiplies it by the clipping factor.
    """
    moved = 2 * (4 + 2 * moment_bytes) + 4 + 6 + (18 if gradient_on_host else 0)
    return moved / HOST_UPDATE_BYTES_PER_S + LOW_PRECISION_STATE_SECONDS.get(states, 0.0)


def step_link_bytes(
    groups: Sequence[ParamGroupSpec],
    *,
    with_params: bool,
    accumulate: int,
    compute_bytes: int,
    gradient_bytes: Mapping[str, int],
    reshard_after_forward: bool = True,
    last: str = "",
    stages: Mapping[str, int] | None = None,
    recomputed: Container[str] = (),
    paged: PagedUpdate | None = None,
) -> dict[str, int]:
    """Return the exact bytes that one step moves for offloaded groups: gradients to the host, parameters to the device.

    `gradient_bytes` are per element of each group's gradient. `last` is the layer that backward needs first, which is
    not freed in between. In a pipeline `stages` is the number of a rank's stages that use each group: there a group
    that stays unsharded is copied once a step, and gradients are copied after the backward of every stage. Groups in
    `recomputed` are inside checkpointed layers, for which they are copied once more. A `paged` update copies states to
    the device and back, and gradients only where they are on the host: there and back.
    """
    down = up = 0
    for group in groups:
        copied_again = stages is not None or (reshard_after_forward and group.module != last)
        copied_again = copied_again and not group.stays_unsharded
        copies_up = (1 + copied_again + (copied_again and group.name in recomputed)) * accumulate
        if stages is not None and group.stays_unsharded:
            copies_up = 1
        if not group.trainable:
            up += group.shard_numel * compute_bytes * copies_up if with_params else 0
            continue
        copies_down = accumulate * (stages[group.name] if stages is not None else 1)
        if paged is not None and not with_params:
            down += 2 * group.shard_numel * paged.host_gradient_bytes[group.name]
            continue
        down += group.shard_numel * gradient_bytes[group.name] * (copies_down if with_params else 1)
        up += group.shard_numel * compute_bytes * (copies_up if with_params else 1)
        down += group.shard_numel * paged.host_gradient_bytes[group.name] if paged is not None else 0
    moved = {"gradients": down, "parameters": up}
    return moved if paged is None else moved | {"states": 2 * paged.state_bytes}


def split_into_pages(sizes: Sequence[int], page_bytes: int) -> list[slice]:
    """Join neighbouring parameter groups of these bytes to pages of at most `page_bytes`, if one does not exceed it."""
    pages: list[slice] = []
    start, filled = 0, 0
    for index, size in enumerate(sizes):
        if index > start and filled + size > page_bytes:
            pages.append(slice(start, index))
            start, filled = index, 0
        filled += size
    return [*pages, slice(start, len(sizes))] if sizes else []


def pages_on_device(sizes: Sequence[int], page_bytes: int = PAGE_BYTES) -> int:
    """Return the largest bytes of pages that the device holds at once during an update."""
    pages = [sum(sizes[part]) for part in split_into_pages(sizes, page_bytes)]
    return max((sum(pages[index : index + NUM_PAGES]) for index in range(len(pages))), default=0)


def resident_bytes(
    offload: str,
    categories: Mapping[str, float],
    *,
    layers: float,
    outside_share: float = 0.0,
    offloaded_share: float = 1.0,
    final: bool = False,
) -> dict[str, int]:
    """Return a rank's bytes by category that stay on the device, with `layers` layers' activations in flight.

    `offloaded_share` is that of the states. `outside_share` is the share of the parameters outside of the layers, which
    stay until backward ends. Gradients that are `final` when they are reduced are offloaded at once.
    """
    # Of what is paged, two layers are on the device: the one at work and the one being copied.
    paged_share = min(1.0, 2 / max(layers, 1.0))
    resident_share = dict.fromkeys(categories, 1.0)
    if offloads_optimizer(offload):
        resident_share |= {"optimizer": 1 - offloaded_share, "master": 1 - offloaded_share}
    if offloads_params(offload):
        resident_share["parameters"] = 1 - min(offloaded_share, 1 - outside_share) * (1 - paged_share)
    if offloads_params(offload) or (offloads_optimizer(offload) and final):
        resident_share["gradients"] = 1 - offloaded_share * (1 - paged_share)
    if "activations" in offload.split("+"):
        resident_share["activations"] = paged_share
    return {name: int(size * resident_share[name]) for name, size in categories.items()}


def offloads_params(offload: str) -> bool:
    """Return whether parameters and gradients are offloaded."""
    return "params" in offload.split("+")


def offloads_optimizer(offload: str) -> bool:
    """Return whether optimizer states are offloaded."""
    return bool({"optimizer", "params", "disk"} & set(offload.split("+")))


def choose_offloaded_units(groups: Sequence[ParamGroupSpec], offloaded_share: float) -> frozenset[str]:
    """Choose the parameter groups whose states are offloaded, by name: at least `offloaded_share` of all elements.

    The last layers first. Groups that stay unsharded come last: the next step needs them at once.
    """
    remaining = offloaded_share * sum(group.shard_numel for group in groups)
    names: list[str] = []
    layers, unsharded = ([group for group in groups if group.stays_unsharded is flag] for flag in (False, True))
    for group in [*layers[::-1], *unsharded[::-1]]:
        if remaining <= 0:
            break
        names.append(group.name)
        remaining -= group.shard_numel
    return frozenset(names)


def min_offloaded_share(
    groups: Sequence[ParamGroupSpec], *, state_budget: float, bytes_if_resident: float, bytes_if_offloaded: float
) -> float:
    """Return the smallest offloaded share that fits `state_budget` bytes of states on the device.

    An element needs `bytes_if_resident` on the device, or `bytes_if_offloaded`.
    """
    total = sum(group.shard_numel for group in groups)
    if total * bytes_if_resident <= state_budget or bytes_if_resident <= bytes_if_offloaded:
        return 0.0
    return min(1.0, (total * bytes_if_resident - state_budget) / (total * (bytes_if_resident - bytes_if_offloaded)))


def off_device_bytes(
    groups: Sequence[ParamGroupSpec],
    *,
    with_params: bool,
    disk: bool,
    compute_bytes: int,
    master_bytes: int,
    state_bytes: float,
    host_gradient_bytes: Mapping[str, int],
) -> dict[str, int]:
    """Return the bytes off the device between steps: on the `host`, and on `disk` in two generations.

    `host_gradient_bytes` are per element of a gradient with its own host buffer, 0 where it has none. Shared buffers
    are not counted.
    """
    size = sum(group.shard_numel for group in groups)
    trainable = [group for group in groups if group.trainable]
    updated = sum(group.shard_numel for group in trainable)
    masters = updated * master_bytes + (size - updated) * compute_bytes
    states = masters + round(updated * state_bytes) + (size * compute_bytes if with_params else 0)
    gradients = sum(
        group.shard_numel * (master_bytes if with_params else host_gradient_bytes[group.name]) for group in trainable
    )
    return {"host": gradients + (0 if disk else states), "disk": 2 * states if disk else 0}
