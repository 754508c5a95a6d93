"""The ways a layer can go under a budget, from what was counted of it. No torch: a plan chooses among the same.

none            keeps everything
ops             makes again what operators between products made; it is read and written where that happens
selective       does attention's core again
ops+selective   both
full            keeps its input, and does everything again
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echelon.memory.checkpointing.knapsack import CheckpointOption

DEVICE_SPEED = {"cuda": (4e14, 2.5e12), "cpu": (5e10, 1e10)}
"""FLOP/s and bytes/s, to weigh products against what only passes memory. Constants, so that all ranks choose alike"""


@dataclass
class LayerMeasurement:
    """Of one forward of a layer."""

    saved_bytes: float = 0
    """bytes that autograd saves"""
    core_bytes: float = 0
    """of them, what attention's core saves"""
    saved_and_input_bytes: float = 0
    """bytes of what is saved and of what the layer is given"""
    input_bytes: float = 0
    """bytes of what the layer is given, as it would be kept"""
    gemm_output_bytes: float = 0
    """bytes that products and attention make"""
    flops: float = 0.0
    recompute_flops: float = 0.0
    """of them, those that a repetition does: it ends when the last thing is saved"""
    core_flops: float = 0.0
    core_recompute_flops: float = 0.0


def checkpoint_options(
    measurements: Mapping[str, LayerMeasurement], device: str, *, copies_input: bool = False
) -> list[CheckpointOption]:
    """What a layer can do, of which these were counted; the last is `full`.

    `copied`: while a layer is repeated, its input is there twice.
    """
    per_s, bytes_per_s = DEVICE_SPEED.get(device, DEVICE_SPEED["cuda"])
    plain = measurements["none"]
    none, core = plain.saved_bytes, plain.core_bytes
    some = [CheckpointOption(form="none", saved_bytes=none, backward_bytes=none, seconds=0.0)]
    if "ops" in measurements:
        kept = measurements["ops"].saved_bytes
        remade = max(none - kept, 0.0)
        some.append(
            CheckpointOption(
                form="ops",
                saved_bytes=kept,
                backward_bytes=max(kept, measurements["ops"].saved_and_input_bytes),
                seconds=3 * remade / bytes_per_s,
            )
        )
    if "selective" in measurements:
        kept = measurements["selective"].saved_bytes
        seconds = plain.core_recompute_flops / per_s + 2 * core / bytes_per_s
        some.append(CheckpointOption(form="selective", saved_bytes=kept, backward_bytes=kept + core, seconds=seconds))
    if "ops+selective" in measurements:
        kept = measurements["ops+selective"].saved_bytes
        seconds = sum(way.seconds for way in some)
        some.append(
            CheckpointOption(form="ops+selective", saved_bytes=kept, backward_bytes=kept + core, seconds=seconds)
        )
    twice = plain.input_bytes if copies_input else 0.0
    seconds = plain.recompute_flops / per_s + 2 * none / bytes_per_s
    full = CheckpointOption(
        form="full", saved_bytes=plain.input_bytes, backward_bytes=plain.saved_and_input_bytes + twice, seconds=seconds
    )
    # What keeps no less than something cheaper is no way to go.
    return [way for way in some if way.saved_bytes <= none and way.seconds <= full.seconds] + [full]
