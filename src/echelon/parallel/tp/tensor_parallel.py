"""Tensor parallelism in one dimension, after Megatron-LM: column-parallel and row-parallel linears in pairs.

[Note: one region]

                 +------- region: a rank computes its own heads, or its slice of the ffn --------+
    x --enter--> | column-parallel (q, k, v; gate, up) -> attention -> row-parallel (o, down)    | --leave--> y
                 +-------------------------------------------------------------------------------+

`enter` is the identity in forward and an all-reduce in backward; `leave` an all-reduce in forward and the identity in
backward: four all-reduces per layer. `enter` stands before the region, so q, k and v share one all-reduce in backward.
Sequence parallelism changes both (tp_collectives.py). MLA's region is entered by the latent vectors (models/mla.py).
Routed experts are no region: a token is dispatched to them once, from the rank that holds it (ep/).

The model's table of splits (models/tp_splits.py) gives modules, by patterns, a role:

    region      the module's first argument enters the region
    column      a linear whose outputs are sharded;   column/heads: by full heads, replicated if tp exceeds them
    row         a linear whose inputs are sharded and whose output leaves the region
    vocabulary  an embedding sharded by rows          head: the language head and its loss
    heads       a dropout on a tensor with a dimension of heads
    sequence    a module between regions              positions: one whose input is position ids
    inside      a module in a region, replicated, whose gradients are partial: it saw one rank's heads
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from echelon.layout import Layout
from echelon.layout.collective import Collective
from echelon.layout.placement import DimSplit, LogicalParam
from echelon.models.foreign.causal_lm import ForeignCausalLM
from echelon.models.lora.adapter import ADAPTER
from echelon.models.tp_splits import get_tp_split
from echelon.models.traced.graph_model import GraphModel
from echelon.parallel.comm.mesh_axis import MeshAxis
from echelon.parallel.tp import cost
from echelon.parallel.tp.adapter_splits import split_adapters
from echelon.parallel.tp.parallel_layers import RowLinear, VocabParallelEmbedding, VocabParallelHead
from echelon.parallel.tp.tp_collectives import (
    FullSequenceBoundary,
    RegionBoundary,
    SequenceParallelBoundary,
    local_sequence_slice,
)

if TYPE_CHECKING:
    from echelon.memory.checkpointing.cost import RecomputedLayers
    from echelon.parallel.parallel_model import ParallelModel
    from echelon.parallel.transform_context import TransformContext

RoleTable = Mapping[str, str]
ROLES = ("region", "column", "column/heads", "row", "vocabulary", "head", "heads", "sequence", "positions", "inside")


def apply_tensor_parallel(context: TransformContext) -> None:
    """Shard the model's linears, embedding and head over tp."""
    model, layout, axes = context.model, context.layout, context.axes
    if layout.tp == 1:
        return
    if isinstance(model, GraphModel):  # its adapters are operators as others are
        from echelon.parallel.auto_sharding.shard_graph import shard_graph_model

        context.params = shard_graph_model(context, model)
        context.add_partial_grad_axes()
        return
    sequence_parallel = bool(layout.sp)
    if isinstance(model, ForeignCausalLM):
        from echelon.parallel.tp import foreign_parallel  # imports this module

        params, boundary = foreign_parallel.shard_foreign_model(
            model, context.params, axes["tp"], sequence_parallel=sequence_parallel
        )
    else:
        table = get_tp_split(model)
        params, boundary = shard_modules(model, context.params, table, axes["tp"], sequence_parallel=sequence_parallel)
    context.tp_boundary = boundary
    context.params = split_adapters(model, params, boundary)
    context.add_partial_grad_axes()


def check_matmul_precision(layout: Layout, recipe: str) -> None:
    """Accept every precision."""


def model_collectives(
    parallel: ParallelModel, sizes: cost.TransformerSizes, recomputed: RecomputedLayers
) -> Iterable[Collective]:
    """Yield the collectives of a step of a transformer over tp."""
    return cost.collectives(sizes, parallel.layout, recomputed, partition=parallel.options.partition)


def shard_modules(
    model: nn.Module, params: Iterable[LogicalParam], table: RoleTable, axis: MeshAxis, *, sequence_parallel: bool
) -> tuple[list[LogicalParam], RegionBoundary]:
    """Replace the modules of a one-device model by those of one rank of `axis`, and split their parameters."""
    boundary = make_boundary(axis, sequence_parallel=sequence_parallel)
    roles = match_roles(model, table)
    if sequence_parallel and "vocabulary" not in roles.values():
        raise ValueError(
            f"sequence parallelism begins at an embedding, and the table of {type(model).__name__} calls no module "
            '"vocabulary" (sp=1); use sp=0'
        )
    splitter = _TensorParallelSplitter(model, params, boundary, sequence_parallel)
    return splitter.apply_roles(roles, splitter.actions()), boundary


def make_boundary(axis: MeshAxis, *, sequence_parallel: bool) -> RegionBoundary:
    return SequenceParallelBoundary(axis) if sequence_parallel else FullSequenceBoundary(axis)


def match_roles(model: nn.Module, table: RoleTable) -> dict[str, str]:
    """Return the role of each module that a pattern names. A pattern without a match and an unknown role are errors."""
    unknown = ((role, pattern) for pattern, role in table.items() if role not in ROLES)
    problems = [f"{role!r} of {pattern!r} is not one of {', '.join(ROLES)}" for role, pattern in unknown]
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    roles: dict[str, str] = {}
    for pattern, role in table.items():
        matches = [name for name in names if fnmatchcase(name, pattern)]
        if not matches:
            problems.append(f"pattern {pattern!r} matches no module of {type(model).__name__}")
        roles.update(dict.fromkeys(matches, role))
    if problems:
        raise ValueError("the table of tensor splits does not fit the model: " + "; ".join(problems))
    return roles


