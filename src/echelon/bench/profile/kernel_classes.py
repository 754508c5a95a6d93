"""The part of a step that a GPU kernel belongs to, by its name: the first pattern that matches decides.

Our Triton kernels have the names of their functions. One name of a torch or vendor kernel may match several patterns (a
flash attention built from cutlass parts), so their order matters. Kernels that match none are "other", and a profile
lists them by name.
"""

from __future__ import annotations

import re

IDLE, OTHER = "idle", "other"
KERNEL_PATTERNS = {
    "attention": r"flash|fmha|sdpa|attention|cudnn",
    "matmuls": r"nvjet|gemm|gemv|xmma|cutlass|cublas|splitk|matmul|scaled_mm",
    "gradient norm": r"lpnorm|norm(two)?ops|(grad|gradients?)_?norm|squares",
    "optimizer": r"adam|sgd|optimizer|multi_tensor_apply|^_(lion|average|halves|lamb|factored)",
    "loss": r"loss|cross_?entropy|softmax|logsumexp",
    "norm": r"norm|rsqrt|gammabeta",
    "rope": r"rope|rotary|rotate",
    "activation": r"swiglu|silu|gelu|glu",
    "embedding": r"embedding|index|gather|scatter|radix|segment|compute_grad_weight",
    "casts and copies": r"cast|quant|amax|copy|memcpy|memset|fill|catarray|transpose"
    r"|^_(bits|sparse|blockwise|places|pool)_",
}
CATEGORIES = (
    *("matmuls", "attention", "norm", "rope", "activation", "loss", "embedding"),
    *("gradient norm", "optimizer", "casts and copies", OTHER, IDLE),
)
"""in the order of tables and pictures"""
_COMPILED_PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in KERNEL_PATTERNS.items()}


def kernel_category(kernel: str) -> str:
    """The part of a step that a kernel belongs to.

    >>> kernel_category("nvjet_tst_192x192_64x4_2x1_v_bz_coopA_NNT"), kernel_category("_swiglu_backward")
    ('matmuls', 'activation')
    """
    return next((name for name, pattern in _COMPILED_PATTERNS.items() if pattern.search(kernel)), OTHER)
