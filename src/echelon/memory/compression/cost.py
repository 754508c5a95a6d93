"""Cost of `compress`: what each compression stores of a saved tensor, and what it moves. No torch.

none            saved tensors as they are
lossless        a bit where only ReLU reads, the nonzeros of ReLU outputs, a byte per max-pool index
lossless+fp16   and values in fp16
lossless+fp8    and values in fp8, with a scale per block
lossless+int8   likewise, in steps of equal size
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.kernels.memory_limits import SCALE_BLOCK

NONE = "none"
COMPRESSIONS = (NONE, "lossless", "lossless+fp16", "lossless+fp8", "lossless+int8")
VALUE_BYTES = {"fp16": 2, "fp8": 1, "int8": 1}
SCALE_BYTES, BLOCK = 4, SCALE_BLOCK
"""of a scale, and elements of its block"""
INDEX_BYTES = 8
"""of torch's max-pool index"""
MAX_PENDING_RELUS = 1
"""ReLU outputs that wait for the device's count of nonzeros"""
MIN_SPARSE_BYTES = 16 << 20
"""bytes of a ReLU output on a GPU below which zeros are stored too: reading the count takes the CPU longer than layers
of that size take the GPU"""
BLOCK_END_BYTES = 4
"""of the offset where a block's values end; only with Triton kernels"""


def value_format(compress: str) -> str:
    """Return the format of values; empty where they keep their dtype."""
    return compress.partition("+")[2]


def check_compression(compress: str) -> str:
    if compress not in COMPRESSIONS:
        raise ValueError(f"unknown compression ({compress}); use {', '.join(COMPRESSIONS)}")
    return compress


def incompatibility(compress: str, recompute: str, offload: str) -> str:
    """Return why the options are incompatible; empty where they are not."""
    if compress == NONE:
        return ""
    if recompute == "ops":
        return "is incompatible with recompute=ops, which holds its tensors uncompressed; use recompute=none or full"
    if "activations" in offload.split("+"):
        return f"is incompatible with offload={offload}, which offloads saved tensors uncompressed; use one of them"
    return ""


@dataclass(frozen=True, kw_only=True)
class SavedElements:
    """Elements that a forward pass saves, by what backward needs of them."""

    relu_signs: float = 0
    """ReLU outputs that only ReLU and poolings read: their signs"""
    relu_outputs: float = 0
    """ReLU outputs whose values are read"""
    pending_relu_outputs: float = 0
    """likewise, whose nonzeros are not counted yet: of `MAX_PENDING_RELUS` ReLUs inside forward, none after it"""
    max_pool_outputs: float = 0
    """outputs of max pooling: their indices"""
    overlapping_pool_outputs: float = 0
    """likewise, of windows that overlap or extend beyond the edge"""
    masks: float = 0
    """boolean masks"""
    values: float = 0
    """all other values"""


def uncompressed_bytes(saved: SavedElements, element_bytes: int) -> float:
    """Return the bytes that torch saves."""
    values = saved.relu_signs + saved.relu_outputs + saved.pending_relu_outputs + saved.values
    indices = saved.max_pool_outputs + saved.overlapping_pool_outputs
    return values * element_bytes + indices * INDEX_BYTES + saved.masks


def _value_bytes(compress: str, element_bytes: int) -> tuple[float, float]:
    """Return (bytes of a value, of its share of a scale)."""
    low_precision = value_format(compress)
    if not low_precision or VALUE_BYTES[low_precision] >= element_bytes:
        return element_bytes, 0.0
    return VALUE_BYTES[low_precision], 0.0 if low_precision == "fp16" else SCALE_BYTES / BLOCK


def compressed_bytes(
    saved: SavedElements, compress: str, element_bytes: int, *, nonzero_share: float = 0.5, use_triton: bool = True
) -> float:
    """Return the bytes that compression stores, with `nonzero_share` of ReLU outputs nonzero."""
    if compress == NONE:
        return uncompressed_bytes(saved, element_bytes)
    value, scale = _value_bytes(compress, element_bytes)
    end = BLOCK_END_BYTES / BLOCK if use_triton else 0.0
    bits = (saved.relu_signs + saved.relu_outputs + saved.pending_relu_outputs + saved.masks) / 8
    sparse = saved.relu_outputs * (nonzero_share * value + scale + end) + saved.pending_relu_outputs * element_bytes
    return bits + sparse + saved.max_pool_outputs + saved.overlapping_pool_outputs + saved.values * (value + scale)


def extra_traffic_bytes(
    saved: SavedElements, compress: str, element_bytes: int, *, nonzero_share: float = 0.5
) -> float:
    """Return the bytes that kernels move in a step beyond torch's operators; negative is a gain.

    ReLU's forward writes bits and its output, and its backward reads them in place of it. Max pooling writes and
    reads bytes in place of indices; of overlapping windows, torch writes indices, and we read them.
    """
    if compress == NONE:
        return 0.0
    value, scale = _value_bytes(compress, element_bytes)
    relu = (saved.relu_signs + saved.relu_outputs + saved.pending_relu_outputs) * (2 / 8 - element_bytes)
    sparse = 2 * saved.relu_outputs * (element_bytes + nonzero_share * value + scale + 1 / 8 + BLOCK_END_BYTES / BLOCK)
    indices = 2 * saved.max_pool_outputs * (1 - INDEX_BYTES) + 2 * saved.overlapping_pool_outputs * (INDEX_BYTES + 1)
    flags = 2 * saved.masks * (1 + 1 / 8)
    low_precision = 2 * saved.values * (element_bytes + value + scale) if value < element_bytes else 0.0
    return relu + sparse + indices + flags + low_precision
