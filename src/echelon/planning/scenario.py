"""`Case`: what is priced. This model, on this cluster, in this layout, with this arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from echelon.layout import Layout
from echelon.layout.layout import ASYNC_SCHEDULES, SPLIT_BACKWARD_SCHEDULES
from echelon.memory.compression import cost as compression_cost
from echelon.models.model_config import SIZES
from echelon.optim import offload_support
from echelon.optim.named_rule import DefaultRule
from echelon.optim.update_rule import UpdateRule
from echelon.parallel.tp_grid import cost as tp_grid_cost
from echelon.planning.calibrate.constants import DEFAULT_IMBALANCE
from echelon.planning.cluster.cluster import Cluster
from echelon.planning.memory_options import MemoryOptions
from echelon.planning.model.model_shape import ModelShape

ATTENTION_KERNELS = ("plain", "fused", "flash1", "flash2", "best")
"""how attention is computed: plain operators, a fused softmax over scores that are written out, two versions of flash
attention, the best kernel of a vendor's library"""
SCORE_WRITING_KERNELS = ("plain", "fused")
"""of these, those that write scores out"""
PROGRAMS = ("echelon", "plain", "others")
"""what runs it: ours, with our kernels where there is a GPU and the model is one of ours; ours, on torch's operators
alone; another framework, as published runs were"""
DEFAULT_MEMORY_OPTIONS = MemoryOptions()


@dataclass(frozen=True, kw_only=True)
class Scenario:
    shape: ModelShape
    cluster: Cluster
    layout: Layout
    seq_len: int
    precision: str = "bf16"
    """of the products: bf16, fp16, fp8, fp4 or fp32"""
    attention_kernel: str = "best"
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
    host_share: float | None = None
    """with `offload`, the share of the states that leave the device; none: as few as a GPU's memory asks for"""
    imbalance: float = DEFAULT_IMBALANCE
    """rows of experts on the busiest of the ranks that divide them, to the mean"""
    optimizer: UpdateRule | None = None
    """the optimizer; none: AdamW with such moments"""
    memory_options: MemoryOptions = DEFAULT_MEMORY_OPTIONS

    @cached_property
    def on_gpu(self) -> bool:
        return self.cluster.device.generation != "cpu"

    @cached_property
    def has_kernels(self) -> bool:
        """Our kernels run: what they keep and move is counted (kernels.py), and how fast they are was measured."""
        return self.program == "echelon" and self.on_gpu and self.precision != "fp4" and self.has_counted_layers

    @cached_property
    def has_counted_layers(self) -> bool:
        """There are kernels of ours for its layers in its precision: none for experts in 8 bits."""
        return self.shape.is_native and not (self.is_low_precision and self.shape.experts)

    @cached_property
    def is_unfused(self) -> bool:
        """It is a model of ours on torch's own operators: what it keeps is counted too (plain_layers.py)."""
        return self.program != "others" and not self.has_kernels and not self.is_low_precision and self.shape.is_native

    @cached_property
    def materializes_scores(self) -> bool:
        """Attention's scores are written out: our models do so to drop some of them, where they have whole rows; and
        torch does on a processor, where values are not as wide as keys."""
        if self.attention_kernel in SCORE_WRITING_KERNELS:
            return True
        if self.program == "others" or not self.shape.is_native or self.layout.cp > 1:
            return False
        attention = self.shape.attention
        uneven = attention is not None and attention.head_dim != attention.value_dim
        return self.shape.dropout or (uneven and not self.on_gpu)

    @property
    def runnable(self) -> bool:
        """Today, by `train`: mixtures must be ones that we have a model of, 8 bits need layers of ours."""
        mixture = self.shape.experts and self.shape.name not in SIZES
        known = self.has_counted_layers or self.precision != "fp8"
        trains = self.is_compatible and supports_precision(self.precision, self.layout)
        return known and not mixture and not self.layout.plan_only and trains

    @property
    def is_compatible(self) -> bool:
        """The optimizer and what is done for less memory go with the layout: `train` refuses what does not."""
        layout, master = self.layout, "float32" if self.master_bytes > 2 else "none"
        if any(offload_support.offload_faults(self.optimizer or DefaultRule(), layout.offload, master=master)):
            return False
        return not compression_cost.incompatibility(self.memory_options.compress, layout.recompute, layout.offload)

    @property
    def is_low_precision(self) -> bool:
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
        grid = tp_grid_cost.grid_shape(self.layout)
        return grid.batch_parts * grid.local_batch(self.layout.microbatch)

    @property
    def sp_degree(self) -> int:
        """Ranks that share what lies between the regions of tensor parallelism."""
        return 1 if self.layout.tp_kind == "1d" and not self.layout.sp else self.layout.tp

    @property
    def expert_load(self) -> float:
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


def supports_precision(precision: str, layout: Layout) -> bool:
    """`train` has products in this type, in this layout: those in 8 bits cannot put off weights' gradients.

    Nor are they for a grid of tp, where a rank sees a block of a matrix and not what its scale should be.
    """
    if precision == "fp8":
        return layout.schedule not in SPLIT_BACKWARD_SCHEDULES and layout.tp_kind == "1d"
    if precision == "fp16":
        return layout.schedule not in ASYNC_SCHEDULES  # whose stages could not agree on a loss scale
    return precision in ("fp32", "bf16")
