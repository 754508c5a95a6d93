"""From what was counted in a module's sections to a `ModelShape`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING

from echelon.planning.model.model_shape import Attention, Layer, ModelShape, Product

if TYPE_CHECKING:
    from echelon.planning.model.op_counter import Attended, Square, Tally, Used


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a module that may become a layer."""

    name: str
    kind: str
    """sections of one kind that did the same are one kind of layer"""
    modules: tuple[str, ...]
    """whose parameters are its own"""
    kept: bool = False
    """a layer even where it multiplies nothing"""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """All that is known of a module after it was run."""

    sections: Sequence[Section]
    tallies: Mapping[str, Tally]
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
    can_cut: bool
    """context parallelism can cut its sequences"""


@dataclass(frozen=True, kw_only=True)
class Ends:
    """The two ends of a language model: a table of tokens and the matrix of the head. Empty where there is no head."""

    vocab: int = 0
    width: int = 0
    table: str = ""
    head: Used | None = None
    positions: tuple[str, ...] = ()
    """tables of learned positions"""

    @property
    def weights(self) -> set[str]:
        return {self.table, *self.positions, self.head.weight if self.head else ""}


def assembled(name: str, counts: Counts) -> ModelShape:
    ends = _ends(counts)
    kept = list(_kept(counts, ends))
    # What the layers share is held once; spread over them it is in the sum.
    spread = sum(counts.tallies[section.name].shared for section, _ in kept) / max(len(kept), 1)
    layers = [_layer(counts, section, rows, ends, spread) for section, rows in kept]
    mixtures = [product for layer in layers for product in layer.products if product.experts]
    positions = [counts.weights[table] for table in ends.positions]
    found = ModelShape(
        name=name,
        width=ends.width or counts.width,
        vocab=ends.vocab,
        layers=tuple((layer, len(list(run))) for layer, run in groupby(layers)),
        tied=ends.head is not None and ends.head.weight == ends.table,
        max_seq_len=max((rows for rows, _ in positions), default=0),
        position_parameters=sum(map(prod, positions)),
        experts=max((product.experts for product in mixtures), default=0),
        top_k=round(max((product.share for product in mixtures), default=0)),
        can_cut=counts.can_cut,
    )
    return replace(found, other_parameters=sum(map(prod, counts.weights.values())) - found.parameters)


def _ends(counts: Counts) -> Ends:
    tables = {name: rows for tally in counts.tallies.values() for name, rows in tally.tables.items()}
    used = [product for tally in counts.tallies.values() for product in tally.rows]
    of_tokens = (name for name, rows in tables.items() if rows == counts.tokens)
    for table in sorted(of_tokens, key=lambda name: prod(counts.weights[name]), reverse=True):
        vocab, width = counts.weights[table]
        heads = [product for product in used if (product.inputs, product.outputs) == (width, vocab)]
        if heads:
            least = max(counts.seq_len, 2)
            fits = {name for name in tables if counts.weights[name][0] >= least and counts.weights[name][1] == width}
            positions = tuple(sorted(fits - {table}))
            return Ends(vocab=vocab, width=width, table=table, head=heads[-1], positions=positions)
    return Ends()


def _kept(counts: Counts, ends: Ends) -> Iterator[tuple[Section, dict[Used, int]]]:
    """The sections that are layers, and the rows that passed each of their matrices."""
    for section in counts.sections:
        tally = counts.tallies.get(section.name)
        if tally is None:
            continue
        rows = {used: number for used, number in tally.rows.items() if used != ends.head}
        if section.kept or rows or tally.attended or tally.squares:
            yield section, rows


def _layer(counts: Counts, section: Section, rows: Mapping[Used, int], ends: Ends, spread: float) -> Layer:
    tally = counts.tallies[section.name]
    own = {name for name, owner in counts.owners.items() if owner == section.name}
    own |= {used.weight for used in rows if used.weight not in counts.owners}
    parameters = sum(prod(counts.weights[name]) for name in own - ends.weights)
    products = tuple(_product(counts, section, used, number) for used, number in rows.items())
    attention, rest = _attention(counts, tally)
    return Layer(
        name=section.kind,
        products=products,
        attention=attention,
        # Below 0 where an earlier layer has the matrices that this one uses.
        other_parameters=parameters - sum(product.parameters for product in products),
        saved=(tally.saved + spread) / counts.tokens,
        saved_split=tally.saved_split / counts.tokens,
        passed=tally.passed / counts.tokens,
        passed_split=tally.passed_split / counts.tokens,
        other_flops=rest,
    )


def _product(counts: Counts, section: Section, used: Used, rows: int) -> Product:
    owner = next((name for name in section.modules if name and used.weight.startswith(f"{name}.")), "")
    return Product(
        name=used.weight.removeprefix(f"{owner}.").removesuffix(".weight"),
        inputs=used.inputs,
        outputs=used.outputs,
        split=counts.splits[used.weight],
        experts=used.experts,
        share=rows / counts.tokens,
    )


def _attention(counts: Counts, tally: Tally) -> tuple[Attention | None, float]:
    """The attention of a section, and the FLOPs per token of all other products without weights.

    Several of one kind are one with more heads. Those of another kind, or to another sequence, are counted among the
    others: what they cost is right for the length that was traced.
    """
    sequences = counts.tokens // counts.seq_len
    plain, squares = _paired(tally.squares)
    every = [*tally.attended, *plain]
    total = (sum(one.flops for one in every) + sum(square.flops for square in squares)) / counts.tokens
    own = [one for one in every if one.queries == one.keys == counts.seq_len > 1 and not one.count % sequences]
    if not own:
        return None, total
    same = [one for one in own if _sizes(one) == _sizes(own[0])]
    found = Attention(
        heads=sum(one.count for one in same) // sequences,
        kv_heads=sum(one.kv_count for one in same) // sequences,
        head_dim=own[0].head_dim,
        value_dim=own[0].value_dim,
        causal=own[0].causal,
    )
    return found, total - sum(one.flops for one in same) / counts.tokens


def _sizes(one: Attended) -> tuple[int, int, bool]:
    return one.head_dim, one.value_dim, one.causal


def _paired(squares: Sequence[Square]) -> tuple[list[Attended], list[Square]]:
    """Attention that is written out, scores and then their product with the values, and what is left."""
    from echelon.planning.model.op_counter import Attended

    found, left, index = [], [], 0
    while index < len(squares):
        scores, values = squares[index], squares[min(index + 1, len(squares) - 1)]
        if values is not scores and (scores.count, scores.m, scores.n) == (values.count, values.m, values.k):
            sizes = {"queries": scores.m, "keys": scores.n, "head_dim": scores.k, "value_dim": values.n}
            found.append(Attended(count=scores.count, kv_count=scores.count, causal=False, **sizes))
            index += 2
        else:
            left.append(scores)
            index += 1
    return found, left
