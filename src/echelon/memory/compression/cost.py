"""What each kind of compression keeps of a saved tensor, and what it moves: the cost of `compress`. No torch.

none            what backward reads is kept as it is
lossless        a bit of what only ReLU reads, what is not zero of ReLU's outputs, a byte of a maximum's place
lossless+fp16   and values in 16 bits
lossless+fp8    and values in 8 bits, with a scale for each block
lossless+int8   likewise, in steps of equal size
"""

from __future__ import annotations

from dataclasses import dataclass

NONE = "none"
COMPRESSIONS = (NONE, "lossless", "lossless+fp16", "lossless+fp8", "lossless+int8")
VALUE_BYTES = {"fp16": 2, "fp8": 1, "int8": 1}
SCALE_BYTES, BLOCK = 4, 256
"""of a scale, and elements of the block that shares it"""
INDEX_BYTES = 8
"""of torch's index of a maximum"""
MAX_PENDING_RELUS = 1
"""ReLUs that forward goes ahead of the device's count of what is not zero"""
MIN_SPARSE_BYTES = 16 << 20
"""bytes of a ReLU's output on a GPU, under which its zeros are kept too: to ask for their number takes the processor
longer than all layers of that size take the device"""
BLOCK_END_BYTES = 4
"""of the place where the values of a block end: with our kernels alone"""


def value_format(compress: str) -> str:
    """The kind of its values; none where they are as they were."""
    return compress.partition("+")[2]


def check_compression(compress: str) -> str:
    if compress not in COMPRESSIONS:
        raise ValueError(f"there is no such compression ({compress}); use {', '.join(COMPRESSIONS)}")
    return compress


def incompatibility(compress: str, recompute: str, offload: str) -> str:
    """What is wrong with all of them together; nothing is, mostly."""
    if compress == NONE:
        return ""
    if recompute == "ops":
        return "does not go with recompute=ops, which holds what it repeats operators from; use recompute=none or full"
    if "activations" in offload.split("+"):
        return f"does not go with offload={offload}, which sends layers' tensors away as they are; use one of them"
    return ""


@dataclass(frozen=True, kw_only=True)
class SavedElements:
    """Elements that a forward pass leaves for backward, by what backward needs of them."""

    relu_signs: float = 0
    """ReLU's outputs that nobody but ReLU and poolings read: which are above zero"""
    relu_outputs: float = 0
    """ReLU's outputs whose values somebody reads"""
    pending_relu_outputs: float = 0
    """likewise, where it is not known yet how many are not zero: of `AHEAD` ReLUs inside forward, none behind it"""
    max_pool_outputs: float = 0
    """outputs of max pooling: where each maximum was"""
    overlapping_pool_outputs: float = 0
    """likewise, of windows that overlap or reach over the edge"""
    masks: float = 0
    """masks"""
    values: float = 0
    """all other values"""


def uncompressed_bytes(saved: SavedElements, element_bytes: int) -> float:
    """What torch keeps of it."""
    values = saved.relu_signs + saved.relu_outputs + saved.pending_relu_outputs + saved.values
    return (
        values * element_bytes + (saved.max_pool_outputs + saved.overlapping_pool_outputs) * INDEX_BYTES + saved.masks
    )


def _value_bytes(compress: str, element_bytes: int) -> tuple[float, float]:
    """(of a value, of its part of a scale)"""
    narrow = value_format(compress)
    if not narrow or VALUE_BYTES[narrow] >= element_bytes:
        return element_bytes, 0.0
    return VALUE_BYTES[narrow], 0.0 if narrow == "fp16" else SCALE_BYTES / BLOCK


def compressed_bytes(
    saved: SavedElements, compress: str, element_bytes: int, *, nonzero_share: float = 0.5, use_triton: bool = True
) -> float:
    """What is kept of it. `share` of ReLU's outputs is not zero; `ours` are the kernels."""
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
    """What our kernels read and write in a step beyond what torch's own operators would; less than 0 is a gain.

    ReLU's forward writes bits beside its output, and its backward reads them in place of it. Max pooling writes and
    reads places in place of indices; of windows that overlap, torch makes indices, and we read them.
    """
    if compress == NONE:
        return 0.0
    value, scale = _value_bytes(compress, element_bytes)
    relu = (saved.relu_signs + saved.relu_outputs + saved.pending_relu_outputs) * (2 / 8 - element_bytes)
    sparse = 2 * saved.relu_outputs * (element_bytes + nonzero_share * value + scale + 1 / 8 + BLOCK_END_BYTES / BLOCK)
    places = 2 * saved.max_pool_outputs * (1 - INDEX_BYTES) + 2 * saved.overlapping_pool_outputs * (INDEX_BYTES + 1)
    flags = 2 * saved.masks * (1 + 1 / 8)
    narrow = 2 * saved.values * (element_bytes + value + scale) if value < element_bytes else 0.0
    return relu + sparse + places + flags + narrow
