"""`ParallelOptions`: what a run chooses besides its layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from echelon.layout.mesh import DEFAULT_ORDER
from echelon.memory.compression import cost as compression_cost
from echelon.precision import fp8_linear

CHOICES = {
    "kernels": ("auto", "plain"),
    "cuda_graphs": ("auto", "on", "off"),
    "compile": ("auto", "on", "off"),
    "matmul_precision": ("same", *fp8_linear.FP8_RECIPES),
    "compress": compression_cost.COMPRESSIONS,
}
"""legal values of the options that are words"""


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """Dtypes, kernels, sharding, pipeline and memory options of one rank's model."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    compute_dtype: torch.dtype = torch.float32
    """dtype of parameters and activations in forward and backward"""
    master_dtype: torch.dtype = torch.float32
    """dtype of the master weights; bfloat16, equal to the compute dtype, means stochastic rounding without them"""
    reduce_dtype: torch.dtype | None = None
    """dtype in which gradients accumulate and are reduced; None: the master dtype, and at least float32"""
    keep_fp32: tuple[str, ...] = ()
    """patterns of modules that compute in float32 under a 16-bit compute dtype"""
    matmul_precision: str = "same"
    """precision of the linear layers inside the layers: the compute dtype, or 8 bits (`fp8`, `fp8-row`)"""
    kernels: str = "auto"
    """`auto` uses our Triton kernels on a GPU, `plain` uses torch operators everywhere"""
    cuda_graphs: str = "auto"
    """`auto` captures launch-bound steps of our own models on one GPU, `on` those of any model (graphed_step.py)"""
    compile: str = "off"
    """whether layers of a user's model are compiled (regional_compile.py); `auto` compiles on a GPU"""
    compile_backend: str | Callable[..., Any] = "inductor"
    """the backend of `torch.compile`; tests pass a cheaper one"""
    compress: str = compression_cost.NONE
    """compression of saved tensors (`lossless`, `lossless+fp8`): memory/compression/cost.py"""
    seed: int = 0
    rank_order: tuple[str, str] = DEFAULT_ORDER
    """which of pp and dp is the outer mesh axis, outer one first (layout/rank_order.py)"""
    reshard_after_forward: bool = True
    prefetch: int = 1
    units: tuple[str, ...] = ()
    """patterns of the modules that form parameter groups; empty: one group per layer"""
    stage_layers: tuple[int, ...] = ()
    """layers of each pipeline stage; empty balances the stages"""
    layer_costs: Mapping[str, float] = field(default_factory=dict)
    """measured cost of each pipeline layer by name, for balancing; empty: parameter counts"""
    slice_lengths: tuple[int, ...] = ()
    """lengths of TeraPipe's token slices; empty chooses them"""
    partition: bool = False
    """partition the saved inputs of checkpointed layers over tp (requires sp=0)"""
    arena: bool = False
    """copy the saved inputs of checkpointed layers into preallocated memory"""
    max_group_bytes: int = 0
    """upper bound on the bytes that one parameter group gathers or reduces, down to single modules; 0: no bound"""
    host_share: float | None = None
    """with `offload`, the share of the states that leave the device; None: as few as GPU memory requires"""
    working_bytes: int = 0
    """with `offload`, device bytes for activations and temporary buffers; 0 estimates them"""
    optimizer_bytes_per_element: float = 8.0
    """with `offload`, optimizer state per element; the engine sets it"""
    updates_on_device: bool = False
    """with `offload`, states are on the device during the update; the engine sets it"""
    disk_dir: str = ""
    """with `offload=disk`, the directory of the state files; empty: the directory for temporary files"""
    user_loop: bool = False
    """the training loop and the optimizer are the user's (training/wrap.py)"""
    drop_collective: str = ""
    """a collective to leave out on purpose (`dp:all_reduce`), so that tests see `verify` detect it"""

    def __post_init__(self) -> None:
        for key, legal in CHOICES.items():
            if getattr(self, key) not in legal:
                raise ValueError(f"unknown value ({key}={getattr(self, key)}); use {' or '.join(legal)}")
        dtypes = (self.master_dtype, self.compute_dtype)
        if self.master_dtype.itemsize < 4 and dtypes != (torch.bfloat16, torch.bfloat16):
            raise ValueError(
                "stochastic rounding without master weights requires bfloat16 "
                f"(compute {self.compute_dtype}, master {self.master_dtype}); use master_dtype=torch.float32"
            )
        if self.user_loop and (self.reduce_dtype is not None or self.master_dtype.itemsize < 4):
            raise ValueError(
                "an optimizer in a user's loop requires master weights and gradients of one dtype "
                f"(master {self.master_dtype}, reduce {self.reduce_dtype}); leave both out, or use echelon.Engine"
            )

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype in which gradients accumulate and are reduced."""
        return self.reduce_dtype or torch.promote_types(self.master_dtype, torch.float32)
