"""Tensor parallelism over a grid of ranks in 2, 2.5 and 3 dimensions: how a model is sharded.

[Note: placement on the grid]

tp is z layers of y rows of x ranks. Activations, [sequences, positions, columns], are sharded by sequences and by
columns, so that each of n ranks holds 1/n of them; only weights of 2.5d are replicated.

                        residual stream, norms        inside a region               a weight [out, in]
    2d      q x q       sequences y,   columns x      the same                      out x, in y
    2.5d    q x q x d   sequences z y, columns x      the same                      out x, in y; replicated over z
    3d      p x p x p   sequences z y, columns x      sequences z x, columns y      out y (x on the way out), again z,
                                                                                    in x (y on the way out)

Vectors follow the columns they are added to, and each rank's gradient is a partial sum over the sequences. summa.py
and matmul_3d.py multiply, cost.py counts the collectives. The roles are those of tp/tensor_parallel.py. Every module
with parameters must have a role: a module that was not made for a grid would take its columns for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from echelon.layout import Layout
from echelon.layout.collective import Collective
from echelon.layout.placement import Coordinates, DimSplit, LogicalParam
from echelon.models import layers
from echelon.models.attention import AttentionContext
from echelon.models.tp_splits import get_tp_split
from echelon.parallel.comm.mesh_axis import MeshAxes
from echelon.parallel.tp.cost import TransformerSizes, grid_shape
from echelon.parallel.tp.tensor_parallel import ModuleSplitter, RoleTable, SplitAction, match_roles
from echelon.parallel.tp_grid import cost as tp_grid_cost
from echelon.parallel.tp_grid import grid_norm
from echelon.parallel.tp_grid.grid_activations import ActivationSharding
from echelon.parallel.tp_grid.grid_linear import GridLinear
from echelon.parallel.tp_grid.grid_vocab import GridEmbedding, GridHead
from echelon.parallel.tp_grid.matmul_3d import Grid3D
from echelon.parallel.tp_grid.summa import SummaGrid
from echelon.rng import Dropout

if TYPE_CHECKING:
    from echelon.memory.checkpointing.cost import RecomputedLayers
    from echelon.parallel.parallel_model import ParallelModel
    from echelon.parallel.transform_context import TransformContext

GRID_AXES = ("z", "y", "x", "z*y", "z*x")
LINEAR_ROLES, EMBEDDING_ROLES = ("column", "column/heads", "row"), ("vocabulary", "positions")


def apply_tensor_parallel(context: TransformContext) -> None:
    """Shard the model's modules over the grid of tp ranks."""
    model = context.model
    context.params = shard_modules(model, context.params, get_tp_split(model), context.layout, context.axes)
    context.add_partial_grad_axes()


def check_matmul_precision(layout: Layout, recipe: str) -> None:
    """Refuse fp8: its scale is of a full matrix, of which a rank sees a block."""
    raise ValueError(
        "fp8 GEMMs have one scale for the full matrix, and a rank of a grid sees a block of it "
        f"(precision.compute={recipe}, tp_kind={layout.tp_kind}); use precision.compute=same or tp_kind=1d"
    )


def model_collectives(
    parallel: ParallelModel, sizes: TransformerSizes, recomputed: RecomputedLayers
) -> Iterable[Collective]:
    """Yield the collectives of a step of a sharded model, without the sums of partial gradients (tp/cost.py)."""
    prefixes = tuple(f"{name}." for name, form in parallel.checkpointing.forms.items() if form == "full")
    costs = [(name, getattr(module, "cost", None)) for name, module in parallel.model.named_modules()]
    modules = [
        (cost, int(name.startswith(prefixes))) for name, cost in costs if isinstance(cost, tp_grid_cost.ModuleSizes)
    ]
    return tp_grid_cost.collectives(modules, parallel.layout, sizes)


def shard_modules(
    model: nn.Module, params: Iterable[LogicalParam], table: RoleTable, layout: Layout, axes: MeshAxes
) -> list[LogicalParam]:
    """Replace the modules of a one-device model by those of one rank of the grid, and split their parameters."""
    roles = match_roles(model, table)
    if problems := list(find_grid_problems(model, roles, layout)):
        raise ValueError(
            f"{type(model).__name__} cannot be divided over a grid (tp_kind={layout.tp_kind}): "
            f"{'; '.join(problems)}; or use tp_kind=1d"
        )
    for name in GRID_AXES:
        axes.add(name)
    grid = Grid3D(axes) if layout.tp_kind == "3d" else SummaGrid(axes)
    splitter = _GridSplitter(model, params, grid, axes.coordinates, roles)
    return splitter.apply_roles(roles, splitter.actions())


