"""Grouped GEMM: each group of consecutive rows times a matrix of its own, as experts do with their tokens.

    x [rows, in], one group after another      weight [groups, out, in]      offsets [groups]: where each group offsets

On a GPU in bfloat16 all groups are one kernel (torch's grouped_mm), which reads `offsets` on the device: the host does
not wait for the group sizes. Elsewhere it is a loop. Rows after the last group belong to none; their output is 0.
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
"""grouped_mm requires rows that are a multiple of this"""


def grouped_gemm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply each row by the matrix of its group: [rows, out]. `offsets` is int32."""
    out: Tensor = _GroupedGemm.apply(x, weight, offsets)
    return out


class _GroupedGemm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        return _gemm_per_group(x, weight.transpose(1, 2), offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, offsets = ctx.saved_tensors
        dy = gradients[0].contiguous()
        dx = _gemm_per_group(dy, weight, offsets) if ctx.needs_input_grad[0] else None
        dweight = _weight_gradients(dy, x, offsets) if ctx.needs_input_grad[1] else None
        return dx, dweight, None


def _gemm_per_group(x: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """Multiply x by matrices [groups, in, out], group by group."""
    if _use_grouped_mm(x, matrices):
        from echelon.kernels.gemm.grouped_gemm_triton import zero_rows_after

        return zero_rows_after(F.grouped_mm(x, matrices, offs=offsets), offsets)
    out = x.new_zeros(len(x), matrices.shape[2])
    for group, rows in _group_slices(offsets):
        torch.mm(x[rows], matrices[group], out=out[rows])
    return out


def _weight_gradients(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """Compute left^T right over each group's rows: [groups, columns of left, columns of right]."""
    if _use_grouped_mm(left, right):
        return F.grouped_mm(left.t(), right, offs=offsets)
    out = left.new_zeros(len(offsets), left.shape[1], right.shape[1])
    for group, rows in _group_slices(offsets):
        torch.mm(left[rows].t(), right[rows], out=out[group])
    return out


def _group_slices(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for group, end in enumerate(offsets.tolist()):
        if end > start:
            yield group, slice(start, end)
        start = end


def _use_grouped_mm(*tensors: Tensor) -> bool:
    supported = (x.is_cuda and x.dtype == torch.bfloat16 and x.numel() > 0 for x in tensors)
    aligned = (x.shape[-1] * x.element_size() % ROW_ALIGNMENT_BYTES == 0 for x in tensors)
    return all(supported) and all(aligned) and dispatch.triton_enabled()
