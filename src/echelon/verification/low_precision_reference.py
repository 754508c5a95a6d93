"""A plain training loop on one device in the configured precision: what its rounding costs, and nothing else.

    asked                          here
    dtype, precision.keep_fp32     torch's operators on a model in this dtype; float32 master weights and gradients
    precision.compute = fp8        operands rounded to FP8 and back around a plain matmul (`RoundedGemms`)
    precision.master = none        weights rounded stochastically to bfloat16 after every update
    optimizer.states               moments rounded after every update
    optimizer.name = muon          Newton-Schulz steps in the dtype that the engine takes them in
    compress = lossless+FORMAT     tensors that autograd saves are rounded, in blocks (`RoundedSavedTensors`)
    kernels, offload, layout       none of them: they round nothing by themselves

Random roundings are drawn anew: they are as large as the engine's, not equal to them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from echelon.kernels import dispatch
from echelon.kernels.gemm.fused_linear import fused_linear
from echelon.kernels.memory_limits import SCALE_BLOCK
from echelon.models.layer_lists import layer_names
from echelon.models.layers import check_loss_output
from echelon.optim.blockwise_quantization import codebook
from echelon.optim.cost import MIN_QUANTIZED_NUMEL, QUANTIZATION_BLOCK
from echelon.precision import accumulation_dtype
from echelon.precision.keep_fp32 import compute_in_float32
from echelon.training.engine_options import DTYPES, loss_scale_settings
from echelon.verification.reference_optimizer import PAPER_RULES, PaperRule, muon_in_bfloat16
from echelon.verification.truth import ReferenceTraining
from echelon.verification.verify_case import VerifyCase

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class LowPrecisionTraining(ReferenceTraining):
    """A case on one device, as configured."""

    def __init__(self, case: VerifyCase, truth: safe_open, *, accumulate: int, draw: int = 0):
        """`draw` chooses among random roundings, and where blocks of moments begin."""
        self.truth, self.device = truth, torch.device(case.config.device)
        self.compute_dtype, self.precision = DTYPES[case.config.dtype], case.config.precision
        self.loss_scale = loss_scale_settings(case.config).start
        self._draw, reduce = draw, self.precision.reduce
        # Gradients that nothing is added to may stay in the compute dtype.
        in_few_bits = reduce in ("same", "bfloat16", "float16") or (reduce == "master" and accumulate == 1)
        self.grad_dtype = DTYPES.get(reduce, self.compute_dtype) if in_few_bits else torch.float32
        super().__init__(case)
        self._round_weights()

    def build(self, case: VerifyCase) -> nn.Module:
        model = case.build(str(self.device), double=False).to(self.device)
        self._full_precision = {name: p.detach().clone() for name, p in model.named_parameters()}
        kept = [name for name, _ in model.named_modules() if name and _is_kept(name, self.precision.keep_fp32)]
        in_float32 = {id(p) for name in kept for p in model.get_submodule(name).parameters(recurse=False)}
        for param in model.parameters():
            if id(param) not in in_float32:
                param.data = param.data.to(self.compute_dtype)
        leaves = [name for name in kept if any(True for _ in model.get_submodule(name).parameters(recurse=False))]
        compute_in_float32(model, leaves, self.compute_dtype)
        return model

    def master_params(self) -> dict[str, nn.Parameter]:
        torch.manual_seed(self.case.seed + self._draw)
        frozen = {name: p.detach().float() for name, p in self.model.named_parameters() if not p.requires_grad}
        # Before the optimizer copies them to its averages.
        rounded = stochastic_round if self.precision.master == "none" else Tensor.clone
        trained = {name: rounded(value) for name, value in self._full_precision.items() if name not in frozen}
        masters = frozen | trained  # frozen parameters have no master weights
        return {name: nn.Parameter(masters[name], name in trained) for name in self._full_precision}

    def paper_rules(self) -> Mapping[str, PaperRule]:
        uses_bfloat16 = self.device.type == "cuda" and self.compute_dtype == torch.bfloat16
        return {**PAPER_RULES, "muon": muon_in_bfloat16} if uses_bfloat16 else PAPER_RULES

    def forward_backward(self, inputs: dict[str, Tensor]) -> tuple[float, int]:
        inputs = {k: v.to(self.compute_dtype) if v.is_floating_point() else v for k, v in inputs.items()}
        with ExitStack() as contexts:
            contexts.enter_context(dispatch.plain_torch())
            contexts.enter_context(accumulation_dtype.fp32_accumulation())
            if self.precision.compute != "same":
                contexts.enter_context(RoundedGemms(self.model, self.precision.compute))
            if rounding := ROUNDINGS.get(self.case.config.compress.partition("+")[2]):
                contexts.enter_context(_rounded_saved_tensors(self.model, rounding))
            total, valid = check_loss_output(self.model(**inputs))
            # As large as the gradient of the mean: the sum's would overflow in float16.
            seed = self.loss_scale / max(int(valid), 1)
            total.backward(torch.full_like(total, seed))
        for name, param in self.model.named_parameters():
            if param.grad is not None:
                master = self.params[name]
                gradient = param.grad.float() / seed
                master.grad = gradient if master.grad is None else master.grad + gradient
                param.grad = None
        return total.item(), int(valid)

    def complete_gradients(self, step: int) -> None:
        """Replace them by the truth's, as for the engine: [Note: equal gradients] in compare.py."""
        for name, param in self.trainable.items():
            gradient = self.truth.get_tensor(f"{step}/gradient/{name}").to(self.device, self.grad_dtype)
            param.grad = gradient.to(param.dtype)

    def update(self, lr: float) -> None:
        super().update(lr)
        self._round_moments()
        self._round_weights()

    @torch.no_grad()
    def complete_update(self, step: int) -> None:
        for name, param in self.params.items():
            param.copy_(self.truth.get_tensor(f"{step}/parameter/{name}"))
        self._round_weights()

    @torch.no_grad()
    def _round_weights(self) -> None:
        if self.precision.master == "none":
            for master in self.params.values():
                master.copy_(stochastic_round(master))
        for name, param in self.model.named_parameters():
            param.copy_(self.params[name])

    @torch.no_grad()
    def _round_moments(self) -> None:
        states, optimizer = self.case.optimizer.states, self.optimizer.torch_optimizer
        if states == "float32" or optimizer is None:
            return
        for param, moments in optimizer.state.items():
            for name in ("exp_avg", "exp_avg_sq"):
                if states == "bfloat16":
                    moments[name].copy_(stochastic_round(moments[name]))
                elif param.numel() >= MIN_QUANTIZED_NUMEL:
                    moments[name].copy_(round_to_codes(moments[name], name == "exp_avg", self._draw))