def find_grid_problems(model: nn.Module, roles: dict[str, str], layout: Layout) -> Iterator[str]:
    """Yield every reason why a model cannot be sharded over a grid."""
    for role, meaning in (("vocabulary", "begins at an embedding"), ("head", "ends in a language head")):
        if role not in roles.values():
            yield f'the sharded model {meaning}, and the table calls no module "{role}"'
    side = grid_shape(layout).x
    for name, role in roles.items():
        module = model.get_submodule(name)
        expected = nn.Linear if role in LINEAR_ROLES else nn.Embedding if role in EMBEDDING_ROLES else nn.Module
        if not isinstance(module, expected):
            yield f'{name} is called "{role}" and is no {expected.__name__} ({type(module).__name__})'
        elif role == "column/heads" and (problem := _heads_problem(model, name, side)):
            yield problem
        elif role == "sequence" and list(module.parameters()) and not _is_norm(module):
            yield f"{name} would need all columns of what it reads ({type(module).__name__}, which is no known norm)"
    params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name in sorted(params - set(_divided_params(roles))):
        yield f"no role of the table divides {name}"
    for name, module in model.named_modules():
        if isinstance(module, Dropout) and module.p > 0 and roles.get(name) not in ("sequence", "heads"):
            yield f'{name} is a dropout that the table calls neither "sequence" nor "heads"'


def _divided_params(roles: dict[str, str]) -> Iterator[str]:
    """Yield the parameters that the roles divide."""
    attributes = {**dict.fromkeys((*LINEAR_ROLES, "sequence"), ("weight", "bias")), "head": ("weight",)}
    attributes |= dict.fromkeys(EMBEDDING_ROLES, ("weight",))
    for name, role in roles.items():
        yield from (f"{name}.{attribute}" for attribute in attributes.get(role, ()))


def _heads_problem(model: nn.Module, name: str, side: int) -> str:
    linear, head_dim = cast("Any", model.get_submodule(name)), model.get_submodule(name.rpartition(".")[0]).head_dim
    heads = linear.out_features // head_dim
    return f"{side} ranks do not divide the {heads} heads of {name}" if heads % side and side % heads else ""


def _is_norm(module: nn.Module) -> bool:
    if type(module) in (nn.LayerNorm, layers.LayerNorm, layers.ResidualLayerNorm, nn.RMSNorm):
        return len(cast("Any", module).normalized_shape) == 1
    return type(module) in (layers.RMSNorm, layers.ResidualRMSNorm)


