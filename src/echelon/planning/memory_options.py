"""`MemoryOptions`: memory savings that are configuration, not layout: the keys `compress` and `memory.*`."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.memory.compression import cost as compression_cost
from echelon.memory.compression.cost import NONE, SavedElements


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """What a run does to save memory, besides its layout."""

    compress: str = NONE
    """one of COMPRESSIONS; all but `none` and `lossless` change what is learnt, so the planner never chooses them"""
    partition: bool = False
    """shard the saved inputs of recomputed layers over tp, if all its ranks have the same"""
    arena: bool = False
    """copy these inputs to a buffer of their own, and back to recompute a layer"""
    buffer: int = 0
    """most bytes of parameters that are gathered or reduced at once; 0: any number"""

    @property
    def compresses(self) -> bool:
        return self.compress != NONE

    def compressed_bytes(self, size: float, mask_bytes: float, element_bytes: int) -> float:
        """Bytes that remain of `size` bytes of values and of dropout masks."""
        saved = SavedElements(values=size / element_bytes, masks=mask_bytes)
        return compression_cost.compressed_bytes(saved, self.compress, element_bytes)

    def compression_traffic(self, size: float, mask_bytes: float, element_bytes: int) -> float:
        """Bytes that compression and decompression read and write."""
        saved = SavedElements(values=size / element_bytes, masks=mask_bytes)
        return compression_cost.extra_traffic_bytes(saved, self.compress, element_bytes)
