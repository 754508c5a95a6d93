"""What is planned: a model on a cluster with its arithmetic (`TrainingSetup`), in one layout (`Scenario`) or in any
that a `PlanRequest` allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from echelon.layout import Layout
from echelon.layout.mesh import DEFAULT_ORDER
from echelon.layout.remedy import Violation
from echelon.layout.rules import LayoutConstraints, find_violations
from echelon.memory.compression import cost as compression_cost
from echelon.optim import offload_support
from echelon.optim.update_rule import UpdateRule
from echelon.parallel.dp.zero import ShardingPolicy, sharding_policy
from echelon.parallel.tp import cost as tp_cost
from echelon.planning.calibrate.constants import DEFAULT_IMBALANCE
from echelon.planning.calibrate.programs import LAYOUT_VALUES, OWN_PROGRAMS
from echelon.planning.cluster.cluster import Cluster
from echelon.planning.memory_options import MemoryOptions
from echelon.planning.model.adapter_shapes import adapter_shapes
from echelon.planning.model.layout_support import unsupported_keys
from echelon.planning.model.model_shape import LayerShape, ModelShape

ATTENTION_KERNELS = ("plain", "fused", "flash1", "flash2", "best")
"""plain operators; a fused softmax over materialized scores; two versions of flash attention; the best kernel of the
vendor's library"""
SCORE_WRITING_KERNELS = ("plain", "fused")
"""kernels that materialize the scores"""
NUM_MOMENTS = 2
"""of AdamW"""
FULL_LAYER_POLICIES = ("full", "every", "sqrt")
"""recompute policies of full layers"""
DEFAULT_MEMORY_OPTIONS = MemoryOptions()
OBJECTIVES = ("time", "cost", "energy", "devices")
"""seconds, US dollars or joules of a step; the fewest devices, then seconds"""


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """A model on a cluster, with the arithmetic, optimizer and memory options of its training run."""

    shape: ModelShape
    cluster: Cluster
    seq_len: int
    precision: str = "bf16"
    """dtype of the GEMMs: bf16, fp16, fp8, fp4 or fp32"""
    attention_kernel: str = "best"
    """one of ATTENTION_KERNELS"""
    fused_norms: bool = True
    """whether a norm is one kernel"""
    program: str = "echelon"
    """one of PROGRAMS"""
    reduce_bytes: int = 4
    """per element of a gradient that is reduced"""
    moment_bytes: float = 4
    """per element of each of AdamW's two moments; half of the state of optimizers with another number of moments"""
    master_bytes: int = 4
    """per master weight: 2 without master weights"""
    correction: float = 1.0
    """factor on all times: measured over predicted seconds of an earlier run (correction.py)"""
    host_share: float | None = None
    """with `offload`, share of the optimizer state on the host; None: as little as a GPU's memory requires"""
    pairs_microbatches: bool = False
    """whether all-to-alls of experts are overlapped with the compute of another microbatch, as in DualPipe and
    Megatron-Core's overlapped 1F1B; Echelon's do not"""
    imbalance: float = DEFAULT_IMBALANCE
    """max/mean expert load across ep ranks"""
    optimizer: UpdateRule | None = None
    """None: AdamW with moments of `moment_bytes`"""
    memory_options: MemoryOptions = DEFAULT_MEMORY_OPTIONS
    lora_rank: int = 0
    """rank of LoRA adapters on linears of the frozen layers; 0: all weights are trained"""
    lora_targets: tuple[str, ...] = ()
    """patterns of these linears; none: all"""

    def violations(self, layout: Layout, *, world: int | None = None, batch: int | None = None) -> dict[str, Violation]:
        """The rules of the grammar and of the model that a layout breaks, by the rule's name."""
        sizes = {"world": world, "batch": batch, "seq_len": self.seq_len}
        return find_violations(layout, LayoutConstraints(**sizes, model=self.shape.dimensions))

    @property
    def is_own(self) -> bool:
        """Whether Echelon runs it, and not another framework."""
        return self.program in OWN_PROGRAMS

    @cached_property
    def on_gpu(self) -> bool:
        return self.cluster.device.generation not in ("cpu", "tpu", "npu")

    @cached_property
    def has_kernels(self) -> bool:
        """Whether Echelon's kernels run, whose traffic is counted (layer_counts.py) and whose speed was measured."""
        return self.program == "echelon" and self.on_gpu and self.precision != "fp4" and self.has_counted_layers

    @cached_property
    def has_counted_layers(self) -> bool:
        """Whether Echelon has kernels for these layers in this precision: it has none for experts in fp8."""
        return self.shape.is_native and not (self.is_low_precision and self.shape.experts)

    @cached_property
    def is_unfused(self) -> bool:
        """Whether a model of Echelon runs on torch's operators, whose saved tensors are counted too."""
        return self.is_own and not self.has_kernels and not self.is_low_precision and self.shape.is_native

    @property
    def runs_operators(self) -> bool:
        """Whether Echelon runs a custom model's own operators on a GPU."""
        return self.is_own and self.on_gpu and not self.shape.is_native

    @property
    def has_layer_counts(self) -> bool:
        """Whether saved tensors are counted operator by operator, with kernels or without."""
        return self.has_kernels or self.is_unfused

    @property
    def is_low_precision(self) -> bool:
        """Whether GEMMs have fewer than 16 bits."""
        return self.precision in ("fp8", "fp4")

    @property
    def train_flops(self) -> float:
        """FLOPs per token that MFU counts: frozen weights have no weight gradients, attention has no weights."""
        shape = self.shape
        if not self.lora_rank:
            return shape.train_flops(self.seq_len)
        attention = sum(n * layer.attention.flops(self.seq_len) for layer, n in shape.layers if layer.attention)
        frozen = shape.flops(self.seq_len) - attention
        trained = sum(n * lora_numel(layer, self) for layer, n in shape.layers)
        return 3.0 * attention + 2.0 * frozen + 6.0 * trained

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation; low-precision GEMMs read and write 16 bits."""
        return 4 if self.precision == "fp32" else 2


def lora_numel(layer: LayerShape, setup: TrainingSetup) -> float:
    """Parameters of the LoRA adapters of a layer."""
    adapters = adapter_shapes(setup.shape, layer, setup.lora_targets)
    return setup.lora_rank * sum(adapter.size for adapter in adapters)


@dataclass(frozen=True, kw_only=True)
class Scenario(TrainingSetup):
    """A training setup in one layout: what is priced."""

    layout: Layout
    rank_order: tuple[str, str] = DEFAULT_ORDER
    """pp and dp, the outer mesh axis first (cost/rank_placement.py)"""

    @cached_property
    def materializes_scores(self) -> bool:
        """Whether attention writes its scores out: Echelon's models do for dropout, on full sequences, and torch does
        on a CPU if values and keys differ in width."""
        if self.attention_kernel in SCORE_WRITING_KERNELS:
            return True
        if not self.is_own or not self.shape.is_native or self.layout.cp > 1:
            return False
        attention = self.shape.attention
        uneven = attention is not None and attention.head_dim != attention.value_dim
        return self.shape.dropout or (uneven and not self.on_gpu)

    @property
    def is_graphed(self) -> bool:
        """Whether a launch-bound step runs as a CUDA graph (training/graphed_step.py)."""
        layout = self.layout
        is_plain = layout.world == layout.accumulate == 1 and layout.offload == "none" and layout.recompute != "budget"
        return self.has_kernels and is_plain and not self.shape.experts and not self.shape.dropout

    @property
    def runnable(self) -> bool:
        """Whether `train` runs it."""
        return not self.refusal

    @cached_property
    def refusal(self) -> str:
        """Why `train` does not run it; empty if it does. What another program would do is priced, and not run."""
        if not self.is_own:
            return f"program={self.program} is priced, and not run"
        if not self.shape.trainable:
            return f"train has no model that computes what {self.shape.name} does"
        if self.precision == "fp8" and not self.has_counted_layers:
            return f"{self.shape.name} has layers without fp8 GEMMs"
        if not supports_precision(self.precision, self.layout):
            return f"precision={self.precision} is not supported with tp_kind={self.layout.tp_kind}"
        if not self.is_compatible:
            return "the optimizer and the memory options are incompatible with the layout"
        return next(iter(unsupported_keys(self.shape.name, self.shape.support, self.layout).values()), "")

    @property
    def is_compatible(self) -> bool:
        """Whether `train` accepts the optimizer and the memory options in this layout."""
        layout, master = self.layout, "float32" if self.master_bytes > 2 else "none"
        if any(offload_support.offload_faults(self.optimizer or UpdateRule(), layout.offload, master=master)):
            return False
        return not compression_cost.incompatibility(self.memory_options.compress, layout.recompute, layout.offload)

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch on one cp rank, with the sequences that a tp grid pads it by."""
        grid = tp_cost.grid_shape(self.layout)
        return grid.batch_parts * grid.local_batch(self.layout.microbatch) * self.seq_len / self.layout.cp

    @property
    def sp_degree(self) -> int:
        """Ranks that share the activations between tensor-parallel regions."""
        return 1 if self.layout.tp_kind == "1d" and not self.layout.sp else self.layout.tp

    @property
    def recomputes_layers(self) -> bool:
        """Whether the recompute policy is one of full layers."""
        return self.layout.recompute.partition(":")[0] in FULL_LAYER_POLICIES

    @property
    def max_layer_share(self) -> float:
        """Share of the layers on the rank that has the most."""
        stages, layers = self.layout.pp * self.layout.vpp, self.shape.num_layers
        return math.ceil(layers / stages) * self.layout.vpp / layers

    @cached_property
    def sharding_policy(self) -> ShardingPolicy:
        """The ZeRO policy; other programs keep states unsplit, and reduce once a step under a pipeline."""
        policy = sharding_policy(self.layout, user_loop=not self.is_own)
        if not self.is_own and self.layout.zero == 2 and self.layout.pp > 1:
            policy = replace(policy, reduce_scatter_every_microbatch=False)
        # Each tp rank has a part of the norms' gradients (tensor_parallel.py, grid_parallel.py).
        if self.layout.tp > 1 and (self.layout.sp or self.layout.tp_kind != "1d"):
            return replace(policy, accumulates_grads=True)
        return policy

    @property
    def gradient_bytes(self) -> int:
        """Bytes per element of a gradient in its buffer."""
        return self.reduce_bytes if self.sharding_policy.accumulates_grads else self.element_bytes

    @property
    def expert_load(self) -> float:
        """Tokens of experts on the busiest rank, over those of an even load; 1 if a rank has all experts."""
        return min(self.imbalance, float(self.layout.ep)) if self.shape.experts else 1.0

    @property
    def batch_tokens(self) -> int:
        """Tokens of a step, over all ranks."""
        return self.layout.batch * self.seq_len


