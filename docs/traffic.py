"""Bytes that a rank sends for one layer, from the strategies' cost functions: for tables.py and for the pictures.

Forward and backward of one layer in bfloat16, bytes that pass a rank's link.
"""

from __future__ import annotations

from collections.abc import Iterable

from echelon.layout import Layout
from echelon.layout.collective import Collective, wire_bytes
from echelon.layout.rules import head_parallel_size
from echelon.memory.offload import cost as offload_cost
from echelon.parallel.cp import cost as cp_cost
from echelon.parallel.tp import cost as tp_cost
from echelon.parallel.tp_grid import cost as tp_grid_cost
from echelon.planning.cluster import cluster as clusters
from echelon.planning.cost.cp_traffic import cp_working_bytes
from echelon.planning.explain import explain_kinds as explain_kinds
from echelon.planning.model.model_shape import COLUMN_PARALLEL, ROW_PARALLEL, LayerShape
from echelon.planning.model.model_sources import resolve_shape
from echelon.planning.scenario import PlanRequest, Scenario
from echelon.planning.search.layout_search import search_plans

SIZE, LOSS = 2, 4
"""bytes of an activation, and of norm statistics"""
CONTEXT_MODEL, LENGTH = "llama-8b", 131072
GRID_MODEL, SEQUENCES, GRID_LENGTH, DEPTH = "llama-70b", 64, 4096, 4


def context_collectives(layout: Layout, seq_len: int) -> list[Collective]:
    """Return the collectives of one sequence."""
    (layer, _), *_ = resolve_shape(CONTEXT_MODEL).layers
    attention = layer.attention
    assert attention is not None
    widths = cp_cost.AttentionWidths(
        queries=attention.heads * attention.head_dim,
        keys_and_values=attention.kv_heads * (attention.head_dim + attention.value_dim),
        kv_heads=attention.kv_heads,
    )
    return list(cp_cost.collectives(layout, widths, layers=1, batch=1, seq_len=seq_len, element_bytes=SIZE))


