"""Compiles kernels for a GPU that need not be here, and prints the name of each: run by test_compiles.py.

Apart from the tests, as Triton's interpreter, which those ask for, does not compile.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from echelon.kernels.activations import (
    bitmask_triton,
    blockwise_cast_triton,
    max_pool_triton,
    sparse_values_triton,
)
from echelon.kernels.attention import blockwise_attention_triton, rope_triton
from echelon.kernels.gemm import fp8_cast_triton, grouped_gemm_triton
from echelon.kernels.layers import cross_entropy_triton, gelu_triton, residual_norm_triton, swiglu_triton
from echelon.kernels.optim import (
    elementwise_updates_triton,
    factored_moments_triton,
    fused_adamw_triton,
    weight_formats_triton,
)

HOPPER = GPUTarget("cuda", 90, 32)
ROWS = {"rows": "i32", "width": "i32", "columns": "i32", "row_stride": "i64", "length": "i32", "table_rows": "i32"}
STRIDES = {f"{which}_{dim}": "i64" for which in "qkv" for dim in "bht"}
TILE = {"plain_stride": "i32", "transposed_stride": "i32", "max_value": "fp32"}
PACKED = dict.fromkeys(("row", "chunks", "blocks", "inner", "down", "across", "height"), "i32") | {"smallest": "fp32"}
NUMBERS = {**PACKED, **ROWS, **STRIDES, **TILE, "eps": "fp32", "stride": "i64", "size": "i64"}
WIDE = (
    "scale_ptr",
    "amax_ptr",
    "losses_ptr",
    "parts_ptr",
    "cos_ptr",
    "sin_ptr",
    "row_inverse_ptr",
    "column_inverse_ptr",
)
"""pointers to fp32; others are to 16 bits"""


def compiled(kernel: Any, warps: int, constants: dict[str, Any], *, fused: bool = True, **types: Any) -> str:
    """Return the kernel's PTX."""
    signature = {}
    for name in kernel.arg_names:
        usual = "*fp32" if name in WIDE else NUMBERS.get(name, "*bf16")
        signature[name] = "constexpr" if name in constants else types.get(name, usual)
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    options = {"num_warps": warps, "enable_fp_fusion": fused}
    made = triton.compile(ASTSource(kernel, signature, places), target=HOPPER, options=options)
    assert made.asm["cubin"]
    print(kernel.__name__)
    return str(made.asm["ptx"])


