"""LoRA adapters of a layer, by the patterns of `lora.targets`: what `add_lora` adds to its linears. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from echelon.layout.validation_error import ValidationIssue
from echelon.models.lora.lora_options import matches, split_patterns
from echelon.planning.model.model_shape import ROUTER, LayerShape, MatmulShape, ModelShape

OUR_LINEARS = {
    "qkv": ("attn.q", "attn.k", "attn.v"),
    "out": ("attn.o",),
    "q": ("attn.heads.q",),
    "q down": ("attn.q_down",),
    "q up": ("attn.heads.q",),
    "kv down": ("attn.kv_down",),
    "kv up": ("attn.heads.kv",),
    "up": ("mlp.gate", "mlp.up"),
    "down": ("mlp.down",),
}
"""names of the linears that a GEMM of our models has; a traced one has that of its weight"""


@dataclass(frozen=True, kw_only=True)
class AdapterShape:
    """The adapter of one linear."""

    gemm: MatmulShape
    """that of the linear, or of several that are fused"""
    outputs: int
    """of the linear"""
    name: str
    """the linear's, in its layer"""
    share: float = 1.0
    """of the layers that have it: a pattern may name one layer by its number"""

    @property
    def size(self) -> float:
        """Parameters for each of its rank."""
        return self.share * (self.gemm.inputs + self.outputs)


def adapter_shapes(shape: ModelShape, layer: LayerShape, targets: Sequence[str] = ()) -> Iterator[AdapterShape]:
    """Yield the adapters of a layer: of the linears that patterns match, or of all but experts and routers."""
    patterns = split_patterns(targets)
    for gemm in layer.matmuls:
        if gemm.experts or gemm.name == ROUTER:
            continue
        outputs = gemm.fused_outputs or (gemm.outputs,)
        names = OUR_LINEARS.get(gemm.name, (gemm.name,)) if shape.is_native else (gemm.name,) * len(outputs)
        for name, size in zip(names[-len(outputs) :], outputs, strict=True):
            share = min(1.0, sum(_share(name, pattern, shape.num_layers) for pattern in patterns)) if patterns else 1.0
            if share:
                yield AdapterShape(gemm=gemm, outputs=size, name=name, share=share)


def _share(name: str, pattern: str, num_layers: float) -> float:
    """The share of layers in which a pattern matches a linear."""
    if matches(name, pattern) or matches(f"blocks.*.{name}", pattern):
        return 1.0
    parts = pattern.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    if number is None or not matches(name, ".".join(parts[number + 1 :]) or "*"):
        return 0.0
    return 1.0 / max(num_layers, 1)


def target_issues(shape: ModelShape, targets: Sequence[str]) -> Iterator[ValidationIssue]:
    """Yield patterns that match no linear of a model's layers."""
    names = dict.fromkeys(adapter.name for layer, _ in shape.layers for adapter in adapter_shapes(shape, layer))
    for pattern in split_patterns(targets):
        if not any(True for layer, _ in shape.layers for _adapter in adapter_shapes(shape, layer, (pattern,))):
            message = f"matches no linear in the layers of {shape.name}"
            yield ValidationIssue("lora.targets", pattern, message, legal=f"patterns of {', '.join(names)}")
