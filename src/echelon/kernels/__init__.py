"""Triton kernels beside the plain torch they replace.

Each operator is a pair of files: `residual_norm.py` has the function that models call, its plain torch version and its
autograd function; `residual_norm_triton.py` has the kernels, and is imported only when a tensor on a GPU needs it
(`dispatch.py`).

dispatch         which calls run Triton         kernel_launch    compiled-kernel cache, grid sizes
tensor_metadata  row maxima and recompute       tensor_spec      shape, strides and dtype of a tensor
                 functions attached to tensors  memory_limits    sizes shared with the planner (no torch)

attention/    blockwise attention with log-sum-exp, torch's SDPA kernels, RoPE
layers/       RMSNorm, SwiGLU, cross entropy of the LM head
gemm/         fused linear layers, grouped GEMM, FP8 casts
optim/        AdamW and other updates, fp32 weights split into two halves, stochastic rounding
activations/  formats of compressed saved activations: bitmasks, sparse values, blockwise casts, max-pool indices
"""
