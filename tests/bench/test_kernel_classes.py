from __future__ import annotations

import re
from pathlib import Path

import pytest

import echelon
from echelon.bench.measurement import Measurement
from echelon.bench.profile.kernel_classes import CATEGORIES, IDLE, KERNEL_PATTERNS, OTHER, kernel_category
from echelon.bench.profile.min_bytes import min_bytes

KERNELS = Path(echelon.__file__).parent / "kernels"
SAMPLES = {
    "nvjet_tst_192x192_64x4_2x1_v_bz_coopA_NNT": "matmuls",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off": "matmuls",
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm90<cutlass::gemm::kernel>>": "matmuls",
    "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn": "matmuls",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>": "matmuls",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_128x64x128": "attention",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t>>": "attention",
    "fmha_cutlassB_bf16_aligned_128x64_k128_sm80(PyTorchMemEffAttention::AttentionBackwardKernel)": "attention",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<LpNormFunctor<float, 2>>": "gradient norm",
    "void at::native::reduce_kernel<512, 1, ReduceOp<c10::BFloat16, NormTwoOps<float>>>": "gradient norm",
    "void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata, FusedAdamMathFunctor>": "optimizer",
    "_adamw": "optimizer",
    "_lion": "optimizer",
    "_halves_write": "optimizer",
    "_loss_and_gradient": "loss",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, LogSoftMaxForwardEpilogue>": "loss",
    "_norm_backward": "norm",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, true>": "norm",
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0": "norm",
    "_rope_forward": "rope",
    "_swiglu_backward": "activation",
    "void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel(at::TensorIteratorBase&)>": "activation",
    "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<c10::BFloat16>": "embedding",
    "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long, unsigned>": "embedding",
    "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<>": "embedding",
    "_cast_tile": "casts and copies",
    "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>": "casts and copies",
    "Memcpy DtoD (Device -> Device)": "casts and copies",
    "Memset (Device)": "casts and copies",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>": "casts and copies",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>": OTHER,
}


@pytest.mark.parametrize("name", SAMPLES)
def test_names_of_real_kernels(name):
    assert kernel_category(name) == SAMPLES[name]


def test_every_kernel_of_ours_has_a_part():
    texts = [path.read_text("utf-8") for path in KERNELS.rglob("*_triton.py")]
    started = {name for text in texts for name in re.findall(r"^ +(_\w+)\[", text, re.MULTILINE)}
    assert started, "how kernels are started has changed; look at this test"
    assert {name for name in started if kernel_category(name) == OTHER} == set()


def test_every_part_is_shown_once():
    assert sorted(CATEGORIES) == sorted({*KERNEL_PATTERNS, OTHER, IDLE})
    request = Measurement(who="echelon", shape="1b", size="llama-1b", seq_len=4096, batch=8, precision="bf16")
    assert {*min_bytes(request), "matmuls", "attention", OTHER, IDLE} == set(CATEGORIES)
