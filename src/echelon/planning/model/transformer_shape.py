"""The one function from a `ModelSpec` to the planner's `ModelShape`, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from echelon.models.attention_config import MLAConfig
from echelon.models.model_spec import ModelSpec, MoESpec
from echelon.planning.model import layer_families
from echelon.planning.model.layer_counts import LayerCounts
from echelon.planning.model.layer_families import LayerFamily
from echelon.planning.model.model_shape import (
    COLUMN_PARALLEL,
    ROUTER,
    ROW_PARALLEL,
    UNSPLIT,
    AttentionShape,
    LayerShape,
    MatmulShape,
    ModelShape,
)


def transformer_shape(spec: ModelSpec, family: LayerFamily | None = None) -> ModelShape:
    """The shape of a transformer. `family` counts what our kernels save and move, for a model that we build."""
    builder = _ShapeBuilder(spec, family)
    layers: tuple[tuple[LayerShape, int], ...] = ((builder.dense_layer(), spec.layers),)
    if spec.moe is not None:
        kinds = {False: builder.dense_layer(), True: builder.moe_layer(spec.moe)}
        layers = tuple((kinds[is_moe], len(list(run))) for is_moe, run in groupby(spec.moe.layers))
    return ModelShape(
        name=spec.name,
        width=spec.width,
        vocab=spec.vocab,
        layers=layers,
        tied=spec.tied,
        max_seq_len=spec.max_seq_len,
        position_parameters=spec.max_seq_len * spec.width if spec.learned_positions else 0,
        other_parameters=(2 if spec.biases else 1) * spec.width,
        experts=spec.moe.experts if spec.moe else 0,
        top_k=spec.moe.top_k if spec.moe else 0,
        dropout=spec.dropout,
    )


@dataclass(frozen=True)
class _ShapeBuilder:
    spec: ModelSpec
    family: LayerFamily | None

    @cached_property
    def attention(self) -> tuple[AttentionShape, tuple[MatmulShape, ...]]:
        return _mla(self.spec, self.spec.mla) if self.spec.mla is not None else _attention(self.spec)

    def dense_layer(self) -> LayerShape:
        spec = self.spec
        inner = _inner_elements(spec.ffn, spec.gated_mlp)
        return self._layer("dense", _mlp_matmuls(spec.width, spec.ffn, spec.gated_mlp), inner, None)

    def moe_layer(self, moe: MoESpec) -> LayerShape:
        spec = self.spec
        matmuls = [MatmulShape(name=ROUTER, inputs=spec.width, outputs=moe.experts, split=UNSPLIT)]
        matmuls += _mlp_matmuls(spec.width, moe.ffn, moe.gated, experts=moe.experts, share=moe.top_k)
        matmuls += _mlp_matmuls(spec.width, moe.shared_ffn, spec.gated_mlp) if moe.shared_ffn else []
        return self._layer("mixture", matmuls, _inner_elements(moe.shared_ffn, spec.gated_mlp), moe)

    def _layer(self, name: str, mlp: list[MatmulShape], inner: float, moe: MoESpec | None) -> LayerShape:
        """`inner` are the elements per token that the dense or shared MLP saves inside.

        Saved are the inputs of both norms, of qkv and of the MLP; q, k, v and the output of attention; what is inside
        the MLP. Dropout saves three masks of one byte, half an element each. Experts save the tokens that arrived and
        what is inside; the rank of the token saves what came back, which the gate's weights are yet to scale.
        """
        spec, (attention, projections) = self.spec, self.attention
        width, top_k = spec.width, moe.top_k if moe else 0
        expert_inner = _inner_elements(moe.ffn, moe.gated) if moe else 0
        q, kv = attention.heads * attention.head_dim, attention.kv_heads * (attention.head_dim + attention.value_dim)
        out = attention.heads * attention.value_dim
        between = sum(gemm.outputs for gemm in mlp if gemm.split == COLUMN_PARALLEL and not gemm.experts)
        biases = sum(gemm.outputs for gemm in projections) + (between + width if between else 0) if spec.biases else 0
        return LayerShape(
            name=name,
            matmuls=(*projections, *mlp),
            attention=attention,
            other_parameters=(4 if spec.biases else 2) * width + biases + spec.extra_parameters,
            saved_elements=4 * width + (1.5 * width if spec.dropout else 0) + width * top_k,
            saved_elements_tp=q + kv + out + inner,
            dispatched_elements=float(width * top_k),
            saved_elements_experts=float(expert_inner * top_k),
            moved_elements=10 * width + (4 * width if spec.dropout else 0) + 4 * width * top_k,
            moved_elements_tp=2 * (q + kv) + 1.5 * inner,
            moved_elements_experts=(2 * width + 1.5 * expert_inner) * top_k if moe else 0.0,
            fused=self._fused(self.family, moe) if self.family else None,
            unfused=self._fused(self.family, moe) + self._unfused_extra(self.family, moe) if self.family else None,
        )

    def _fused(self, family: LayerFamily, moe: MoESpec | None) -> LayerCounts:
        spec, attention = self.spec, self.attention[0]
        counts = family.residual(spec.width, spec.dropout) + family.attention(spec.width, attention, spec.mla)
        if moe is None:
            return counts + family.feed_forward(spec.width, spec.ffn)
        shared = family.feed_forward(spec.width, moe.shared_ffn) if moe.shared_ffn else None
        return counts + layer_families.moe_feed_forward(
            spec.width, moe.ffn, experts=moe.experts, top_k=moe.top_k, gated=moe.gated, shared_expert=shared
        )

    def _unfused_extra(self, family: LayerFamily, moe: MoESpec | None) -> LayerCounts:
        spec = self.spec
        counts = family.unfused_attention(spec.width, self.attention[0], spec.mla)
        if moe is None:
            return counts + family.unfused_feed_forward(spec.ffn)
        counts += layer_families.unfused_experts(moe.ffn, top_k=moe.top_k, gated=moe.gated)
        return counts + family.unfused_feed_forward(moe.shared_ffn)


def _inner_elements(ffn: int, gated: bool) -> int:
    """Elements per token saved inside an MLP: gate, up and their product; without a gate, before and after."""
    return (3 if gated else 2) * ffn


def _attention(spec: ModelSpec) -> tuple[AttentionShape, tuple[MatmulShape, ...]]:
    heads, kv_heads, dim = spec.heads, spec.kv_heads, spec.head_dim
    attention = AttentionShape(heads=heads, kv_heads=kv_heads, head_dim=dim, value_dim=dim, causal=spec.causal)
    outputs = (heads * dim, kv_heads * dim, kv_heads * dim)
    return attention, (
        MatmulShape(name="qkv", inputs=spec.width, outputs=sum(outputs), split=COLUMN_PARALLEL, fused_outputs=outputs),
        MatmulShape(name="out", inputs=heads * dim, outputs=spec.width, split=ROW_PARALLEL),
    )


def _mla(spec: ModelSpec, mla: MLAConfig) -> tuple[AttentionShape, tuple[MatmulShape, ...]]:
    width, heads = spec.width, spec.heads
    attention = AttentionShape(
        heads=heads,
        kv_heads=heads,
        head_dim=mla.head_dim,
        value_dim=mla.value_dim,
        latent_width=(mla.query_rank or width) + mla.kv_rank + mla.rope_dim,
        causal=spec.causal,
    )
    query_outputs, kv_outputs = heads * mla.head_dim, heads * (mla.nope_dim + mla.value_dim)
    queries = [("q", width, query_outputs, COLUMN_PARALLEL)]
    if mla.query_rank:
        queries = [("q down", width, mla.query_rank, UNSPLIT), ("q up", mla.query_rank, query_outputs, COLUMN_PARALLEL)]
    matmuls = [
        *queries,
        ("kv down", width, mla.kv_rank + mla.rope_dim, UNSPLIT),
        ("kv up", mla.kv_rank, kv_outputs, COLUMN_PARALLEL),
        ("out", heads * mla.value_dim, width, ROW_PARALLEL),
    ]
    return attention, tuple(MatmulShape(name=name, inputs=k, outputs=n, split=split) for name, k, n, split in matmuls)


def _mlp_matmuls(width: int, ffn: int, gated: bool, *, experts: int = 0, share: float = 1.0) -> list[MatmulShape]:
    fused = (ffn, ffn) if gated else ()
    outputs = ffn * (2 if gated else 1)
    up = MatmulShape(name="up", inputs=width, outputs=outputs, split=COLUMN_PARALLEL, fused_outputs=fused)
    down = MatmulShape(name="down", inputs=ffn, outputs=width, split=ROW_PARALLEL)
    return [replace(matmul, experts=experts, token_share=share) for matmul in (up, down)]
