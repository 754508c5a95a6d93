"""Dequantises the weights of a published fp8 model, as DeepSeek-V3's are, while they are imported.

[Note: block-wise scales]

A linear layer's `weight` is in float8_e4m3, and `weight_scale_inv` has a float32 factor for each block of it, as a rule
of 128 x 128 elements; blocks at the right and the lower edge may be smaller:

    weight[i, j] = fp8[i, j] x scale_inv[i // 128, j // 128]

The product is computed in float32 and rounded once, to the dtype of the model's other weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from echelon.checkpoint.hf.convert_tensors import ComputedTensor, TensorSource
from echelon.checkpoint.hf.safetensors_reader import QUANTISED_DTYPES, format_names, open_safetensors
from echelon.models.hf import hf_config_reader

SCALE_SUFFIX = "_scale_inv"


def open_hf_weights(folder: Path) -> Mapping[str, TensorSource]:
    """Every weight of a Hugging Face directory, dequantised if its config says that it is quantised."""
    blocks = hf_config_reader.read_weight_blocks(folder)
    tensors = open_safetensors(folder, quantised=blocks is not None)
    return tensors if blocks is None else dequantised(tensors, blocks)


def dequantised(tensors: Mapping[str, TensorSource], blocks: tuple[int, int]) -> Mapping[str, TensorSource]:
    """The tensors with every quantised one in place of itself and its scales. Raises ValueError with all problems."""
    quantised = {name for name, tensor in tensors.items() if tensor.dtype in QUANTISED_DTYPES.values()}
    scales = {name for name in tensors if name.endswith(SCALE_SUFFIX)}
    shapes = {name + SCALE_SUFFIX: _num_blocks(tensors[name].shape, blocks) for name in quantised}
    faults = {
        "without scales": sorted(name for name in quantised if name + SCALE_SUFFIX not in scales),
        "scales of no quantised weight": sorted(scales - shapes.keys()),
        f"scales that do not fit blocks of {blocks[0]} x {blocks[1]}": sorted(
            name for name in scales & shapes.keys() if tuple(tensors[name].shape) != shapes[name]
        ),
    }
    if problems := [f"{fault}: {format_names(names)}" for fault, names in faults.items() if names]:
        raise ValueError(f"the quantised weights are incomplete ({'; '.join(problems)}); fetch the model again")
    plain = {name: tensor for name, tensor in tensors.items() if name not in scales}
    sizes: dict[torch.dtype, int] = {}
    for name in plain.keys() - quantised:
        dtype = plain[name].dtype
        sizes[dtype] = sizes.get(dtype, 0) + torch.Size(plain[name].shape).numel()
    target = max(sizes, key=lambda dtype: sizes[dtype], default=torch.bfloat16)
    for name in quantised:
        plain[name] = _dequantised(name, tensors[name], tensors[name + SCALE_SUFFIX], blocks, target)
    return plain


def _num_blocks(shape: Sequence[int], blocks: tuple[int, int]) -> tuple[int, ...] | None:
    """The shape of a weight's scales; none: it is no matrix."""
    return tuple(-(-size // block) for size, block in zip(shape, blocks, strict=True)) if len(shape) == 2 else None


def _dequantised(
    name: str, weight: TensorSource, scales: TensorSource, blocks: tuple[int, int], dtype: torch.dtype
) -> ComputedTensor:
    def read() -> Tensor:
        factors = scales.read().float()
        if not bool(torch.isfinite(factors).all()):
            raise ValueError(f"a scale of a quantised weight is not finite ({name}); fetch the model again")
        full = factors.repeat_interleave(blocks[0], 0).repeat_interleave(blocks[1], 1)
        rows, columns = weight.shape
        return weight.read().float() * full[:rows, :columns]

    return ComputedTensor(weight.shape, dtype, read)
