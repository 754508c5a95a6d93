"""The minimum bytes that a step moves outside its matmuls and attention, by part. No torch.

Each part is one pass over its inputs and outputs, with the residual added in the norm.
"""

from __future__ import annotations

from echelon.bench.measurement import Measurement

STATE_BYTES = {"float32": 4, "bfloat16": 2}


def min_bytes(measurement: Measurement) -> dict[str, float]:
    """Bytes per step, by category."""
    model, tokens = measurement.model, measurement.tokens
    width, ffn, layers = model.width, model.ffn, model.layers
    rotated = (model.heads + model.kv_heads) * model.head_dim
    element = 4 if measurement.precision == "fp32" else 2
    activations = tokens * element
    return {
        # forward reads and writes; backward reads the input and a gradient, and writes one; plus the final norm
        "norm": activations * (2 * layers + 1) * (2 + 3) * width,
        # in place, forward and backward, queries and keys
        "rope": activations * layers * 2 * 2 * rotated,
        # forward reads gate and up, and writes one; backward reads three and writes two
        "activation": activations * layers * (3 + 5) * ffn,
        # logits are read for the log-sum-exp, read again, and overwritten with their gradient
        "loss": activations * 3 * model.vocab,
        # vectors are read and written, forward and backward
        "embedding": activations * 4 * width,
        # the kernels that write gradients can sum their squares
        "gradient norm": 0.0,
        # master weights and two moments are read and written, the gradient is read; the bf16 weights are the upper
        # halves of the master weights
        "optimizer": model.parameters * (2 * 4 + 2 * 2 * STATE_BYTES[measurement.states] + element),
        "casts and copies": _fp8_cast_bytes(measurement),
    }


def _fp8_cast_bytes(measurement: Measurement) -> float:
    """Casts to fp8: the inputs of a layer's matmuls, three times each, read in 16 bits and written in 8."""
    if not measurement.precision.startswith("fp8"):
        return 0.0
    model = measurement.model
    return float(model.layers * measurement.tokens * 3 * (3 * model.width + model.ffn) * (2 + 1))