def context_bytes(layout: Layout, seq_len: int, *, hidden: bool) -> float:
    """Return the bytes sent, with or without those that attention overlaps."""
    sizes = {"ulysses": layout.ulysses, "ring": layout.cp // layout.ulysses, "cp": layout.cp}
    return _wire((item for item in context_collectives(layout, seq_len) if hidden or not item.overlapped), sizes)


def tensor_bytes(layout: Layout, seq_len: int) -> float:
    """Return the bytes sent for a microbatch of sequences of this length."""
    (layer, _), *_ = resolve_shape(GRID_MODEL).layers
    width = resolve_shape(GRID_MODEL).width
    sizes = tp_cost.TransformerSizes(
        layers=1,
        width=width,
        batch=layout.microbatch,
        seq_len=seq_len,
        dropout=False,
        element_bytes=SIZE,
        loss_bytes=LOSS,
    )
    if layout.tp_kind == "1d":
        each = {width: 4}  # into two regions and out of them, in both passes
        found: Iterable[Collective] = tp_cost.sequence_parallel_collectives(sizes, layout, each, each)
        return _wire(found, {"tp": layout.tp})
    found = tp_grid_cost.collectives([(part, 0) for part in _parts(layer, layout)], layout, sizes)
    grid = tp_cost.grid_shape(layout)
    return _wire(found, {"z": grid.z, "y": grid.y, "x": grid.x})


def _parts(layer: LayerShape, layout: Layout) -> list[tp_grid_cost.ModuleSizes]:
    norm = tp_grid_cost.NormSizes(reduced=1, gathered=0)
    parts: list[tp_grid_cost.ModuleSizes] = [norm, norm]
    for product in layer.matmuls:
        assert product.split in (COLUMN_PARALLEL, ROW_PARALLEL)
        leaves = product.split == ROW_PARALLEL
        parts.append(
            tp_grid_cost.linear_sizes(layout, product.inputs, product.outputs, leaves_region=leaves, shares_input=False)
        )
    return parts


def _wire(collectives: Iterable[Collective], ranks: dict[str, int]) -> float:
    return sum(item.count * wire_bytes(item.op, item.bytes, ranks[item.axis]) for item in collectives)


# -- lines ------------------------------------------------------------------------------------------------------------


def context_layout(kind: str, ranks: int) -> Layout | None:
    """Of `ranks` ranks, at most eight of which exchange heads where there is a ring. None where heads do not divide."""
    inner = {"ulysses": ranks, "ring-ulysses": min(8, ranks // 2)}.get(kind, 1)
    (layer, _), *_ = resolve_shape(CONTEXT_MODEL).layers
    assert layer.attention is not None
    can = layer.attention.heads % inner == 0 and (kind != "ring-ulysses" or inner > 1)
    return Layout(cp=ranks, cp_kind=kind, ulysses=inner) if can else None


def tensor_layout(kind: str, ranks: int) -> Layout | None:
    """A grid of ranks, in DEPTH layers if it has any. None where there is none, or heads do not divide."""
    layout = Layout(tp=ranks, tp_kind=kind, depth=DEPTH if kind == "2.5d" else 1, microbatch=SEQUENCES)
    side = head_parallel_size(layout)
    (layer, _), *_ = resolve_shape(GRID_MODEL).layers
    assert layer.attention is not None
    return layout if side is not None and layer.attention.heads % side == 0 else None


# -- tables -----------------------------------------------------------------------------------------------------------

KINDS = ("cp=8", "cp=8,cp_kind=gather", "cp=8,cp_kind=ulysses", "cp=8,cp_kind=ring-ulysses,ulysses=4")


def kinds() -> list[tuple[str, ...]]:
    """(layout, collectives of a layer, overlapped share, bytes a token and layer, buffer bytes) on 8 ranks."""
    rows = []
    for text in KINDS:
        layout = Layout.parse(text)
        counts: dict[str, int] = {}
        for item in context_collectives(layout, LENGTH):
            name = f"{_WORDS[item.op]} of {item.purpose}"
            counts[name] = counts.get(name, 0) + item.count
        total, waited = (context_bytes(layout, LENGTH, hidden=hidden) for hidden in (True, False))
        case = Scenario(
            shape=resolve_shape(CONTEXT_MODEL), cluster=clusters.parse_cluster("8xh100"), layout=layout, seq_len=LENGTH
        )
        rows.append(
            (
                f"`{text}`",
                ", ".join(f"{count} {name}" for name, count in counts.items()),
                f"{1 - waited / total:.0%}" if waited < total else "-",
                f"{total / (LENGTH / layout.cp) / 2**10:.0f} KiB",
                f"{cp_working_bytes(case) / 2**30:.1f} GiB",
            )
        )
    return rows


_WORDS = {"send": "sends", "all_gather": "all-gathers", "reduce_scatter": "reduce-scatter", "all_to_all": "all-to-alls"}


def reasons() -> list[str]:
    """The planner's reasons for a kind, for a long sequence."""
    wish = PlanRequest(
        shape=resolve_shape(CONTEXT_MODEL), cluster=clusters.parse_cluster("64xh100"), batch=64, seq_len=LENGTH
    )
    plan = search_plans(wish, top=1)[0]
    return [f"`{plan.layout}`: {plan.seconds:.1f} s a step.", *explain_kinds.kind_reasons(wish, plan)]


def offloaded() -> list[tuple[str, ...]]:
    """(layout, bytes over the link, bytes read from and written to disk) of one parameter, in 4 microbatches."""
    sizes = {"shard_params": 1.0, "activation_bytes": 0.0}
    rows = []
    for kind in ("optimizer", "params", "optimizer+disk", "params+disk"):
        traffic = offload_cost.offload_traffic(kind, accumulate=4, compute_bytes=2, gradient_bytes=4, **sizes)
        rows.append((f"`offload={kind}`", f"{traffic.link_bytes:g}", f"{traffic.disk_bytes:g}"))
    return rows
