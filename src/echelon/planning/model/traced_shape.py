"""From what was counted in a module's sections to a `ModelShape`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING

from echelon.planning.model.model_shape import AttentionShape, LayerShape, MatmulShape, ModelShape

if TYPE_CHECKING:
    from echelon.planning.model.op_counter import AttentionCall, SectionCounts, WeightlessMatmul, WeightUse


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a module that may become a layer."""

    name: str
    class_name: str
    """sections of one kind that did the same are one kind of layer"""
    modules: tuple[str, ...]
    """whose parameters are its own"""
    always_layer: bool = False
    """a layer even where it multiplies nothing"""


@dataclass(frozen=True, kw_only=True)
class ModuleCounts:
    """All that is known of a module after it was run."""

    sections: Sequence[Section]
    tallies: Mapping[str, SectionCounts]
    """by the name of the section"""
    weights: Mapping[str, tuple[int, ...]]
    """the shape of each parameter"""
    owners: Mapping[str, str]
    """from parameters to sections"""
    splits: Mapping[str, str]
    """how tensor parallelism divides each parameter"""
    tokens: int
    seq_len: int
    width: int
    """most elements per token that one section hands to the next"""
    supports_cp: bool
    """context parallelism can cut its sequences"""


@dataclass(frozen=True, kw_only=True)
class EmbeddingAndHead:
    """The two ends of a language model: a table of tokens and the matrix of the head. Empty where there is no head."""

    vocab: int = 0
    width: int = 0
    token_table: str = ""
    head: WeightUse | None = None
    position_tables: tuple[str, ...] = ()
    """tables of learned positions"""

    @property
    def weights(self) -> set[str]:
        return {self.token_table, *self.position_tables, self.head.weight if self.head else ""}


def build_shape(name: str, counts: ModuleCounts) -> ModelShape:
    ends = _find_embedding_and_head(counts)
    kept = list(_layer_sections(counts, ends))
    # What the layers share is held once; spread over them it is in the sum.
    spread = sum(counts.tallies[section.name].shared_elements for section, _ in kept) / max(len(kept), 1)
    layers = [_layer(counts, section, rows, ends, spread) for section, rows in kept]
    mixtures = [product for layer in layers for product in layer.matmuls if product.experts]
    positions = [counts.weights[table] for table in ends.position_tables]
    found = ModelShape(
        name=name,
        width=ends.width or counts.width,
        vocab=ends.vocab,
        layers=tuple((layer, len(list(run))) for layer, run in groupby(layers)),
        tied=ends.head is not None and ends.head.weight == ends.token_table,
        max_seq_len=max((rows for rows, _ in positions), default=0),
        position_parameters=sum(map(prod, positions)),
        experts=max((product.experts for product in mixtures), default=0),
        top_k=round(max((product.token_share for product in mixtures), default=0)),
        supports_cp=counts.supports_cp,
    )
    return replace(found, other_parameters=sum(map(prod, counts.weights.values())) - found.parameters)


def _find_embedding_and_head(counts: ModuleCounts) -> EmbeddingAndHead:
    tables = {name: rows for tally in counts.tallies.values() for name, rows in tally.lookup_rows.items()}
    used = [product for tally in counts.tallies.values() for product in tally.matmul_rows]
    of_tokens = (name for name, rows in tables.items() if rows == counts.tokens)
    for table in sorted(of_tokens, key=lambda name: prod(counts.weights[name]), reverse=True):
        vocab, width = counts.weights[table]
        heads = [product for product in used if (product.inputs, product.outputs) == (width, vocab)]
        if heads:
            least = max(counts.seq_len, 2)
            fits = {name for name in tables if counts.weights[name][0] >= least and counts.weights[name][1] == width}
            positions = tuple(sorted(fits - {table}))
            return EmbeddingAndHead(
                vocab=vocab, width=width, token_table=table, head=heads[-1], position_tables=positions
            )
    return EmbeddingAndHead()


def _layer_sections(counts: ModuleCounts, ends: EmbeddingAndHead) -> Iterator[tuple[Section, dict[WeightUse, int]]]:
    """The sections that are layers, and the rows that passed each of their matrices."""
    for section in counts.sections:
        tally = counts.tallies.get(section.name)
        if tally is None:
            continue
        rows = {used: number for used, number in tally.matmul_rows.items() if used != ends.head}
        if section.always_layer or rows or tally.attention_calls or tally.weightless_matmuls:
            yield section, rows


def _layer(
    counts: ModuleCounts, section: Section, rows: Mapping[WeightUse, int], ends: EmbeddingAndHead, spread: float
) -> LayerShape:
    tally = counts.tallies[section.name]
    own = {name for name, owner in counts.owners.items() if owner == section.name}
    own |= {used.weight for used in rows if used.weight not in counts.owners}
    parameters = sum(prod(counts.weights[name]) for name in own - ends.weights)
    products = tuple(_matmul(counts, section, used, number) for used, number in rows.items())
    attention, rest = _attention(counts, tally)
    return LayerShape(
        name=section.class_name,
        matmuls=products,
        attention=attention,
        # Below 0 where an earlier layer has the matrices that this one uses.
        other_parameters=parameters - sum(product.parameters for product in products),
        saved_elements=(tally.saved_elements + spread) / counts.tokens,
        saved_elements_tp=tally.saved_elements_tp / counts.tokens,
        moved_elements=tally.moved_elements / counts.tokens,
        moved_elements_tp=tally.moved_elements_tp / counts.tokens,
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
    )


def _attention(counts: ModuleCounts, tally: SectionCounts) -> tuple[AttentionShape | None, float]:
    """The attention of a section, and the FLOPs per token of all other products without weights.

    Several of one kind are one with more heads. Those of another kind, or to another sequence, are counted among the
    others: what they cost is right for the length that was traced.
    """
    sequences = counts.tokens // counts.seq_len
    plain, squares = _pair_attention(tally.weightless_matmuls)
    every = [*tally.attention_calls, *plain]
    total = (sum(one.flops for one in every) + sum(square.flops for square in squares)) / counts.tokens
    own = [one for one in every if one.queries == one.keys == counts.seq_len > 1 and not one.count % sequences]
    if not own:
        return None, total
    same = [one for one in own if _attention_dims(one) == _attention_dims(own[0])]
    found = AttentionShape(
        heads=sum(one.count for one in same) // sequences,
        kv_heads=sum(one.kv_count for one in same) // sequences,
        head_dim=own[0].head_dim,
        value_dim=own[0].value_dim,
        causal=own[0].causal,
    )
    return found, total - sum(one.flops for one in same) / counts.tokens


def _attention_dims(one: AttentionCall) -> tuple[int, int, bool]:
    return one.head_dim, one.value_dim, one.causal


def _pair_attention(squares: Sequence[WeightlessMatmul]) -> tuple[list[AttentionCall], list[WeightlessMatmul]]:
    """Attention that is written out, scores and then their product with the values, and what is left."""
    from echelon.planning.model.op_counter import AttentionCall

    found, left, index = [], [], 0
    while index < len(squares):
        scores, values = squares[index], squares[min(index + 1, len(squares) - 1)]
        if values is not scores and (scores.count, scores.m, scores.n) == (values.count, values.m, values.k):
            sizes = {"queries": scores.m, "keys": scores.n, "head_dim": scores.k, "value_dim": values.n}
            found.append(AttentionCall(count=scores.count, kv_count=scores.count, causal=False, **sizes))
            index += 2
        else:
            left.append(scores)
            index += 1
    return found, left
