"""Reads off a module which layouts `train` has for it, and how tp splits its weights.

The checks are those of the transforms (parallel/apply.py), on a module that is not divided yet: a plan is runnable
only where they pass. A custom module declares what it supports; of a model of transformers it is derived.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from echelon.layout import Layout
from echelon.models.pipeline_model import get_pipeline_model, has_pipeline_model
from echelon.models.tp_splits import get_tp_split
from echelon.parallel.tp.tensor_parallel import match_roles
from echelon.planning.model.layout_support import ModelSupport
from echelon.planning.model.model_shape import COLUMN_PARALLEL, ROW_PARALLEL

if TYPE_CHECKING:
    from torch import nn

    from echelon.models.foreign.causal_lm import ForeignCausalLM
    from echelon.parallel.cp.sequence_plan import SequencePlan

SPLIT_OF_ROLE = {"column": COLUMN_PARALLEL, "row": ROW_PARALLEL}


@dataclass(frozen=True, kw_only=True)
class TpDeclaration:
    """How tp splits a module."""

    splits: Mapping[str, str] = field(default_factory=dict)
    """modules whose weights it splits: by columns or by rows"""
    sp: bool = False
    grids: bool = False
    divides: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DeclaredSupport:
    """What is read off a module."""

    support: ModelSupport
    splits: Mapping[str, str]
    """modules whose weights tp splits: by columns or by rows"""
    gathered: tuple[str, ...]
    """modules that get full sequences under context parallelism"""
    is_trainable: bool
    """it draws random masks only in ways that do not depend on the layout"""


def read_support(module: nn.Module, solved: TpDeclaration | None = None) -> DeclaredSupport:
    """Return what a module on the meta device declares. Its dropouts are those of a run (traced_dropout.py).

    `solved` is what the solver finds for a module that declares no splits, or no stages.
    """
    from echelon.memory.checkpointing.checkpoint_policy import recomputing_modules
    from echelon.models.attention import CoreAttention
    from echelon.models.foreign.causal_lm import ForeignCausalLM
    from echelon.moe.moe_layer import MoELayer
    from echelon.rng import unsupported_dropouts

    modules = list(module.modules())
    has_core = any(isinstance(child, CoreAttention) for child in modules)
    has_pipeline = has_pipeline_model(module)
    foreign = module if isinstance(module, ForeignCausalLM) else None
    declared = _derived_tp(foreign) if foreign is not None else _declared_tp(module)
    if solved is not None and not declared.splits:
        declared = solved
    sequences = _sequence_plan(foreign) if foreign is not None else None
    runs_in_parts = foreign is None or not foreign.reads_embedding
    has_own_experts = any(isinstance(child, MoELayer) for child in modules)
    support = ModelSupport(
        tp=bool(declared.splits) or solved is not None or (foreign is not None and runs_in_parts),
        sp=declared.sp,
        grids=declared.grids,
        tp_divides=declared.divides,
        tp_shares=declared.shares,
        cp=(not sequences.problem if sequences is not None else has_core and _takes_positions(module))
        and runs_in_parts,
        pp=solved is not None or (has_pipeline and runs_in_parts),
        slices=has_core and has_pipeline and get_pipeline_model(module).slice_shared is not None,
        ep=has_own_experts or _has_foreign_experts(module),
        etp=has_own_experts,
        ep_needs_sp=foreign is None,
        core=has_core,
        own_recompute=any(True for _ in recomputing_modules(module)),
    )
    is_trainable = not unsupported_dropouts(module)
    gathered = sequences.gathered if sequences is not None else ()
    return DeclaredSupport(support=support, splits=declared.splits, gathered=gathered, is_trainable=is_trainable)


# -- custom modules ---------------------------------------------------------------------------------------------------


def _declared_tp(module: nn.Module) -> TpDeclaration:
    """What its table says."""
    from echelon.parallel.tp_grid.grid_parallel import find_grid_problems

    try:
        roles = match_roles(module, get_tp_split(module))
    except ValueError:  # none, or one that does not fit the module
        return TpDeclaration()
    divides: set[int] = set()
    shares: set[int] = set()
    for name, role in roles.items():
        gemm: Any = module.get_submodule(name)
        parent: Any = module.get_submodule(name.rpartition(".")[0])
        if role == "row":
            divides.add(gemm.in_features)
        elif role in ("column", "column/heads"):
            shares.add(gemm.out_features // (parent.head_dim if role == "column/heads" else 1))
    splits = {name: SPLIT_OF_ROLE.get(role.partition("/")[0], "") for name, role in roles.items()}
    return TpDeclaration(
        splits=splits,
        sp="vocabulary" in roles.values(),
        grids=not any(find_grid_problems(module, roles, Layout(tp=4, tp_kind="2d"))),
        divides=tuple(sorted(divides)),
        shares=tuple(sorted(shares)),
    )


def solve_splits(module: nn.Module, inputs: Mapping[str, Any]) -> TpDeclaration | None:
    """What the solver finds for two ranks; None where the module declares all, or cannot be traced."""
    from echelon.models.traced.graph_model import make_traceable
    from echelon.models.traced.graph_trace import UntraceableError, tracing_template
    from echelon.models.traced.trace_on_demand import needs_graph
    from echelon.parallel.auto_sharding.shard_graph import split_module

    if not needs_graph(module, Layout(tp=2)) and not needs_graph(module, Layout(pp=2)):
        return None
    try:
        with _one_thread():
            split = split_module(make_traceable(tracing_template(module), inputs), 2)
    except UntraceableError:
        return None
    return TpDeclaration(splits=split.gemm_splits(column=COLUMN_PARALLEL, row=ROW_PARALLEL), sp=True)


def _takes_positions(module: nn.Module) -> bool:
    """Whether a module takes `positions`, as context parallelism requires."""
    parameters = inspect.signature(module.forward).parameters.values()
    return any(p.name == "positions" or p.kind is p.VAR_KEYWORD for p in parameters)


# -- models of transformers -------------------------------------------------------------------------------------------


def _derived_tp(model: ForeignCausalLM) -> TpDeclaration:
    """What is found by trials on a narrow twin. What they do not split stays whole, and every tp is accepted."""
    from echelon.models.foreign.unfuse import output_dim
    from echelon.parallel.tp.derive_regions import derive_split, head_counts
    from echelon.parallel.tp.shrunken_twin import shrunken_twin

    twin = shrunken_twin(model)
    with _one_thread():
        regions = derive_split(twin, 2).regions if twin is not None else ()
    splits: dict[str, str] = {}
    divides: set[int] = set()
    for region in regions:
        root = f"{region.module}." if region.module else ""
        splits |= {f"{root}{column}": COLUMN_PARALLEL for column in region.columns} | {root + region.row: ROW_PARALLEL}
        row: Any = model.get_submodule(root + region.row)
        divides.add(int(row.weight.shape[1 - output_dim(row)]))
    queries, keys = head_counts(model)
    shares = (keys,) if keys else ()
    if queries and regions:
        divides.add(queries)
    return TpDeclaration(splits=splits, sp=not model.layer_problem, divides=tuple(sorted(divides)), shares=shares)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute small tensors on one thread: several on a busy machine mostly wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _sequence_plan(model: ForeignCausalLM) -> SequencePlan:
    from echelon.parallel.cp.sequence_plan import plan_sequences

    with _one_thread():
        return plan_sequences(model)


def _has_foreign_experts(module: nn.Module) -> bool:
    from echelon.models.foreign.foreign_experts import ForeignExperts

    return any(isinstance(child, ForeignExperts) for child in module.modules())
