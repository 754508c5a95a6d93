"""The checkpoint options of a layer under a budget, from measurements of its forward. No torch: plans use this too.

none            saves everything
ops             recomputes the operators between GEMMs, at the cost of reading and writing their tensors
selective       recomputes core attention
ops+selective   both
full            saves its input, and recomputes everything
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echelon.memory.checkpointing.knapsack import CheckpointOption

DEVICE_SPEED = {"cuda": (4e14, 2.5e12), "cpu": (5e10, 1e10)}
"""(FLOP/s, bytes/s), to weigh GEMMs against elementwise operators. Constants, so that all ranks choose alike"""


@dataclass
class LayerMeasurement:
    """Measurements of one forward of a layer."""

    saved_bytes: float = 0
    """bytes that autograd saves"""
    core_bytes: float = 0
    """of these, by core attention"""
    saved_and_input_bytes: float = 0
    """bytes of saved tensors and of the layer's inputs"""
    input_bytes: float = 0
    """bytes of the layer's inputs as a checkpoint would save them"""
    gemm_output_bytes: float = 0
    """bytes of GEMM and attention outputs"""
    flops: float = 0.0
    recompute_flops: float = 0.0
    """of these, the FLOPs of a rerun, which stops after the last saved tensor"""
    core_flops: float = 0.0
    core_recompute_flops: float = 0.0


def checkpoint_options(
    measurements: Mapping[str, LayerMeasurement], device: str, *, copies_input: bool = False
) -> list[CheckpointOption]:
    """Return a layer's options from measurements by form; the last is `full`.

    `copies_input`: a rerun holds the layer's input twice.
    """
    per_s, bytes_per_s = DEVICE_SPEED.get(device, DEVICE_SPEED["cuda"])
    plain = measurements["none"]
    all_saved, core = plain.saved_bytes, plain.core_bytes
    options = [CheckpointOption(form="none", saved_bytes=all_saved, backward_bytes=all_saved, seconds=0.0)]
    if "ops" in measurements:
        saved = measurements["ops"].saved_bytes
        recomputed = max(all_saved - saved, 0.0)
        options.append(
            CheckpointOption(
                form="ops",
                saved_bytes=saved,
                backward_bytes=max(saved, measurements["ops"].saved_and_input_bytes),
                seconds=3 * recomputed / bytes_per_s,
            )
        )
    if "selective" in measurements:
        saved = measurements["selective"].saved_bytes
        seconds = plain.core_recompute_flops / per_s + 2 * core / bytes_per_s
        options.append(
            CheckpointOption(form="selective", saved_bytes=saved, backward_bytes=saved + core, seconds=seconds)
        )
    if "ops+selective" in measurements:
        saved = measurements["ops+selective"].saved_bytes
        seconds = sum(option.seconds for option in options)
        options.append(
            CheckpointOption(form="ops+selective", saved_bytes=saved, backward_bytes=saved + core, seconds=seconds)
        )
    copied_bytes = plain.input_bytes if copies_input else 0.0
    seconds = plain.recompute_flops / per_s + 2 * all_saved / bytes_per_s
    full = CheckpointOption(
        form="full",
        saved_bytes=plain.input_bytes,
        backward_bytes=plain.saved_and_input_bytes + copied_bytes,
        seconds=seconds,
    )
    # Drop options that save no memory, or cost more than `full`.
    return [option for option in options if option.saved_bytes <= all_saved and option.seconds <= full.seconds] + [full]
