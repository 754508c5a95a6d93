"""Torch's SDPA kernels (cuDNN, flash) with the log-sum-exp that the public API does not return.

[Note: one memory layout per shape]

Torch caches cuDNN's plans by the shapes and strides of q, k and v. A backward plan also holds the strides of out, lse
and the gradient: called with the same q, k and v but an out of other strides, it reads out with the cached strides and
silently returns wrong gradients (seen on 2.11 with cuDNN 9.19). So all three always have the one memory layout that
torch's own attention gives them for such a q: dense, [B, T, H, D] and [B, H, T].
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from echelon import compat
from echelon.kernels import dispatch

MASKED_SCORE = -1e30
"""added to masked scores: finite, since a fully masked row would otherwise be NaN"""


@dataclass(frozen=True)
class SdpaKernel:
    """A fused attention kernel and its inputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    scale: float | None = None
    """of the scores; none: 1 / sqrt(head_dim)"""

    def attend(self) -> tuple[Tensor, Tensor]:
        """As `blockwise_attention.attend`."""
        raise NotImplementedError

    def attend_backward(self, gradient: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `blockwise_attention.attend_backward`."""
        # See [Note: one memory layout per shape].
        return self._backward(_dense_tokens_first(gradient), _dense_tokens_first(out), lse.contiguous())

    def _backward(self, gradient: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    @property
    def _qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return _tokens_first(self.q), _last_dim_contiguous(self.k), _last_dim_contiguous(self.v)


def find_kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None = None
) -> SdpaKernel | None:
    """Return the fastest enabled kernel (`sdpa_kernel`) that supports these tensors forward and backward, or None."""
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16) or dispatch.autocast_enabled(q):
        return None
    # Requiring a gradient asks whether the kernel supports backward.
    mask_4d = None if mask is None else _expand_to_4d(mask)
    params = torch.backends.cuda.SDPAParams(q.detach().requires_grad_(), k, v, mask_4d, 0.0, causal, True)
    if torch.backends.cuda.can_use_cudnn_attention(params):
        return _CudnnKernel(q, k, v, mask, causal, scale)
    if mask is None and q.shape[-1] % 8 == 0 and torch.backends.cuda.can_use_flash_attention(params):
        return _FlashKernel(q, k, v, mask, causal, scale)
    return None


class _CudnnKernel(SdpaKernel):
    def attend(self) -> tuple[Tensor, Tensor]:
        out, lse = compat.cudnn_attention(*self._qkv, self._bias, self.causal, self.scale)
        if self.mask is None:
            return out, lse
        fully_masked = self.mask.any(-1).logical_not()
        return out.masked_fill_(fully_masked.unsqueeze(-1), 0.0), lse.masked_fill_(fully_masked, -inf)

    def _backward(self, gradient: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.mask is not None:
            lse = lse.masked_fill(lse == -inf, -MASKED_SCORE)  # makes every probability of a fully masked row 0
        return compat.cudnn_attention_backward(gradient, *self._qkv, out, lse, self._bias, self.causal, self.scale)

    @property
    def _bias(self) -> Tensor | None:
        if self.mask is None:
            return None
        least = max(MASKED_SCORE, torch.finfo(self.q.dtype).min)
        masked = _expand_to_4d(self.mask).expand(-1, -1, self.q.shape[2], -1).logical_not()
        return torch.zeros(masked.shape, dtype=self.q.dtype, device=self.q.device).masked_fill_(masked, least)


class _FlashKernel(SdpaKernel):
    def attend(self) -> tuple[Tensor, Tensor]:
        return compat.flash_attention(*self._qkv, self.causal, self.scale)

    def _backward(self, gradient: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return compat.flash_attention_backward(gradient, *self._qkv, out, lse, self.causal, self.scale)


def _expand_to_4d(mask: Tensor) -> Tensor:
    """View a mask with all four dims."""
    return mask[(None,) * (4 - mask.dim())]


def _tokens_first(x: Tensor) -> Tensor:
    """Return x [B, H, T, D] stored as [B, T, H, D], possibly with gaps between tokens."""
    return x if x.stride(3) == 1 and x.stride(1) <= x.stride(2) else _dense_tokens_first(x)


def _dense_tokens_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _last_dim_contiguous(x: Tensor) -> Tensor:
    """Return x with a contiguous last dim; heads and tokens may be in any order."""
    return x if x.stride(3) == 1 else x.contiguous()