def main() -> None:
    block = {"BLOCK": 2048}
    for has in (True, False):
        for kind in ({"IS_LAYER_NORM": True, **block}, {"IS_LAYER_NORM": False, **block}):
            compiled(residual_norm_triton._norm_forward, 4, {"HAS_DELTA": has, **kind})
            compiled(residual_norm_triton._norm_backward, 8, {"EACH": 63, "HAS_STREAM": has, **kind})
            compiled(residual_norm_triton._norm_recompute, 4, kind)
        compiled(swiglu_triton._swiglu_backward, 8, {"WIDTH": 8192, "OUTPUT": has, **block})
        logits = {"WIDTH": 128_256, "READABLE": 128_256, "IGNORED": -100, "BACKWARD": has, "BLOCK": 8192}
        compiled(cross_entropy_triton._loss_and_gradient, 16, logits, targets_ptr="*i64")
    compiled(gelu_triton._gelu_forward, 4, block)
    compiled(gelu_triton._gelu_backward, 4, {"EACH": 63, "ROWS": 8, "COLUMNS": 256})
    compiled(swiglu_triton._swiglu_forward, 8, {"WIDTH": 8192, **block})
    compiled(cross_entropy_triton._loss_scaled, 4, block, x_ptr="*fp32")
    heads = {"HEADS": 32, "HALF": 64, "HEAD_BLOCK": 32, "HALF_BLOCK": 64}
    compiled(rope_triton._rope_forward, 4, {**heads, "ALL_HEADS": 48})
    compiled(rope_triton._rope_backward, 4, {**heads, "KV": 8, "KV_BLOCK": 8})
    tile = {"HEADS": 32, "WIDTH": 128, "TOKENS": 4, "HEAD_BLOCK": 8, "BLOCK": 128}
    rows, lse = ("i64",) * 3, ("*fp32", ("i64",) * 2)
    for to in ("*bf16", "*fp32"):
        parts = [(kind, rows) for kind in ("*bf16", "*bf16", "*fp32")]
        compiled(blockwise_attention_triton._blocks_sum, 4, tile, to=(to, rows), parts=tuple(parts))
        compiled(
            blockwise_attention_triton._blocks_merge,
            4,
            tile,
            to=(to, rows, *lse),
            parts=tuple((*part, *lse) for part in parts),
        )
    compiled(
        grouped_gemm_triton._fill_after,
        4,
        {"ROWS": grouped_gemm_triton.ROWS, "COLUMNS": grouped_gemm_triton.COLUMNS},
        end="*i32",
    )
    compiled(fp8_cast_triton._cast_largest, 8, {"WIDTH": 4096, **block})
    compiled(fp8_cast_triton._cast_largest_of_columns, 4, {"EACH": 64, "WIDTH": 1024}, parts_ptr="*fp32")
    for dtype, name in (("*fp8e4nv", "e4m3x2"), ("*fp8e5", "e5m2x2")):
        for one in (True, False):
            tile = {"PLAIN": True, "TRANSPOSED": True, "PER_ROW": one, "PER_COLUMN": one}
            tile |= {"TILE_ROWS": 64, "TILE_COLUMNS": 128}
            ptx = compiled(fp8_cast_triton._cast_tile, 8, tile, plain_ptr=dtype, transposed_ptr=dtype)
            # The GPU's own instruction, which keeps NaN.
            assert f"cvt.rn.satfinite.{name}.f32" in ptx
    packed()
    updates()


def updates() -> None:
    """Compile the optimizer kernels for each weight format."""
    arguments = dict.fromkeys(("lr", "decay", "beta1", "rest1", "beta2", "rest2", "momentum", "rest", "tiny"), "fp32")
    arguments |= {
        "constants_ptr": "*fp32",
        "scale_ptr": "*fp64",
        "do_update_ptr": "*i1",
        "step_ptr": "*i64",
        "num_decayed": "i32",
    }
    arguments |= dict.fromkeys(("row_ptr", "column_ptr", "new_row_ptr", "new_column_ptr", "squares_ptr"), "*fp32")
    arguments |= dict.fromkeys(("sums_ptr", "rate_ptr", "factor_ptr"), "*fp32")
    arguments |= dict.fromkeys(("unpadded_rows", "unpadded_columns"), "i32")
    moment = ("*u8", "*fp32", "*fp32", "*fp32")
    arguments |= {"exp_avg": moment, "exp_avg_sq": moment, "values_ptr": "*fp32", "average_ptr": "*fp32"}
    block, blocks = {"BLOCK": 1024}, {"BLOCKS": 4, "EACH": 256}
    split = {"high_ptr": "*i16", "low_ptr": "*i16"}, {"indices_ptr": None, "step_ptr": None}
    rounded = {"high_ptr": "*i16", "indices_ptr": "*i64"}, {"low_ptr": None}
    whole = {"high_ptr": "*fp32"}, {"low_ptr": None, "indices_ptr": None, "step_ptr": None}
    for (high, left_out), gradient in zip((split, rounded, whole), ("*i16", "*fp16", "*fp32"), strict=True):
        own = {**arguments, **high, "gradient_ptr": gradient}
        for moments in ("*fp32", "*i16"):
            short = {"indices_ptr": "*i64"} if moments == "*i16" else {}
            here = {name: None for name in left_out if name not in short and name != "step_ptr"}
            types = {**own, **short, "exp_avg_ptr": moments, "exp_avg_sq_ptr": moments}
            compiled(fused_adamw_triton._adamw, 4, {**block, **here}, fused=False, **types)
        alone = {**own, "exp_avg_ptr": "*fp32", "momentum_ptr": "*fp32"}
        both = {**alone, "exp_avg_sq_ptr": "*fp32"}
        compiled(fused_adamw_triton._adamw_int8, 4, {**blocks, **left_out}, fused=False, **alone)
        compiled(elementwise_updates_triton._lion, 4, {**block, **left_out}, fused=False, **alone)
        compiled(elementwise_updates_triton._sgd, 4, {**block, **left_out}, fused=False, **alone)
        compiled(elementwise_updates_triton._sgd, 4, {**block, **left_out, "momentum_ptr": None}, fused=False, **alone)
        tile = {"ROWS": factored_moments_triton.ROWS, "COLUMNS": factored_moments_triton.COLUMNS}
        for without in ({}, {"momentum_ptr": None}):
            compiled(
                factored_moments_triton._factored_adafactor, 4, {**tile, **left_out, **without}, fused=False, **alone
            )
            compiled(factored_moments_triton._factored_sm3, 4, {**tile, **left_out, **without}, fused=False, **alone)
        compiled(factored_moments_triton._factored_size, 4, tile, fused=False, **alone)
        compiled(elementwise_updates_triton._lamb_apply, 4, {**block, **left_out}, fused=False, **both)
        no_low = {name: value for name, value in left_out.items() if name == "low_ptr"}
        compiled(factored_moments_triton._factored_sums, 4, {**tile, **no_low}, fused=False, **alone)
        compiled(elementwise_updates_triton._lamb_moments, 4, {**block, **no_low}, fused=False, **both)
        compiled(elementwise_updates_triton._average, 4, {**block, **no_low}, fused=False, **alone)
        compiled(weight_formats_triton._halves_write, 4, {**block, **left_out}, **own)
    compiled(weight_formats_triton._halves_join, 4, block, **arguments, **split[0])


