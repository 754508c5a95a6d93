"""Attention by the kernels that torch carries, with what they keep to themselves: the logarithm of the softmax's sum.

[Note: one layout for one shape]

Torch remembers cuDNN's plans by the shapes and strides of q, k and v. A backward plan also holds the strides of out,
lse and the gradient: asked again for the same q, k and v with an out that lies otherwise in memory, it reads it as the
first one lay, and the gradients are wrong without a word (seen on 2.11 with cuDNN 9.19). So all three are always laid
out in the one way that torch's own attention lays them out for such a q: dense, [B, T, H, D] and [B, H, T].
"""

from __future__ import annotations

from math import inf
from typing import Protocol

import torch
from torch import Tensor

from echelon import compat
from echelon.kernels import dispatch

MASKED_SCORE = -1e30
"""added to a score that is not to be seen: finite, as a row of nothing else would otherwise give no number"""


class SdpaKernel(Protocol):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
        """As `blocks.attend`."""
        ...

    def attend_backward(
        self,
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | None,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `blocks.attend_back`."""
        ...


def find_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> SdpaKernel | None:
    """The fastest kernel for this, forward and backward, of those that are switched on (`sdpa_kernel`)."""
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16) or dispatch.autocast_enabled(q):
        return None
    # A kernel is asked whether it has a backward by saying that a gradient is wanted.
    mask = None if mask is None else _expand_to_4d(mask)
    asked = torch.backends.cuda.SDPAParams(q.detach().requires_grad_(), k, v, mask, 0.0, causal, True)
    if torch.backends.cuda.can_use_cudnn_attention(asked):
        return _CudnnKernel()
    if mask is None and q.shape[-1] % 8 == 0 and torch.backends.cuda.can_use_flash_attention(asked):
        return _FlashKernel()
    return None


class _CudnnKernel:
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
        q, k, v = _tokens_first(q), _last_dim_contiguous(k), _last_dim_contiguous(v)
        if mask is None:
            return compat.cudnn_attention(q, k, v, None, causal)
        out, lse = compat.cudnn_attention(q, k, v, _mask_to_bias(mask, q), causal)
        blind = mask.any(-1).logical_not()
        return out.masked_fill_(blind.unsqueeze(-1), 0.0), lse.masked_fill_(blind, -inf)

    def attend_backward(
        self,
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | None,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # See [Note: one layout for one shape].
        gradient, out, lse = _dense_tokens_first(gradient), _dense_tokens_first(out), lse.contiguous()
        q, k, v = _tokens_first(q), _last_dim_contiguous(k), _last_dim_contiguous(v)
        if mask is None:
            return compat.cudnn_attention_backward(gradient, q, k, v, out, lse, None, causal)
        lse = lse.masked_fill(lse == -inf, -MASKED_SCORE)  # every weight of a row that sees nothing is 0
        return compat.cudnn_attention_backward(gradient, q, k, v, out, lse, _mask_to_bias(mask, q), causal)


class _FlashKernel:
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
        return compat.flash_attention(_tokens_first(q), _last_dim_contiguous(k), _last_dim_contiguous(v), causal)

    def attend_backward(
        self,
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | None,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient, out, lse = _dense_tokens_first(gradient), _dense_tokens_first(out), lse.contiguous()
        return compat.flash_attention_backward(
            gradient, _tokens_first(q), _last_dim_contiguous(k), _last_dim_contiguous(v), out, lse, causal
        )


def _mask_to_bias(mask: Tensor, q: Tensor) -> Tensor:
    least = max(MASKED_SCORE, torch.finfo(q.dtype).min)
    mask = _expand_to_4d(mask).expand(-1, -1, q.shape[2], -1)
    return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(mask.logical_not(), least)


def _expand_to_4d(mask: Tensor) -> Tensor:
    """With all four dimensions."""
    return mask[(None,) * (4 - mask.dim())]


def _tokens_first(x: Tensor) -> Tensor:
    """x [B, H, T, D], in memory [B, T, H, D], maybe with something between the tokens."""
    return x if x.stride(3) == 1 and x.stride(1) <= x.stride(2) else _dense_tokens_first(x)


def _dense_tokens_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _last_dim_contiguous(x: Tensor) -> Tensor:
    """Heads and tokens in any order, numbers of a head beside each other."""
    return x if x.stride(3) == 1 else x.contiguous()