def _is_kept(name: str, patterns: Collection[str]) -> bool:
    parts = name.split(".")
    prefixes = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return any(fnmatchcase(prefix, pattern) for prefix in prefixes for pattern in patterns)


# -- roundings --------------------------------------------------------------------------------------------------------


def stochastic_round(values: Tensor) -> Tensor:
    """Return float32 values rounded up or down to bfloat16 ones, each as often as it is nearer."""
    bits = values.float().contiguous().view(torch.int32)
    rounded = (bits + torch.randint_like(bits, 1 << 16)) & -(1 << 16)
    return torch.where(values.isfinite(), rounded.view(torch.float32), values)


def round_to_codes(values: Tensor, signed: bool, draw: int = 0) -> Tensor:
    """Return values rounded to the codes of int8 moments, in blocks, which begin elsewhere in every draw."""
    codes = codebook(signed, values.device).double().sort().values

    def nearest(block: Tensor) -> Tensor:
        index = torch.searchsorted(codes, block.double().contiguous()).clamp(1, len(codes) - 1)
        lower, upper = codes[index - 1], codes[index]
        return torch.where(block - lower <= upper - block, lower, upper).to(block.dtype)

    offset = draw * QUANTIZATION_BLOCK // 3
    shifted = values.reshape(-1).roll(offset)
    return _in_blocks(shifted, QUANTIZATION_BLOCK, nearest).roll(-offset).view(values.shape)


