"""Tensor parallelism over a grid of ranks in 2, 2.5 and 3 dimensions: how a model is divided.

[Note: where everything lies]

tp is z layers of y rows of x ranks. Activations, [sequences, positions, columns], are divided by sequences and by
columns, so that each of n ranks has a share of 1/n; nothing but weights of 2.5d is held twice.

                        stream: norms, residuals      inside a region               a weight [out, in]
    2d      q x q       sequences y,   columns x      the same                      out x, in y
    2.5d    q x q x d   sequences z y, columns x      the same                      out x, in y; copied over z
    3d      p x p x p   sequences z y, columns x      sequences z x, columns y      out y (x on the way out), again z,
                                                                                    in x (y on the way out)

Vectors follow the columns they are added to, and each rank's gradient is a part of a sum over the sequences. What a
product does is in summa.py and cube.py, what it costs in grid_cost.py. The words are those of tensor.py. All that has
parameters must be named: a module that was not made for it would take its part of the columns for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from echelon.layout import Layout
from echelon.layout.collective import Collective
from echelon.layout.placement import Coordinates, DimSplit, LogicalParam
from echelon.parallel.tp.tensor_parallel import RoleTable, TransformerSizes, match_roles
from echelon.parallel.tp_grid import cost as tp_grid_cost

if TYPE_CHECKING:
    from torch import Tensor, nn

    from echelon.models.attention import AttentionContext
    from echelon.parallel.comm.mesh_axis import MeshAxes
    from echelon.parallel.tp_grid.grid_activations import ActivationSharding
    from echelon.parallel.tp_grid.matmul_3d import Grid3D
    from echelon.parallel.tp_grid.summa import SummaGrid

GRID_AXES = ("z", "y", "x", "z*y", "z*x")
LINEAR_ROLES, EMBEDDING_ROLES = ("column", "column/heads", "row"), ("vocabulary", "positions")


def token_axes(layout: Layout) -> tuple[str, ...]:
    """The axes of the grid over which the head's sequences, and so the losses, are divided."""
    return ("z", "x") if layout.tp_kind == "3d" else ("z", "y")


def heads_axis(layout: Layout) -> str:
    """The axis of tp over which heads are divided."""
    return {"1d": "tp", "3d": "y"}.get(layout.tp_kind, "x")


def apply_grid_parallel(
    model: nn.Module, params: Iterable[LogicalParam], table: RoleTable, layout: Layout, axes: MeshAxes
) -> list[LogicalParam]:
    """Changes the modules of a one-device model for one rank of the grid, and says how each parameter is divided."""
    from echelon.parallel.tp_grid.matmul_3d import Grid3D
    from echelon.parallel.tp_grid.summa import SummaGrid

    words = match_roles(model, table)
    if problems := list(_find_problems(model, words, layout)):
        raise ValueError(
            f"{type(model).__name__} cannot be divided over a grid (tp_kind={layout.tp_kind}): "
            f"{'; '.join(problems)}; or use tp_kind=1d"
        )
    for name in GRID_AXES:
        axes.add(name)
    kind = Grid3D(axes) if layout.tp_kind == "3d" else SummaGrid(axes)
    found = list(params)
    plan = _GridSplitter(model, kind, axes.coordinates, {name: entry for entry in found for name in entry.names}, words)
    for name, word in words.items():
        plan.apply_role(name, word)
    return [plan.params[entry.name] for entry in found]


def check_matmul_precision(layout: Layout, products: str) -> None:
    """Products in 8 bits are not for a grid."""
    if layout.tp_kind != "1d" and products != "same":
        raise ValueError(
            f"products in 8 bits have one scale for all of a matrix, of which a rank of a grid sees a block "
            f"(precision.compute={products}, tp_kind={layout.tp_kind}); use precision.compute=same or tp_kind=1d"
        )