@dataclass(frozen=True, kw_only=True)
class PlanRequest(TrainingSetup):
    """A training setup whose layout the planner chooses."""

    batch: int
    """sequences of a step"""
    fixed: Mapping[str, int | str] = field(default_factory=dict)
    """keys of the layout that the user sets"""
    plan_only: bool = False
    """whether to rank layouts that `train` refuses, and shorter cp slices, too"""
    objective: str = "time"
    """one of OBJECTIVES"""

    def scenario(self, layout: Layout) -> Scenario:
        return Scenario(layout=layout, **{name: getattr(self, name) for name in _SETUP_FIELDS})

    def allows(self, layout: Layout) -> bool:
        """Whether the request admits the layout: its program has what the user did not fix. If no layout runs in a
        precision, plans show that instead."""
        for key, values in LAYOUT_VALUES.get(self.program, {}).items():
            if key not in self.fixed and getattr(layout, key).partition(":")[0] not in values:
                return False
        if self.plan_only:
            return True
        if any(key not in self.fixed for key in unsupported_keys(self.shape.name, self.shape.support, layout)):
            return False
        return self.precision != "fp8" or supports_precision(self.precision, layout)


_SETUP_FIELDS = tuple(one.name for one in fields(TrainingSetup))


def supports_precision(precision: str, layout: Layout) -> bool:
    """Whether `train` has GEMMs in this precision for this layout.

    A rank of a tp grid sees a block of a matrix, without its fp8 scale.
    """
    if precision == "fp8":
        return layout.tp_kind == "1d"
    return precision in ("fp32", "bf16", "fp16")
