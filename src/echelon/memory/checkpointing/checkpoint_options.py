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
    flops_per_s, bytes_per_s = DEVICE_SPEED.get(device, DEVICE_SPEED["cuda"])
    plain = measurements["none"]
    saved = {form: measurement.saved_bytes for form, measurement in measurements.items()}
    options: list[CheckpointOption] = []

    def add(form: str, saved_bytes: float, backward_bytes: float, seconds: float) -> None:
        options.append(
            CheckpointOption(form=form, saved_bytes=saved_bytes, backward_bytes=backward_bytes, seconds=seconds)
        )

    add("none", saved["none"], saved["none"], 0.0)
    if "ops" in saved:
        backward_bytes = max(saved["ops"], measurements["ops"].saved_and_input_bytes)
        add("ops", saved["ops"], backward_bytes, 3 * max(saved["none"] - saved["ops"], 0.0) / bytes_per_s)
    if "selective" in saved:
        seconds = plain.core_recompute_flops / flops_per_s + 2 * plain.core_bytes / bytes_per_s
        add("selective", saved["selective"], saved["selective"] + plain.core_bytes, seconds)
    if "ops+selective" in saved:
        seconds = sum(option.seconds for option in options)
        add("ops+selective", saved["ops+selective"], saved["ops+selective"] + plain.core_bytes, seconds)
    copied_bytes = plain.input_bytes if copies_input else 0.0
    seconds = plain.recompute_flops / flops_per_s + 2 * saved["none"] / bytes_per_s
    add("full", plain.input_bytes, plain.saved_and_input_bytes + copied_bytes, seconds)
    # Drop options that save no memory, or cost more than `full`.
    *others, full = options
    return [*(one for one in others if one.saved_bytes <= saved["none"] and one.seconds <= full.seconds), full]
