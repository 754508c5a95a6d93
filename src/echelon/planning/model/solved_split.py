"""What `echelon split` shows: how tp ranks share a model, operator by operator, or region by region.

A custom module is traced and solved (parallel/auto_sharding/). A model of transformers runs as written, in regions that
are found and proved by trial (parallel/tp/derive_regions.py); what no region splits, every rank computes whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.layout.validation_error import ValidationError
from echelon.models import user_model
from echelon.models.foreign.hf_source import read_hf_source
from echelon.parallel.auto_sharding.split_overrides import parse_overrides
from echelon.parallel.auto_sharding.split_table import SplitRow, split_table
from echelon.parallel.auto_sharding.split_table import SplitTable as SplitTable  # the command names it


@dataclass(frozen=True, kw_only=True)
class DerivedRegion:
    """A region of a model of transformers, in all its layers."""

    module: str
    columns: tuple[str, ...]
    row: str
    layers: int


@dataclass(frozen=True, kw_only=True)
class DerivedRegions:
    """What tp splits of a model of transformers, and what every rank computes."""

    regions: tuple[DerivedRegion, ...]
    whole: tuple[str, ...]
    experts: tuple[str, ...]
    """modules with experts, which ep divides"""


def solve_split(spec: str, tp: int, *, sp: bool = True, overrides: Sequence[str] = ()) -> SplitTable:
    """Solve how `tp` ranks share `file.py:factory`; `overrides` (`pattern = state`) are added to the model's own."""
    from echelon.models.traced.graph_model import make_traceable
    from echelon.models.traced.graph_trace import tracing_template
    from echelon.models.traced.trace_on_demand import declares_roles
    from echelon.parallel.auto_sharding.shard_graph import split_module, split_overrides
    from echelon.planning.model.trace_module import load_user_model

    given = parse_overrides("\n".join(overrides))
    issues = list(user_model.validate_spec(spec))
    if issues:
        raise ValidationError(issues)
    model, inputs = load_user_model(spec)
    traced = make_traceable(tracing_template(model), inputs)
    own = {} if declares_roles(model) else split_overrides(model)
    traced.split = {**own, **given}
    split = split_module(traced, tp, sequence_parallel=sp)
    return split_table(split.problem, split.solution, split.link)


def find_regions(spec: str, tp: int) -> DerivedRegions:
    """Find the regions of `hf:DIR` that `tp` ranks split."""
    from echelon.models.foreign.causal_lm import adapt, build_on_meta
    from echelon.models.foreign.hf_source import quiet_transformers
    from echelon.models.foreign.init_rules import materialize_buffers
    from echelon.parallel.tp.derive_regions import derive_split
    from echelon.parallel.tp.shrunken_twin import shrunken_twin

    with quiet_transformers():
        model = build_on_meta(read_hf_source(spec))
        materialize_buffers(model)
        adapted = adapt(model)
        twin = shrunken_twin(adapted)
        derived = derive_split(twin if twin is not None else adapted, tp)
    groups: dict[tuple[str, tuple[str, ...], str], int] = {}
    for region in derived.regions:
        key = (_pattern(region.module), tuple(region.columns), region.row)
        groups[key] = groups.get(key, 0) + 1
    return DerivedRegions(
        regions=tuple(
            DerivedRegion(module=module, columns=columns, row=row, layers=layers)
            for (module, columns, row), layers in groups.items()
        ),
        whole=tuple(dict.fromkeys(map(_pattern, derived.whole))),
        experts=tuple(dict.fromkeys(map(_pattern, derived.expert_layers))),
    )


def _pattern(name: str) -> str:
    """A name with * for the number of its layer."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def shown_rows(table: SplitTable, *, every: bool) -> tuple[SplitRow, ...]:
    """The rows that compute, communicate or hold parameters; all with `every`."""
    return tuple(row for row in table.rows if every or row.params or row.collectives or row.op in ("output",))