def packed() -> None:
    """Compile the kernels of saved activations."""
    bits, chunk = {"bits_ptr": "*u8", "flags_ptr": "*u8", "counts_ptr": "*i32"}, {"CHUNK": 2048}
    tile = {**chunk, "SIZE": 256}
    compiled(bitmask_triton._bits_relu, 4, tile, **bits)
    for kernel in (bitmask_triton._bits_masked, bitmask_triton._bits_pack, bitmask_triton._bits_unpack):
        compiled(kernel, 4, chunk, **bits)
    for kind, code in (("fp8", "*fp8e4nv"), ("int8", "*i8"), ("", "*bf16")):
        narrow = {"INT": kind == "int8", "SCALED": kind not in ("", "fp16")}
        read = {**tile, "SCALED": narrow["SCALED"]}
        types = {"codes_ptr": code, "values_ptr": code, "scales_ptr": "*fp32", "ends_ptr": "*i32", "bits_ptr": "*u8"}
        compiled(sparse_values_triton._sparse_compact, 4, {**tile, **narrow, "NARROW": bool(kind)}, **types)
        compiled(sparse_values_triton._sparse_expand, 4, read, **types)
        if kind:
            compiled(blockwise_cast_triton._blockwise_encode, 4, {**tile, **narrow}, **types)
            compiled(blockwise_cast_triton._blockwise_decode, 4, read, **types)
    window = {f"{name}_{dim}": 2 for name in ("STRIDE", "PADDING", "DILATION") for dim in (0, 1)}
    for kernel in (max_pool_triton._places_encode, max_pool_triton._places_decode):
        compiled(kernel, 4, {**window, "KERNEL": 3, "BLOCK": 1024}, size="i32", codes_ptr="*u8", indices_ptr="*i64")
    for each in (1, 8):
        pooled = {"DOWN": 2, "ACROSS": 2, "GROUPS": 256, "EACH": each}
        for kernel in (max_pool_triton._pool_maximum, max_pool_triton._pool_backward):
            compiled(kernel, 4, pooled, size="i32", codes_ptr="*u8")


if __name__ == "__main__":
    main()