SplitAction = Callable[[str, Any], None]
"""(name, module): replace or hook a module, and split its parameters"""


class ModuleSplitter:
    """The changes to the modules of one model, and the splits of its parameters."""

    def __init__(self, model: nn.Module, params: Iterable[LogicalParam]):
        self.model, self._given = model, list(params)
        self.params = {name: param for param in self._given for name in param.names}

    def apply_roles(self, roles: dict[str, str], actions: dict[str, SplitAction]) -> list[LogicalParam]:
        """Change the modules by their roles, and return the split parameters."""
        for name, role in roles.items():
            actions[role](name, self.model.get_submodule(name))
        return self.split_params()

    def split_params(self) -> list[LogicalParam]:
        return [self.params[param.name] for param in self._given]

    def update_param(self, name: str, **changes: Any) -> LogicalParam:
        changed = replace(self.params[name], **changes)
        self.params.update(dict.fromkeys(changed.names, changed))
        return changed

    def parent(self, name: str) -> Any:
        return self.model.get_submodule(name.rpartition(".")[0])

    def replace(self, name: str, module: nn.Module) -> None:
        """Put a module in the place of another, whose adapter it takes over."""
        adapter = self.model.get_submodule(name)._modules.get(ADAPTER)
        if adapter is not None:
            setattr(module, ADAPTER, adapter)
        setattr(self.parent(name), name.rpartition(".")[2], module)


class _TensorParallelSplitter(ModuleSplitter):
    """Splits a model's modules over one axis."""

    def __init__(
        self, model: nn.Module, params: Iterable[LogicalParam], boundary: RegionBoundary, sequence_parallel: bool
    ):
        super().__init__(model, params)
        self.axis, self.boundary, self.sequence_parallel = boundary.axis, boundary, sequence_parallel

    def actions(self) -> dict[str, SplitAction]:
        return {
            "region": self._region,
            "column": lambda n, m: self._column(n, m, unit=1),
            "column/heads": lambda n, m: self._column(n, m, unit=self.parent(n).head_dim),
            "row": self._row,
            "vocabulary": self._embedding,
            "head": self._head,
            "heads": lambda _, m: m.register_forward_pre_hook(self._set_dropout_window),
            "sequence": self._sequence,
            "positions": self._positions,
            "inside": self._inside,
        }

    def _region(self, name: str, module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda _, args: (self.boundary.enter(args[0]), *args[1:]))

    def _column(self, name: str, module: nn.Linear, unit: int) -> None:
        units, tp = module.out_features // unit, self.axis.size
        if units % tp and tp % units:
            raise ValueError(
                f"tp={tp} does not divide the outputs of {name} ({units} of {unit}); use a divisor of {units}"
            )
        split = DimSplit(axis="tp", dim=0, num_parts=min(tp, units), num_copies=max(tp // units, 1))
        for attribute in ("weight", "bias"):
            self._split_param(f"{name}.{attribute}", split)

    def _row(self, name: str, module: nn.Linear) -> None:
        if module.in_features % self.axis.size:
            raise ValueError(f"tp={self.axis.size} does not divide the inputs of {name} ({module.in_features})")
        self._split_param(f"{name}.weight", DimSplit(axis="tp", dim=1, num_parts=self.axis.size))
        self.replace(name, RowLinear(cast("nn.Parameter", module.weight), module.bias, self.boundary))
        self._between_regions(f"{name}.bias")

    def _embedding(self, name: str, module: nn.Embedding) -> None:
        self._split_param(f"{name}.weight", DimSplit(axis="tp", dim=0, num_parts=self.axis.size))
        weight = cast("nn.Parameter", module.weight)
        self.replace(name, VocabParallelEmbedding(weight, self.boundary, module.num_embeddings))

    def _head(self, name: str, module: Any) -> None:
        self._split_param(f"{name}.weight", DimSplit(axis="tp", dim=0, num_parts=self.axis.size))
        vocab_size = self.params[f"{name}.weight"].shape[0]
        self.replace(name, VocabParallelHead(module.weight, self.boundary, vocab_size))

    def _sequence(self, name: str, module: nn.Module) -> None:
        for parameter, _ in module.named_parameters():
            self._between_regions(f"{name}.{parameter}")
        if self.sequence_parallel and hasattr(module, "window"):
            module.register_forward_pre_hook(self._set_dropout_window)

    def _positions(self, name: str, module: nn.Module) -> None:
        if self.sequence_parallel:
            module.register_forward_pre_hook(lambda _, args: (local_sequence_slice(args[0], self.axis), *args[1:]))
            self._between_regions(f"{name}.weight")

    def _inside(self, name: str, module: nn.Module) -> None:
        for parameter, _ in module.named_parameters():
            self.update_param(f"{name}.{parameter}", partial_grad_axes=("tp",))

    def _set_dropout_window(self, module: Any, args: tuple[Tensor, ...]) -> None:
        """Set which part of dimension 1 (positions or heads) a dropout sees: its mask is that part."""
        local = args[0].shape[1]
        module.window = {1: (self.axis.index * local, self.axis.size * local)}

    def _between_regions(self, name: str) -> None:
        if self.sequence_parallel and name in self.params:
            self.update_param(name, partial_grad_axes=("tp",))

    def _split_param(self, name: str, split: DimSplit) -> None:
        if name in self.params:
            partial_axes = (f"tp/{split.num_copies}",) if split.num_copies > 1 else ()
            self.update_param(name, splits=(split,), partial_grad_axes=partial_axes)
