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

ALIGNED = 16
"""bytes that must divide a row for the kernel to read it"""


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """[rows, out]: each row times the matrix of its run. `ends` is int32."""
    out: Tensor = _Grouped.apply(x, weight, ends)
    return out


class _Grouped(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return _by_run(x, weight.transpose(1, 2), ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        dy = gradients[0].contiguous()
        dx = _by_run(dy, weight, ends) if ctx.needs_input_grad[0] else None
        dweight = _of_runs(dy, x, ends) if ctx.needs_input_grad[1] else None
        return dx, dweight, None


def _by_run(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """x times matrices [runs, in, out], run by run."""
    if _fits(x, matrices):
        from echelon.kernels.gemm.grouped_gemm_triton import clear_after

        return clear_after(F.grouped_mm(x, matrices, offs=ends), ends)
    out = x.new_zeros(len(x), matrices.shape[2])
    for run, rows in _runs(ends):
        torch.mm(x[rows], matrices[run], out=out[rows])
    return out


def _of_runs(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """[runs, columns of left, columns of right]: left' x right of each run's rows."""
    if _fits(left, right):
        return F.grouped_mm(left.t(), right, offs=ends)
    out = left.new_zeros(len(ends), left.shape[1], right.shape[1])
    for run, rows in _runs(ends):
        torch.mm(left[rows].t(), right[rows], out=out[run])
    return out


def _runs(ends: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for run, end in enumerate(ends.tolist()):
        if end > start:
            yield run, slice(start, end)
        start = end


def _fits(*tensors: Tensor) -> bool:
    return (
        all(
            x.is_cuda and x.dtype == torch.bfloat16 and x.numel() > 0 and x.shape[-1] * x.element_size() % ALIGNED == 0
            for x in tensors
        )
        and dispatch.allowed()
    )
