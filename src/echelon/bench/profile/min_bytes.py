"""The fewest bytes that a step must move outside its products and attention, by part. No torch.

Counted for kernels that do each part in one pass, with the residual added in the norm: what a part reads and writes of
its own, and nothing twice.
"""

from __future__ import annotations

from echelon.bench.measurement import Measurement

STATE_BYTES = {"float32": 4, "bfloat16": 2}


def min_bytes(request: Measurement) -> dict[str, float]:
    """Bytes of one step, by category."""
    model, tokens = request.model, request.tokens
    width, ffn, layers = model.width, model.ffn, model.layers
    turned = (model.heads + model.kv_heads) * model.head_dim
    element = 4 if request.precision == "fp32" else 2
    activations = tokens * element
    return {
        # forward reads and writes; backward reads the input and a gradient, and writes one. The last norm has no layer.
        "norm": activations * (2 * layers + 1) * (2 + 3) * width,
        # in place, forward and backward, queries and keys
        "rope": activations * layers * 2 * 2 * turned,
        # forward reads gate and up, and writes one; backward reads three and writes two
        "activation": activations * layers * (3 + 5) * ffn,
        # logits are read for the sum, read again, and their gradient is written in their place
        "loss": activations * 3 * model.vocab,
        # rows are read and written, forward and backward
        "embedding": activations * 4 * width,
        # where gradients are written their squares can be summed
        "gradient norm": 0.0,
        # master weights and two means are read and written, the gradient is read. The weights that products read are
        # the upper halves of the master weights.
        "optimizer": model.parameters * (2 * 4 + 2 * 2 * STATE_BYTES[request.states] + element),
        "casts and copies": _fp8_cast_bytes(request),
    }


def _fp8_cast_bytes(request: Measurement) -> float:
    """Bytes that become 8 bits: the inputs of a layer's products three times over, read in 16 bits and written in 8."""
    if not request.precision.startswith("fp8"):
        return 0.0
    model = request.model
    return float(model.layers * request.tokens * 3 * (3 * model.width + model.ffn) * (2 + 1))
