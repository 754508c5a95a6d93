"""Products of runs of rows, each run with a matrix of its own: what experts do with the tokens that were sent to them.

    x [rows, in], one run after another      weight [runs, out, in]      ends [runs]: where each run ends

On a GPU in bfloat16 all runs are one kernel (torch's grouped_mm), which reads `ends` there: nobody waits to know how
long the runs are. Elsewhere it is a loop. Rows after the last run belong to none; what they give is 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from echelon.kernels import dispatch

ROW_ALIGNMENT_BYTES = 16
"""bytes that must divide a row for the kernel to read it"""


def grouped_gemm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """[rows, out]: each row times the matrix of its run. `ends` is int32."""
    out: Tensor = _GroupedGemm.apply(x, weight, offsets)
    return out


class _GroupedGemm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return _gemm_per_group(x, weight.transpose(1, 2), ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        dy = gradients[0].contiguous()
        dx = _gemm_per_group(dy, weight, ends) if ctx.needs_input_grad[0] else None
        dweight = _weight_gradients(dy, x, ends) if ctx.needs_input_grad[1] else None
        return dx, dweight, None


def _gemm_per_group(x: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """x times matrices [runs, in, out], run by run."""
    if _use_grouped_mm(x, matrices):
        from echelon.kernels.gemm.grouped_gemm_triton import zero_rows_after

        return zero_rows_after(F.grouped_mm(x, matrices, offs=offsets), offsets)
    out = x.new_zeros(len(x), matrices.shape[2])
    for run, rows in _group_slices(offsets):
        torch.mm(x[rows], matrices[run], out=out[rows])
    return out


def _weight_gradients(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """[runs, columns of left, columns of right]: left' x right of each run's rows."""
    if _use_grouped_mm(left, right):
        return F.grouped_mm(left.t(), right, offs=offsets)
    out = left.new_zeros(len(offsets), left.shape[1], right.shape[1])
    for run, rows in _group_slices(offsets):
        torch.mm(left[rows].t(), right[rows], out=out[run])
    return out


def _group_slices(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for run, end in enumerate(offsets.tolist()):
        if end > start:
            yield run, slice(start, end)
        start = end


def _use_grouped_mm(*tensors: Tensor) -> bool:
    return (
        all(
            x.is_cuda
            and x.dtype == torch.bfloat16
            and x.numel() > 0
            and x.shape[-1] * x.element_size() % ROW_ALIGNMENT_BYTES == 0
            for x in tensors
        )
        and dispatch.triton_enabled()
    )