def _in_blocks(values: Tensor, size: int, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    """Round values in flat blocks, each divided by its absolute maximum."""
    flat = values.detach().float().reshape(-1)
    blocks = F.pad(flat, (0, -len(flat) % size)).view(-1, size)
    largest = blocks.abs().amax(1, keepdim=True).clamp_min(1e-30)
    rounded = rounding(blocks / largest) * largest
    return rounded.view(-1)[: len(flat)].view(values.shape).to(values.dtype)


def _to_fp8(block: Tensor) -> Tensor:
    return (block * torch.finfo(E4M3).max).to(E4M3).to(block.dtype) / torch.finfo(E4M3).max


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "fp16": lambda values: values.half().to(values.dtype),
    "fp8": lambda values: _in_blocks(values, SCALE_BLOCK, _to_fp8),
    "int8": lambda values: _in_blocks(values, SCALE_BLOCK, lambda block: (block * 127).round() / 127),
}
"""of saved tensors, by the format of `compress`"""


def _rounded_saved_tensors(model: nn.Module, rounding: Callable[[Tensor], Tensor]) -> saved_tensors_hooks:
    """Round what autograd saves, but for parameters and the log probabilities of the loss."""
    params = {p.untyped_storage().data_ptr() for p in model.parameters()}
    vocab = getattr(getattr(model, "config", None), "vocab", -1)

    def pack(tensor: Tensor) -> Tensor:
        is_activation = tensor.is_floating_point() and tensor.dim() > 1 and tensor.shape[-1] != vocab
        if not is_activation or tensor.untyped_storage().data_ptr() in params:
            return tensor
        return rounding(tensor)

    return saved_tensors_hooks(pack, lambda tensor: tensor)


# -- FP8 --------------------------------------------------------------------------------------------------------------


class RoundedGemms(TorchFunctionMode):
    """Rounds the operands of the layers' GEMMs to FP8 and back, one scale per tensor or per row."""

    def __init__(self, model: nn.Module, recipe: str):
        super().__init__()
        self._per_row = recipe == "fp8-row"
        layers = [model.get_submodule(name) for name in layer_names(model)]
        self._weights = {
            id(p) for layer in layers for p in layer.parameters() if p.dim() == 2 and not any(n % 16 for n in p.shape)
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        if func is fused_linear:  # the mode is off inside: it would not see the linear layers there
            x, weights, biases, *_ = args
            return torch.cat([self._linear(x, *each) for each in zip(weights, biases, strict=True)], dim=-1)
        return func(*args, **(kwargs or {}))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if id(weight) not in self._weights:
            return F.linear(x, weight, bias)
        y: Tensor = _RoundedLinear.apply(x, weight, self._per_row)
        return y if bias is None else y + bias


class _RoundedLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, per_row: bool) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(flat, weight)
        ctx.per_row, ctx.shape = per_row, x.shape
        y = _round_rows(flat, E4M3, per_row) @ _round_rows(weight, E4M3, per_row).T
        return y.to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        flat, weight = ctx.saved_tensors
        dy = gradients[0].reshape(-1, gradients[0].shape[-1])
        dtype, per_row = E4M3 if ctx.per_row else E5M2, ctx.per_row
        dx = _round_rows(dy, dtype, per_row) @ _round_rows(weight.T, E4M3, per_row).T
        dw = _round_rows(dy.T, dtype, per_row) @ _round_rows(flat.T, E4M3, per_row).T
        return dx.to(flat.dtype).view(ctx.shape), dw.to(weight.dtype), None


def _round_rows(matrix: Tensor, dtype: torch.dtype, per_row: bool) -> Tensor:
    """Return float32: the matrix rounded to FP8, scaled to the end of its range by rows, or as one."""
    values = matrix.float()
    largest = values.abs().amax(1, keepdim=True) if per_row else values.abs().amax()
    scale = torch.finfo(dtype).max / largest.clamp_min(1e-12)
    return (values * scale).to(dtype).float() / scale