class _GridSplitter(ModuleSplitter):
    """Splits a model's modules over a grid."""

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[LogicalParam],
        grid: SummaGrid | Grid3D,
        coordinates: Coordinates,
        roles: dict[str, str],
    ):
        super().__init__(model, params)
        self.grid, self.coordinates = grid, coordinates
        self._region_context: tuple[Any, int, Any] = (None, 0, None)
        embedding = next(name for name, role in roles.items() if role == "vocabulary")
        self.width = self.params[f"{embedding}.weight"].shape[1]
        self.heads = [name for name, role in roles.items() if role == "heads"]

    def actions(self) -> dict[str, SplitAction]:
        residual, region = self.grid.residual, self.grid.region

        def by_heads(name: str, module: nn.Linear) -> None:
            self._linear(name, module, residual, region, module.out_features // self.parent(name).head_dim)

        return {
            "region": self._region,
            "column": lambda n, m: self._linear(n, m, residual, region),
            "column/heads": by_heads,
            "row": lambda n, m: self._linear(n, m, region, residual),
            "vocabulary": self._embedding,
            "head": self._head,
            "heads": lambda _, m: m.register_forward_pre_hook(self._set_heads_window),
            "sequence": self._sequence,
            "positions": self._positions,
        }

    # -- matrices -----------------------------------------------------------------------------------------------------

    def _linear(
        self, name: str, module: nn.Linear, source: ActivationSharding, target: ActivationSharding, heads: int = 0
    ) -> None:
        """Shard a linear. `heads` are never cut: if there are fewer than ranks, several ranks hold each."""
        ranks = target.column_axis.size
        copies = max(ranks // heads, 1) if heads else 1
        split = DimSplit(axis=target.column_axis.name, dim=0, num_parts=ranks // copies, num_copies=copies)
        partial = (f"{split.axis}/{copies}",) if copies > 1 else ()
        weight_axes = (*self.grid.replicated_axes, *partial)
        param = self._set_splits(f"{name}.weight", self.grid.weight_cuts(split, source), weight_axes)
        if module.bias is not None:
            self._set_splits(f"{name}.bias", (split,), (target.batch_axis.name, *partial))
        cost = tp_grid_cost.LinearSizes(
            inputs=param.local_shape[1],
            outputs=-(-module.out_features // split.num_parts),
            source=source.column_axis.name,
            target=target.column_axis.name,
            shares_input=name.rpartition(".")[2] in getattr(self.parent(name), "share_input", ())[1:],
        )
        low, high = param.box(self.coordinates)[1]
        self.replace(name, GridLinear(module, self.grid.matmul(source, target), high - low, cost))

    def _embedding(self, name: str, module: nn.Embedding) -> None:
        rows, columns = self._split_table(name)
        lookup, cost = self.grid.lookup(rows), tp_grid_cost.EmbeddingSizes(rows, columns)
        self.replace(name, GridEmbedding(cast("nn.Parameter", module.weight), lookup, module.num_embeddings, cost))

    def _head(self, name: str, module: Any) -> None:
        rows, columns = self._split_table(name)
        vocab_size, cost = self.params[f"{name}.weight"].shape[0], tp_grid_cost.HeadSizes(rows, columns)
        self.replace(name, GridHead(module.weight, self.grid, vocab_size, cost))

    def _split_table(self, name: str) -> tuple[int, int]:
        """Split a table [vocabulary, width]; return rows and columns of a rank's block."""
        param = self._set_splits(f"{name}.weight", self.grid.table_cuts(), self.grid.replicated_axes)
        return -(-param.shape[0] // self.grid.region.column_axis.size), param.local_shape[1]

    # -- between regions ----------------------------------------------------------------------------------------------

    def _sequence(self, name: str, module: Any) -> None:
        if hasattr(module, "window"):
            module.register_forward_pre_hook(self._set_residual_window)
        elif list(module.parameters()) or _is_norm(module):
            residual = self.grid.residual
            for vector in (f"{name}.weight", f"{name}.bias"):
                if vector in self.params:
                    self._set_splits(vector, (residual.column_split(0),), (residual.batch_axis.name,))
            self.replace(name, self._norm(module))

    def _norm(self, module: Any) -> nn.Module:
        columns = grid_norm.ColumnShards(self.grid.residual.column_axis, self.width)
        is_stream = isinstance(module, layers.ResidualRMSNorm | layers.ResidualLayerNorm)
        if isinstance(module, nn.LayerNorm):
            with_bias = grid_norm.GridStreamLayerNorm if is_stream else grid_norm.GridLayerNorm
            return with_bias(module.weight, module.bias, columns, module.eps)
        epsilon = module.eps if isinstance(module, nn.RMSNorm) else module.epsilon
        without_bias = grid_norm.GridStreamRMSNorm if is_stream else grid_norm.GridRMSNorm
        return without_bias(module.weight, columns, epsilon)

    def _positions(self, name: str, module: nn.Module) -> None:
        residual = self.grid.residual
        self._set_splits(f"{name}.weight", (residual.column_split(1),), (residual.batch_axis.name,))

        def local_ids(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            ids, *rest = args
            batch = residual.local_batch(len(ids))
            return ids if len(ids) == 1 else ids[residual.sequence_index(batch, len(ids), ids.device)], *rest

        module.register_forward_pre_hook(local_ids)

    # -- hooks that narrow arguments and dropout masks to the local part ----------------------------------------------

    def _region(self, name: str, module: nn.Module) -> None:
        dropouts = [self.model.get_submodule(other) for other in self.heads if other.startswith(f"{name}.")]

        def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            x = args[0]

            def narrowed(value: Any) -> Any:
                if isinstance(value, Tensor):
                    raise ValueError(
                        f"a region on a grid has some of the sequences, and {name} is given a tensor after its first "
                        "argument; give it an echelon.AttentionContext, or use tp_kind=1d"
                    )
                return self._attention_context(value, len(x)) if isinstance(value, AttentionContext) else value

            for dropout in dropouts:
                self._set_dropout_rows(dropout, x, self.grid.region)
            return (x, *map(narrowed, args[1:])), {key: narrowed(value) for key, value in kwargs.items()}

        module.register_forward_pre_hook(enter, with_kwargs=True)

    def _attention_context(self, context: AttentionContext, local_batch: int) -> AttentionContext:
        """Return the context of the local sequences, computed once for all layers of a forward pass."""
        cached_for, cached_batch, local = self._region_context
        if cached_for is not context or cached_batch != local_batch:
            batch = max(len(part) for part in (context.positions, context.documents) if part is not None)
            index = self.grid.region.sequence_index(local_batch, batch, context.positions.device)
            local = context.select_sequences(index)
            self._region_context = (context, local_batch, local)
        return cast("AttentionContext", local)

    def _set_dropout_rows(self, module: Any, x: Tensor, sharding: ActivationSharding) -> None:
        """Set which sequences a dropout sees: its mask is theirs."""
        samples = module.stream.samples
        if samples is not None:
            module.rows = sharding.sequence_index(len(x), len(samples), x.device)

    def _set_residual_window(self, module: Any, args: tuple[Tensor, ...]) -> None:
        x, sharding = args[0], self.grid.residual
        self._set_dropout_rows(module, x, sharding)
        module.window = {**module.window, x.dim() - 1: (sharding.column_axis.index * x.shape[-1], self.width)}

    def _set_heads_window(self, module: Any, args: tuple[Tensor, ...]) -> None:
        x, sharding = args[0], self.grid.region
        self._set_dropout_rows(module, x, sharding)
        heads = x.shape[1]
        module.window = {**module.window, 1: (sharding.column_axis.index * heads, sharding.column_axis.size * heads)}

    def _set_splits(self, name: str, splits: tuple[DimSplit, ...], partial_grad_axes: tuple[str, ...]) -> LogicalParam:
        return self.update_param(name, splits=splits, partial_grad_axes=partial_grad_axes)
