"""`Case`: what is priced. This model, on this cluster, in this layout, with this arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.layout import Layout
from echelon.plan.cluster import Cluster
from echelon.plan.shape import ModelShape

KERNELS = ("plain", "fused", "flash1", "flash2", "best")
"""how attention is computed: plain operators, a fused softmax over scores that are written out, two versions of flash
attention, the best kernel of a vendor's library"""


@dataclass(frozen=True, kw_only=True)
class Case:
    shape: ModelShape
    cluster: Cluster
    layout: Layout
    seq_len: int
    precision: str = "bf16"
    """of the products: bf16, fp16, fp8, fp4 or fp32"""
    attention: str = "best"
    """one of KERNELS"""
    fused_norms: bool = True
    """norms are one kernel each"""
    reduce_bytes: int = 4
    """of one element of a gradient on its way"""
    correction: float = 1.0
    """measured over predicted seconds of a run that was (correct.py): all times are multiplied by it"""

    @property
    def tokens(self) -> float:
        """Of a microbatch, on one rank of cp."""
        return self.layout.microbatch * self.seq_len / self.layout.cp

    @property
    def batch_tokens(self) -> int:
        """Of a step, over all ranks."""
        return self.layout.batch * self.seq_len

    @property
    def element_bytes(self) -> int:
        """Of an activation: products in fp8 and fp4 are between tensors of two bytes."""
        return 4 if self.precision == "fp32" else 2
