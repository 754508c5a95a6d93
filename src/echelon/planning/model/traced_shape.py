"""Builds a `ModelShape` from the counts of a traced module's sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING

from echelon.models.pipeline_model import is_within
from echelon.planning.model.layout_support import ModelSupport
from echelon.planning.model.model_shape import AttentionShape, LayerShape, MatmulShape, ModelShape

if TYPE_CHECKING:
    from echelon.planning.model.op_counter import AttentionCall, SectionCounts, WeightlessMatmul, WeightUse


@dataclass(frozen=True)
class Section:
    """A part of a module that may become a layer."""

    name: str
    class_name: str
    """sections of one class with equal counts are one layer, repeated"""
    modules: tuple[str, ...]
    """modules whose parameters it has"""
    always_layer: bool = False
    """a layer even without a GEMM"""


@dataclass(frozen=True, kw_only=True)
class ModuleCounts:
    """Counts and parameters of a traced module."""

    sections: Sequence[Section]
    by_section: Mapping[str, SectionCounts]
    weights: Mapping[str, tuple[int, ...]]
    """the shape of each parameter"""
    owners: Mapping[str, str]
    """section of each parameter"""
    splits: Mapping[str, str]
    """how tp splits each parameter"""
    gathered: Sequence[str]
    """modules that get full sequences under context parallelism"""
    tokens: int
    seq_len: int
    width: int
    """most elements per token between sections"""
    support: ModelSupport
    """what its modules declare"""
    is_trainable: bool
    """train accepts its modules"""


@dataclass(frozen=True)
class EmbeddingAndHead:
    """The token embedding and the head of a language model; empty without a head."""

    vocab: int = 0
    width: int = 0
    token_table: str = ""
    head: WeightUse | None = None
    position_tables: tuple[str, ...] = ()
    """learned positions"""

    @property
    def weights(self) -> set[str]:
        return {self.token_table, *self.position_tables, self.head.weight if self.head else ""}


def build_shape(name: str, counts: ModuleCounts) -> ModelShape:
    ends = _find_embedding_and_head(counts)
    sections = list(_layer_sections(counts, ends))
    # Shared tensors are saved once; their size is divided among the layers.
    spread = sum(counts.by_section[section.name].shared_elements for section, _ in sections) / max(len(sections), 1)
    layers = [_layer(counts, section, rows, ends, spread) for section, rows in sections]
    expert_gemms = [gemm for layer in layers for gemm in layer.matmuls if gemm.experts]
    positions = [counts.weights[table] for table in ends.position_tables]
    shape = ModelShape(
        name=name,
        width=ends.width or counts.width,
        vocab=ends.vocab,
        layers=tuple((layer, len(list(run))) for layer, run in groupby(layers)),
        tied=ends.head is not None and ends.head.weight == ends.token_table,
        max_seq_len=max((rows for rows, _ in positions), default=0),
        traced_seq_len=counts.seq_len,
        position_parameters=sum(map(prod, positions)),
        experts=max((gemm.experts for gemm in expert_gemms), default=0),
        top_k=round(max((gemm.token_share for gemm in expert_gemms), default=0)),
        support=counts.support,
        trainable=counts.is_trainable,
    )
    return replace(shape, other_parameters=sum(map(prod, counts.weights.values())) - shape.parameters)


def _find_embedding_and_head(counts: ModuleCounts) -> EmbeddingAndHead:
    shapes, sections = counts.weights, counts.by_section.values()
    tables = {name: rows for section in sections for name, rows in section.lookup_rows.items()}
    used = [gemm for section in sections for gemm in section.matmul_rows]
    token_tables = (name for name, rows in tables.items() if rows == counts.tokens)
    for table in sorted(token_tables, key=lambda name: prod(shapes[name]), reverse=True):
        vocab, width = shapes[table]
        heads = [gemm for gemm in used if (gemm.inputs, gemm.outputs) == (width, vocab)]
        if heads:
            least = max(counts.seq_len, 2)
            fitting = {name for name in tables if shapes[name][0] >= least and shapes[name][1] == width}
            positions = tuple(sorted(fitting - {table}))
            return EmbeddingAndHead(vocab, width, token_table=table, head=heads[-1], position_tables=positions)
    return EmbeddingAndHead()


def _layer_sections(counts: ModuleCounts, ends: EmbeddingAndHead) -> Iterator[tuple[Section, dict[WeightUse, int]]]:
    """The sections that are layers, with the input rows of their GEMMs."""
    for section in counts.sections:
        section_counts = counts.by_section.get(section.name)
        if section_counts is None:
            continue
        rows = {used: number for used, number in section_counts.matmul_rows.items() if used != ends.head}
        if section.always_layer or rows or section_counts.attention_calls or section_counts.weightless_matmuls:
            yield section, rows


def _layer(
    counts: ModuleCounts, section: Section, rows: Mapping[WeightUse, int], ends: EmbeddingAndHead, spread: float
) -> LayerShape:
    section_counts = counts.by_section[section.name]
    names = {name for name, owner in counts.owners.items() if owner == section.name}
    names |= {used.weight for used in rows if used.weight not in counts.owners}
    parameters = sum(prod(counts.weights[name]) for name in names - ends.weights)
    matmuls = tuple(_matmul(counts, section, used, number) for used, number in rows.items())
    attention, rest = _attention(counts, section_counts)
    return LayerShape(
        name=section.class_name,
        matmuls=matmuls,
        attention=attention,
        # Negative where an earlier layer has the weights of this one.
        other_parameters=parameters - sum(gemm.parameters for gemm in matmuls),
        saved_elements=(section_counts.saved_elements + spread) / counts.tokens,
        saved_elements_tp=section_counts.saved_elements_tp / counts.tokens,
        moved_elements=section_counts.moved_elements / counts.tokens,
        moved_elements_tp=section_counts.moved_elements_tp / counts.tokens,
        gathered_modules=sum(any(is_within(name, owner) for owner in section.modules) for name in counts.gathered),
        gathered_saved=_share(
            section_counts.gathered_saved,
            section_counts.saved_elements + section_counts.saved_elements_tp + spread,
        ),
        gathered_moved=_share(
            section_counts.gathered_moved, section_counts.moved_elements + section_counts.moved_elements_tp
        ),
        other_flops=rest,
    )


def _matmul(counts: ModuleCounts, section: Section, used: WeightUse, rows: int) -> MatmulShape:
    owner = next((name for name in section.modules if name and used.weight.startswith(f"{name}.")), "")
    return MatmulShape(
        name=used.weight.removeprefix(f"{owner}.").removesuffix(".weight"),
        inputs=used.inputs,
        outputs=used.outputs,
        split=counts.splits[used.weight],
        experts=used.experts,
        token_share=rows / counts.tokens,
        is_gathered=any(is_within(used.weight, name) for name in counts.gathered),
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _attention(counts: ModuleCounts, section_counts: SectionCounts) -> tuple[AttentionShape | None, float]:
    """The attention of a section, and the FLOPs per token of all other GEMMs without weights.

    Several calls with equal dims become one with more heads. Other dims and cross attention count among the others,
    whose cost is that of the traced length.
    """
    sequences = counts.tokens // counts.seq_len
    plain, squares = _pair_attention(section_counts.weightless_matmuls)
    every = [*section_counts.attention_calls, *plain]
    total = (sum(one.flops for one in every) + sum(square.flops for square in squares)) / counts.tokens
    matching = [one for one in every if one.queries == one.keys == counts.seq_len > 1 and not one.count % sequences]
    if not matching:
        return None, total
    same = [one for one in matching if _attention_dims(one) == _attention_dims(matching[0])]
    head_dim, value_dim, causal = _attention_dims(matching[0])
    attention = AttentionShape(
        heads=sum(call.count for call in same) // sequences,
        kv_heads=sum(call.kv_count for call in same) // sequences,
        head_dim=head_dim,
        value_dim=value_dim,
        causal=causal,
    )
    return attention, total - sum(one.flops for one in same) / counts.tokens


def _attention_dims(one: AttentionCall) -> tuple[int, int, bool]:
    return one.head_dim, one.value_dim, one.causal


def _pair_attention(squares: Sequence[WeightlessMatmul]) -> tuple[list[AttentionCall], list[WeightlessMatmul]]:
    """Unfused attention (a GEMM of scores, then one with the values), and the other GEMMs."""
    from echelon.planning.model.op_counter import AttentionCall

    calls, others, left = [], [], list(squares)
    while left:
        scores = left.pop(0)
        if left and (scores.count, scores.m, scores.n) == (left[0].count, left[0].m, left[0].k):
            sizes = {"queries": scores.m, "keys": scores.n, "head_dim": scores.k, "value_dim": left.pop(0).n}
            kv_count = round(scores.count * scores.distinct)
            calls.append(AttentionCall(count=scores.count, kv_count=kv_count, causal=False, **sizes))
        else:
            others.append(scores)
    return calls, others
