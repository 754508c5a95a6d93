"""`Case`: what is priced. This model, on this cluster, in this layout, with this arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from echelon.layout import Layout
from echelon.layout.layout import ASYNCHRONOUS, SPLIT_BACKWARD
from echelon.memory.compression import cost as compression_cost
from echelon.models.model_config import SIZES
from echelon.optim import offload_support
from echelon.optim.named_rule import Named
from echelon.optim.update_rule import Rule
from echelon.parallel.tp_grid import cost as tp_grid_cost
from echelon.planning.calibrate.constants import IMBALANCE
from echelon.planning.cluster.cluster import Cluster
from echelon.planning.memory_options import Thrift
from echelon.planning.model.model_shape import ModelShape

KERNELS = ("plain", "fused", "flash1", "flash2", "best")
"""how attention is computed: plain operators, a fused softmax over scores that are written out, two versions of flash
attention, the best kernel of a vendor's library"""
WRITTEN_OUT = ("plain", "fused")
"""of these, those that write scores out"""
PROGRAMS = ("echelon", "plain", "others")
"""what runs it: ours, with our kernels where there is a GPU and the model is one of ours; ours, on torch's operators
alone; another framework, as published runs were"""
NOTHING = Thrift()


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
    program: str = "echelon"
    """one of PROGRAMS"""
    reduce_bytes: int = 4
    """of one element of a gradient on its way"""
    moment_bytes: float = 4
    """of one element of each of the optimizer's two moments; half of what it holds where it holds another number"""
    master_bytes: int = 4
    """of one element of what the optimizer updates: 2 without a master copy"""
    correction: float = 1.0
    """measured over predicted seconds of a run that was (correct.py): all times are multiplied by it"""
    host: float | None = None
    """with `offload`, the share of the states that leave the device; none: as few as a GPU's memory asks for"""
    imbalance: float = IMBALANCE
    """rows of experts on the busiest of the ranks that divide them, to the mean"""
    rule: Rule | None = None
    """the optimizer; none: AdamW with such moments"""
    thrift: Thrift = NOTHING

    @cached_property
    def on_gpu(self) -> bool:
        return self.cluster.device.generation != "cpu"

    @cached_property
    def has_kernels(self) -> bool:
        """Our kernels run: what they keep and move is counted (kernels.py), and how fast they are was measured."""
        return self.program == "echelon" and self.on_gpu and self.precision != "fp4" and self.is_counted

    @cached_property
    def is_counted(self) -> bool:
        """There are kernels of ours for its layers in its precision: none for experts in 8 bits."""
        return self.shape.has_kernels and not (self.is_narrow and self.shape.experts)

    @cached_property
    def is_plain(self) -> bool:
        """It is a model of ours on torch's own operators: what it keeps is counted too (plain_layers.py)."""
        return self.program != "others" and not self.has_kernels and not self.is_narrow and self.shape.has_kernels

    @cached_property
    def writes_scores(self) -> bool:
        """Attention's scores are written out: our models do so to drop some of them, where they have whole rows; and
        torch does on a processor, where values are not as wide as keys."""
        if self.attention in WRITTEN_OUT:
            return True
        if self.program == "others" or not self.shape.has_kernels or self.layout.cp > 1:
            return False
        attention = self.shape.attention
        uneven = attention is not None and attention.head_dim != attention.value_dim
        return self.shape.dropout or (uneven and not self.on_gpu)

    @property
    def runnable(self) -> bool:
        """Today, by `train`: mixtures must be ones that we have a model of, 8 bits need layers of ours."""
        mixture = self.shape.experts and self.shape.name not in SIZES
        known = self.is_counted or self.precision != "fp8"
        trains = self.agrees and trains_in(self.precision, self.layout)
        return known and not mixture and not self.layout.plan_only and trains

    @property
    def agrees(self) -> bool:
        """The optimizer and what is done for less memory go with the layout: `train` refuses what does not."""
        layout, master = self.layout, "float32" if self.master_bytes > 2 else "none"
        if any(offload_support.faults(self.rule or Named(), layout.offload, master=master)):
            return False
        return not compression_cost.beside(self.thrift.compress, layout.recompute, layout.offload)

    @property
    def is_narrow(self) -> bool:
        """Products are in fewer than 16 bits."""
        return self.precision in ("fp8", "fp4")

    @property
    def tokens(self) -> float:
        """Of a microbatch, on one rank of cp; with the sequences that pad it where a grid of tp divides them."""
        return self._sequences * self.seq_len / self.layout.cp

    @property
    def _sequences(self) -> int:
        if self.layout.tp_kind == "1d":
            return self.layout.microbatch
        grid = tp_grid_cost.grid_of(self.layout)
        return grid.rows * grid.rows_here(self.layout.microbatch)

    @property
    def sliced(self) -> int:
        """Ranks that share what lies between the regions of tensor parallelism."""
        return 1 if self.layout.tp_kind == "1d" and not self.layout.sp else self.layout.tp

    @property
    def crowd(self) -> float:
        """Rows of experts on the busiest rank, to those of an even load: where a rank has all experts, always 1."""
        return min(self.imbalance, float(self.layout.ep)) if self.shape.experts else 1.0

    @property
    def batch_tokens(self) -> int:
        """Of a step, over all ranks."""
        return self.layout.batch * self.seq_len

    @property
    def element_bytes(self) -> int:
        """Of an activation: products in fp8 and fp4 are between tensors of two bytes."""
        return 4 if self.precision == "fp32" else 2


def trains_in(precision: str, layout: Layout) -> bool:
    """`train` has products in this type, in this layout: those in 8 bits cannot put off weights' gradients.

    Nor are they for a grid of tp, where a rank sees a block of a matrix and not what its scale should be.
    """
    if precision == "fp8":
        return layout.schedule not in SPLIT_BACKWARD and layout.tp_kind == "1d"
    if precision == "fp16":
        return layout.schedule not in ASYNCHRONOUS  # whose stages could not agree on a loss scale
    return precision in ("fp32", "bf16")