def _find_problems(model: nn.Module, roles: dict[str, str], layout: Layout) -> Iterator[str]:
    """Why a model cannot be divided, all of it."""
    from torch import nn

    from echelon.rng import Dropout

    for word, role in (("vocabulary", "begins at an embedding"), ("head", "ends in a language head")):
        if word not in roles.values():
            yield f'what is divided {role}, and the table calls no module "{word}"'
    side = tp_grid_cost.grid_shape(layout).x
    for name, word in roles.items():
        module = model.get_submodule(name)
        kind = nn.Linear if word in LINEAR_ROLES else nn.Embedding if word in EMBEDDING_ROLES else nn.Module
        if not isinstance(module, kind):
            yield f'{name} is called "{word}" and is no {kind.__name__} ({type(module).__name__})'
        elif word == "column/heads" and (trouble := _heads_problem(model, name, side)):
            yield trouble
        elif word == "sequence" and list(module.parameters()) and not _is_norm(module):
            yield f"{name} would need all columns of what it reads ({type(module).__name__}, which is no known norm)"
    for name in sorted(
        {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(_divided_params(model, roles))
    ):
        yield f"no word of the table divides {name}"
    for name, module in model.named_modules():
        if isinstance(module, Dropout) and module.p > 0 and roles.get(name) not in ("sequence", "heads"):
            yield f'{name} is a dropout that the table calls neither "sequence" nor "heads"'


def _divided_params(model: nn.Module, roles: dict[str, str]) -> Iterator[str]:
    """The parameters that the words divide."""
    taken = {
        **dict.fromkeys((*LINEAR_ROLES, "sequence"), ("weight", "bias")),
        **dict.fromkeys(EMBEDDING_ROLES, ("weight",)),
    }
    taken["head"] = ("weight",)
    for name, word in roles.items():
        yield from (f"{name}.{attribute}" for attribute in taken.get(word, ()))


def _heads_problem(model: nn.Module, name: str, side: int) -> str:
    linear, grain = cast("Any", model.get_submodule(name)), model.get_submodule(name.rpartition(".")[0]).head_dim
    pieces = linear.out_features // grain
    return f"{side} ranks do not divide the {pieces} heads of {name}" if pieces % side and side % pieces else ""


def _is_norm(module: nn.Module) -> bool:
    from torch import nn

    from echelon.models import gpt, norm_layers

    if type(module) in (nn.LayerNorm, gpt.LayerNorm, nn.RMSNorm):
        return len(cast("Any", module).normalized_shape) == 1
    return type(module) in (norm_layers.RMSNorm, norm_layers.ResidualRMSNorm)


class _GridSplitter:
    """The changes to one model, module by module."""

    def __init__(
        self,
        model: nn.Module,
        grid: SummaGrid | Grid3D,
        coordinates: Coordinates,
        params: dict[str, LogicalParam],
        roles: dict[str, str],
    ):
        self.model, self.grid, self.coordinates, self.params = model, grid, coordinates, params
        embedding = next(name for name, word in roles.items() if word == "vocabulary")
        self.width = self.params[f"{embedding}.weight"].shape[1]
        self.heads = [name for name, word in roles.items() if word == "heads"]
        self._region_context: tuple[Any, int, Any] = (None, 0, None)

    def apply_role(self, name: str, role: str) -> None:
        stream, region = self.grid.residual, self.grid.region
        actions: dict[str, Callable[[str, Any], None]] = {
            "region": self._region,
            "column": lambda n, m: self._linear(n, m, stream, region),
            "column/heads": lambda n, m: self._linear(n, m, stream, region, m.out_features // self._parent(n).head_dim),
            "row": lambda n, m: self._linear(n, m, region, stream),
            "vocabulary": self._embedding,
            "head": self._head,
            "heads": lambda _, m: m.register_forward_pre_hook(self._set_heads_window),
            "sequence": self._sequence,
            "positions": self._positions,
        }
        actions[role](name, self.model.get_submodule(name))

    # -- matrices -----------------------------------------------------------------------------------------------------

    def _linear(
        self, name: str, module: nn.Linear, source: ActivationSharding, target: ActivationSharding, heads: int = 0
    ) -> None:
        """`heads` are not taken apart: where there are fewer than ranks, each is on several."""
        from echelon.parallel.tp_grid.grid_linear import GridLinear

        ranks = target.column_axis.size
        copies = max(ranks // heads, 1) if heads else 1
        cut = DimSplit(axis=target.column_axis.name, dim=0, num_parts=ranks // copies, num_copies=copies)
        summed = (f"{cut.axis}/{copies}",) if copies > 1 else ()
        entry = self._set_splits(
            f"{name}.weight", self.grid.weight_cuts(cut, source), (*self.grid.replicated_axes, *summed)
        )
        if module.bias is not None:
            self._set_splits(f"{name}.bias", (cut,), (target.batch_axis.name, *summed))
        cost = tp_grid_cost.LinearSizes(
            inputs=entry.local_shape[1],
            outputs=-(-module.out_features // cut.num_parts),
            source=source.column_axis.name,
            target=target.column_axis.name,
            shares_input=name.rpartition(".")[2] in getattr(self._parent(name), "share_input", ())[1:],
        )
        low, high = entry.box(self.coordinates)[1]
        product, weight = self.grid.matmul(source, target), cast("nn.Parameter", module.weight)
        self._replace(name, GridLinear(weight, module.bias, product, high - low, cost))

    def _embedding(self, name: str, module: nn.Embedding) -> None:
        from echelon.parallel.tp_grid.grid_vocab import GridEmbedding

        rows, columns = self._split_table(name)
        look_up, cost = self.grid.lookup(rows), tp_grid_cost.EmbeddingSizes(rows, columns)
        made = GridEmbedding(cast("nn.Parameter", module.weight), look_up, module.num_embeddings, cost)
        self._replace(name, made)

    def _head(self, name: str, module: Any) -> None:
        from echelon.parallel.tp_grid.grid_vocab import GridHead

        rows, columns = self._split_table(name)
        vocabulary, cost = self.params[f"{name}.weight"].shape[0], tp_grid_cost.HeadSizes(rows, columns)
        self._replace(name, GridHead(module.weight, self.grid.head_matmul(), self.grid.region, vocabulary, cost))

    def _split_table(self, name: str) -> tuple[int, int]:
        """Divides a table [vocabulary, width]; rows and columns of a rank's block."""
        entry = self._set_splits(f"{name}.weight", self.grid.table_cuts(), self.grid.replicated_axes)
        return -(-entry.shape[0] // self.grid.region.column_axis.size), entry.local_shape[1]

    # -- between regions ----------------------------------------------------------------------------------------------

    def _sequence(self, name: str, module: Any) -> None:
        if hasattr(module, "window"):
            module.register_forward_pre_hook(self._set_residual_window)
        elif list(module.parameters()) or _is_norm(module):
            for parameter in ("weight", "bias"):
                self._vector(f"{name}.{parameter}")
            self._replace(name, self._norm(module))

    def _norm(self, module: Any) -> nn.Module:
        from torch import nn

        from echelon.models.norm_layers import ResidualRMSNorm
        from echelon.parallel.tp_grid import grid_norm

        columns = grid_norm.ColumnShards(self.grid.residual.column_axis, self.width)
        if isinstance(module, nn.LayerNorm):
            return grid_norm.GridLayerNorm(module.weight, module.bias, columns, module.eps)
        if isinstance(module, nn.RMSNorm):
            return grid_norm.GridRMSNorm(module.weight, columns, module.eps)
        made = grid_norm.GridStreamNorm if isinstance(module, ResidualRMSNorm) else grid_norm.GridRMSNorm
        return made(module.weight, columns, module.epsilon)

    def _positions(self, name: str, module: nn.Module) -> None:
        stream = self.grid.residual
        columns = DimSplit(axis=stream.column_axis.name, dim=1, num_parts=stream.column_axis.size)
        self._set_splits(f"{name}.weight", (columns,), (stream.batch_axis.name,))

        def mine(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            ids, *rest = args
            here = stream.local_batch(len(ids))
            return ids if len(ids) == 1 else ids[stream.sequence_index(here, len(ids), ids.device)], *rest

        module.register_forward_pre_hook(mine)

    def _vector(self, name: str) -> None:
        stream = self.grid.residual
        if name in self.params:
            columns = DimSplit(axis=stream.column_axis.name, dim=0, num_parts=stream.column_axis.size)
            self._set_splits(name, (columns,), (stream.batch_axis.name,))

    # -- what modules are told of the part they see -------------------------------------------------------------------

    def _region(self, name: str, module: nn.Module) -> None:
        from torch import Tensor

        from echelon.models.attention import AttentionContext

        drops = [self.model.get_submodule(other) for other in self.heads if other.startswith(f"{name}.")]

        def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            x = args[0]

            def narrowed(value: Any) -> Any:
                if isinstance(value, Tensor):
                    raise ValueError(
                        f"a region on a grid has some of the sequences, and {name} is given a tensor beside its first "
                        "argument; give it an echelon.Seen, or use tp_kind=1d"
                    )
                return self._attention_context(value, len(x)) if isinstance(value, AttentionContext) else value

            for drop in drops:
                self._set_dropout_rows(drop, x, self.grid.region)
            return (x, *map(narrowed, args[1:])), {key: narrowed(value) for key, value in kwargs.items()}

        module.register_forward_pre_hook(enter, with_kwargs=True)

    def _attention_context(self, seen: AttentionContext, here: int) -> AttentionContext:
        """What the sequences inside a region see, found once for all layers of a forward pass."""
        whole, count, found = self._region_context
        if whole is not seen or count != here:
            rows = max(len(part) for part in (seen.positions, seen.documents) if part is not None)
            found = seen.select_sequences(self.grid.region.sequence_index(here, rows, seen.positions.device))
            self._region_context = (seen, here, found)
        return cast("AttentionContext", found)

    def _set_dropout_rows(self, module: Any, x: Tensor, side: ActivationSharding) -> None:
        """Tells a dropout which sequences it sees: its mask is that of these."""
        samples = module.stream.samples
        if samples is not None:
            module.rows = side.sequence_index(len(x), len(samples), x.device)

    def _set_residual_window(self, module: Any, args: tuple[Tensor, ...]) -> None:
        x, side = args[0], self.grid.residual
        self._set_dropout_rows(module, x, side)
        module.window = {**module.window, x.dim() - 1: (side.column_axis.index * x.shape[-1], self.width)}

    def _set_heads_window(self, module: Any, args: tuple[Tensor, ...]) -> None:
        x, side = args[0], self.grid.region
        self._set_dropout_rows(module, x, side)
        heads = x.shape[1]
        module.window = {**module.window, 1: (side.column_axis.index * heads, side.column_axis.size * heads)}

    # -----------------------------------------------------------------------------------------------------------------

    def _set_splits(self, name: str, cuts: tuple[DimSplit, ...], sum_over: tuple[str, ...]) -> LogicalParam:
        changed = replace(self.params[name], splits=cuts, partial_grad_axes=sum_over)
        self.params.update(dict.fromkeys(changed.names, changed))
        return changed

    def _parent(self, name: str) -> Any:
        return self.model.get_submodule(name.rpartition(".")[0])

    def _replace(self, name: str, module: nn.Module) -> None:
        setattr(self._parent(name), name.rpartition(".")[2], module)


def collectives(
    model: nn.Module, layers: Iterable[str], traffic: TransformerSizes, layout: Layout
) -> Iterable[Collective]:
    """What a step issues for the divided modules of a model, of which `layers` are repeated in backward.

    Gradients of which a rank has only a part are summed once a step beside this (tensor.partial_sums).
    """
    inside = tuple(f"{name}." for name in layers)
    parts = [
        (module.cost, int(name.startswith(inside)))
        for name, module in model.named_modules()
        if isinstance(getattr(module, "cost", None), tp_grid_cost.ModuleSizes)
    ]
    return tp_grid_cost.collectives(
        parts,
        layout,
        batch=traffic.batch,
        seq_len=traffic.seq_len,
        element_bytes=traffic.element_bytes,
        loss_bytes=traffic.loss_bytes,
    )
