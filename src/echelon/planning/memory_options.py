"""`Thrift`: what a run does to need less memory, beside its layout. It is configuration: `compress` and `memory.*`."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.memory.compression import cost as compression_cost
from echelon.memory.compression.cost import NONE, SavedElements


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    compress: str = NONE
    """one of memory/compression/cost.py's kinds. But for `none` and `lossless` they change what is learnt: only where asked"""
    partition: bool = False
    """inputs of layers that are repeated are divided over tp, where all its ranks have the same"""
    arena: bool = False
    """these inputs lie in memory of their own, and are copied out of it to repeat a layer"""
    buffer: int = 0
    """bytes of parameters that are gathered or reduced at once, at most; 0: any"""

    @property
    def compresses(self) -> bool:
        return self.compress != NONE

    def compressed_bytes(self, size: float, mask_bytes: float, element_bytes: int) -> float:
        """What is kept of so many bytes of values and so many masks of a byte each."""
        return compression_cost.compressed_bytes(
            SavedElements(values=size / element_bytes, masks=mask_bytes), self.compress, element_bytes
        )

    def compression_traffic(self, size: float, mask_bytes: float, element_bytes: int) -> float:
        """Bytes that packing and unpacking them reads and writes."""
        return compression_cost.extra_traffic_bytes(
            SavedElements(values=size / element_bytes, masks=mask_bytes), self.compress, element_bytes
        )
