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
KINDS = (NONE, "lossless", "lossless+fp16", "lossless+fp8", "lossless+int8")
VALUE_BYTES = {"fp16": 2, "fp8": 1, "int8": 1}
SCALE_BYTES, BLOCK = 4, 256
"""of a scale, and elements of the block that shares it"""
INDEX_BYTES = 8
"""of torch's index of a maximum"""
AHEAD = 1
"""ReLUs that forward goes ahead of the device's count of what is not zero"""
SMALL = 16 << 20
"""bytes of a ReLU's output on a GPU, under which its zeros are kept too: to ask for their number takes the processor
longer than all layers of that size take the device"""
END_BYTES = 4
"""of the place where the values of a block end: with our kernels alone"""


def narrow_of(compress: str) -> str:
    """The kind of its values; none where they are as they were."""
    return compress.partition("+")[2]


def check(compress: str) -> str:
    if compress not in KINDS:
        raise ValueError(f"there is no such compression ({compress}); use {', '.join(KINDS)}")
    return compress


def beside(compress: str, recompute: str, offload: str) -> str:
    """What is wrong with all of them together; nothing is, mostly."""
    if compress == NONE:
        return ""
    if recompute == "ops":
        return "does not go with recompute=ops, which holds what it repeats operators from; use recompute=none or full"
    if "activations" in offload.split("+"):
        return f"does not go with offload={offload}, which sends layers' tensors away as they are; use one of them"
    return ""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Elements that a forward pass leaves for backward, by what backward needs of them."""

    signs: float = 0
    """ReLU's outputs that nobody but ReLU and poolings read: which are above zero"""
    rectified: float = 0
    """ReLU's outputs whose values somebody reads"""
    whole: float = 0
    """likewise, where it is not known yet how many are not zero: of `AHEAD` ReLUs inside forward, none behind it"""
    maxima: float = 0
    """outputs of max pooling: where each maximum was"""
    overlapping: float = 0
    """likewise, of windows that overlap or reach over the edge"""
    flags: float = 0
    """masks"""
    values: float = 0
    """all other values"""


def plain_bytes(saved: Saved, element_bytes: int) -> float:
    """What torch keeps of it."""
    values = saved.signs + saved.rectified + saved.whole + saved.values
    return values * element_bytes + (saved.maxima + saved.overlapping) * INDEX_BYTES + saved.flags


def _value_bytes(compress: str, element_bytes: int) -> tuple[float, float]:
    """(of a value, of its part of a scale)"""
    narrow = narrow_of(compress)
    if not narrow or VALUE_BYTES[narrow] >= element_bytes:
        return element_bytes, 0.0
    return VALUE_BYTES[narrow], 0.0 if narrow == "fp16" else SCALE_BYTES / BLOCK


def kept_bytes(saved: Saved, compress: str, element_bytes: int, *, share: float = 0.5, ours: bool = True) -> float:
    """What is kept of it. `share` of ReLU's outputs is not zero; `ours` are the kernels."""
    if compress == NONE:
        return plain_bytes(saved, element_bytes)
    value, scale = _value_bytes(compress, element_bytes)
    end = END_BYTES / BLOCK if ours else 0.0
    bits = (saved.signs + saved.rectified + saved.whole + saved.flags) / 8
    sparse = saved.rectified * (share * value + scale + end) + saved.whole * element_bytes
    return bits + sparse + saved.maxima + saved.overlapping + saved.values * (value + scale)


def moved_bytes(saved: Saved, compress: str, element_bytes: int, *, share: float = 0.5) -> float:
    """What our kernels read and write in a step beyond what torch's own operators would; less than 0 is a gain.

    ReLU's forward writes bits beside its output, and its backward reads them in place of it. Max pooling writes and
    reads places in place of indices; of windows that overlap, torch makes indices, and we read them.
    """
    if compress == NONE:
        return 0.0
    value, scale = _value_bytes(compress, element_bytes)
    relu = (saved.signs + saved.rectified + saved.whole) * (2 / 8 - element_bytes)
    sparse = 2 * saved.rectified * (element_bytes + share * value + scale + 1 / 8 + END_BYTES / BLOCK)
    places = 2 * saved.maxima * (1 - INDEX_BYTES) + 2 * saved.overlapping * (INDEX_BYTES + 1)
    flags = 2 * saved.flags * (1 + 1 / 8)
    narrow = 2 * saved.values * (element_bytes + value + scale) if value < element_bytes else 0.0
    return relu + sparse + places + flags + narrow
