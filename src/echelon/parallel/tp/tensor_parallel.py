"""Tensor parallelism in one dimension, after Megatron-LM: column- and row-split products in pairs.

[Note: one region]

                 +-------- region: a rank works on its own heads, or on its slice of the ffn --------+
    x --enter--> | column-split (q, k, v; gate, up) -> attention / activation -> row-split (o, down) | --leave--> y
                 +-----------------------------------------------------------------------------------+

`enter` costs nothing forward and one all-reduce backward; `leave` one all-reduce forward and nothing backward: four
all-reduces per layer. `enter` stands before the whole region, so q, k and v share the one in backward. Under sequence
parallelism (sequence.py) both change. What enters latent attention's region is the narrow vectors (models/mla.py).
Routed experts are no region: a token goes to them once, from the rank that has it (expert.py).

Which module is what is a table beside the model (models/tp_splits.py), from patterns to words:

    region      the module's first argument enters the region
    column      a linear whose outputs are divided;   column/heads: by whole heads, replicated where tp exceeds them
    row         a linear whose inputs are divided and whose output leaves the region
    vocabulary  an embedding divided by rows          head: the language head and its loss
    heads       a dropout on something with a dimension of heads
    sequence    a module between regions              positions: one whose input is position ids
    inside      a module in a region that is whole on every rank, and whose gradients are parts: it saw a rank's heads
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, cast

from echelon.layout import Layout
from echelon.layout.collective import Collective
from echelon.layout.placement import DimSplit, LogicalParam, ParamGroupSpec
from echelon.memory.checkpointing.cost import RecomputedLayers, partition_numel
from echelon.parallel.tp import sequence_parallel as sequence

if TYPE_CHECKING:
    from torch import Tensor, nn

    from echelon.models.model_config import ModelConfig
    from echelon.parallel.comm.mesh_axis import MeshAxis
    from echelon.parallel.tp.tp_collectives import RegionBoundary

RoleTable = Mapping[str, str]
ROLES = ("region", "column", "column/heads", "row", "vocabulary", "head", "heads", "sequence", "positions", "inside")


def apply_tensor_parallel(
    model: nn.Module, params: Iterable[LogicalParam], table: RoleTable, axis: MeshAxis, *, sequence_parallel: bool
) -> tuple[list[LogicalParam], RegionBoundary]:
    """Changes the modules of a one-device model for one rank of `axis`, and says how each parameter is cut."""
    from echelon.parallel.tp.tp_collectives import FullSequenceBoundary, SequenceParallelBoundary

    boundary: RegionBoundary = SequenceParallelBoundary(axis) if sequence_parallel else FullSequenceBoundary(axis)
    words = match_roles(model, table)
    if sequence_parallel and "vocabulary" not in words.values():
        raise ValueError(
            f"sequence parallelism begins at an embedding, and the table of {type(model).__name__} calls no module "
            '"vocabulary" (sp=1); use sp=0'
        )
    plan = _TensorParallelSplitter(
        model, axis, boundary, {name: entry for entry in params for name in entry.names}, sequence_parallel
    )
    for name, word in words.items():
        plan.apply_role(name, word)
    return [plan.params[entry.name] for entry in params], boundary


def match_roles(model: nn.Module, table: RoleTable) -> dict[str, str]:
    """The word for each module that a pattern names. A pattern without a match and an unknown word are errors."""
    problems = [
        f"{word!r} of {pattern!r} is not one of {', '.join(ROLES)}"
        for pattern, word in table.items()
        if word not in ROLES
    ]
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    found: dict[str, str] = {}
    for pattern, word in table.items():
        hits = [name for name in names if fnmatchcase(name, pattern)]
        if not hits:
            problems.append(f"pattern {pattern!r} matches no module of {type(model).__name__}")
        found.update(dict.fromkeys(hits, word))
    if problems:
        raise ValueError("the table of tensor splits does not fit the model: " + "; ".join(problems))
    return found


class _TensorParallelSplitter:
    """The changes to one model, module by module."""

    def __init__(
        self,
        model: nn.Module,
        axis: MeshAxis,
        boundary: RegionBoundary,
        params: dict[str, LogicalParam],
        sequence_parallel: bool,
    ):
        self.model, self.axis, self.boundary, self.params = model, axis, boundary, params
        self.sequence_parallel = sequence_parallel

    def apply_role(self, name: str, role: str) -> None:
        module = self.model.get_submodule(name)
        actions: dict[str, Callable[[str, Any], None]] = {
            "region": self._region,
            "column": lambda n, m: self._column(n, m, grain=1),
            "column/heads": lambda n, m: self._column(n, m, grain=self._parent(n).head_dim),
            "row": self._row,
            "vocabulary": self._embedding,
            "head": self._head,
            "heads": lambda _, m: m.register_forward_pre_hook(self._set_dropout_window),
            "sequence": self._sequence,
            "positions": self._positions,
            "inside": self._inside,
        }
        actions[role](name, module)

    def _region(self, name: str, module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda _, args: (self.boundary.enter(args[0]), *args[1:]))

    def _column(self, name: str, module: nn.Linear, grain: int) -> None:
        pieces, tp = module.out_features // grain, self.axis.size
        if pieces % tp and tp % pieces:
            raise ValueError(
                f"tp={tp} does not divide the outputs of {name} ({pieces} of {grain}); use a divisor of {pieces}"
            )
        cut = DimSplit(axis="tp", dim=0, num_parts=min(tp, pieces), num_copies=max(tp // pieces, 1))
        for attribute in ("weight", "bias"):
            self._split_param(f"{name}.{attribute}", cut)

    def _row(self, name: str, module: nn.Linear) -> None:
        from echelon.parallel.tp.row_linear import RowLinear

        if module.in_features % self.axis.size:
            raise ValueError(f"tp={self.axis.size} does not divide the inputs of {name} ({module.in_features})")
        self._split_param(f"{name}.weight", DimSplit(axis="tp", dim=1, num_parts=self.axis.size))
        self._replace(name, RowLinear(cast("nn.Parameter", module.weight), module.bias, self.boundary))
        self._between_regions(f"{name}.bias")

    def _embedding(self, name: str, module: nn.Embedding) -> None:
        from echelon.parallel.tp.vocab_parallel import VocabParallelEmbedding

        self._split_param(f"{name}.weight", DimSplit(axis="tp", dim=0, num_parts=self.axis.size))
        vocabulary = module.num_embeddings
        self._replace(name, VocabParallelEmbedding(cast("nn.Parameter", module.weight), self.boundary, vocabulary))

    def _head(self, name: str, module: Any) -> None:
        from echelon.parallel.tp.vocab_parallel import VocabParallelHead

        self._split_param(f"{name}.weight", DimSplit(axis="tp", dim=0, num_parts=self.axis.size))
        vocabulary = self.params[f"{name}.weight"].shape[0]
        self._replace(name, VocabParallelHead(module.weight, self.boundary, vocabulary))

    def _sequence(self, name: str, module: nn.Module) -> None:
        for parameter, _ in module.named_parameters():
            self._between_regions(f"{name}.{parameter}")
        if self.sequence_parallel and hasattr(module, "window"):
            module.register_forward_pre_hook(self._set_dropout_window)

    def _positions(self, name: str, module: nn.Module) -> None:
        from echelon.parallel.tp.tp_collectives import local_sequence_slice

        if self.sequence_parallel:
            module.register_forward_pre_hook(lambda _, args: (local_sequence_slice(args[0], self.axis), *args[1:]))
            self._between_regions(f"{name}.weight")

    def _inside(self, name: str, module: nn.Module) -> None:
        for parameter, _ in module.named_parameters():
            self._update_param(f"{name}.{parameter}", partial_grad_axes=("tp",))

    def _set_dropout_window(self, module: Any, args: tuple[Tensor, ...]) -> None:
        """Tells a dropout which part of dimension 1 (positions or heads) it sees: its mask is that part."""
        local = args[0].shape[1]
        module.window = {1: (self.axis.index * local, self.axis.size * local)}

    def _between_regions(self, name: str) -> None:
        if self.sequence_parallel and name in self.params:
            self._update_param(name, partial_grad_axes=("tp",))

    def _split_param(self, name: str, cut: DimSplit) -> None:
        if name in self.params:
            extra = (f"tp/{cut.num_copies}",) if cut.num_copies > 1 else ()
            self._update_param(name, splits=(cut,), partial_grad_axes=extra)

    def _update_param(self, name: str, **changes: Any) -> None:
        changed = replace(self.params[name], **changes)
        self.params.update(dict.fromkeys(changed.names, changed))

    def _parent(self, name: str) -> Any:
        return self.model.get_submodule(name.rpartition(".")[0])

    def _replace(self, name: str, module: nn.Module) -> None:
        setattr(self._parent(name), name.rpartition(".")[2], module)


@dataclass(frozen=True, kw_only=True)
class TransformerSizes:
    """The sizes that the communication of a transformer depends on."""

    layers: int
    """on this rank"""
    width: int
    batch: int
    """sequences in a microbatch"""
    seq_len: int
    dropout: bool
    """dropout after a block's last product: recomputation then repeats that block's last collective too"""
    element_bytes: int
    loss_bytes: int
    """bytes of one element of the loss's arithmetic: 4, or 8 under float64"""
    has_embedding: bool = True
    """this rank has the embedding"""
    has_head: bool = True
    """this rank has the head"""
    heads: int = 1
    kv_heads: int = 1
    """of the whole model, as `heads`"""
    head_dim: int = 0
    """elements of a head's query and key; 0: width / heads"""
    value_dim: int = 0
    """elements of a head's value; 0: as many"""
    attention_input_width: int = 0
    """elements of a token that enter attention's region; 0: the width"""
    moe_layers: int = 0
    """of the layers, those with experts"""
    first_moe_layer: int | None = None
    """number of the whole model's first layer with experts: behind it, balance losses go from layer to layer"""
    has_shared_expert: bool = False
    """these have an expert that every token passes through: a region as a plain layer's second one"""
    causal: bool = True

    @classmethod
    def from_config(cls, config: ModelConfig, *, batch: int, seq_len: int, element_bytes: int) -> TransformerSizes:
        """Of a whole model of ours."""
        latent, mixture = config.mla, config.moe
        narrow = (latent.query_rank or config.width) + latent.kv_rank + latent.rope_dim if latent else 0
        mixed = [layer for layer in range(config.layers) if mixture and mixture.is_moe_layer(layer)]
        return cls(
            layers=config.layers,
            width=config.width,
            batch=batch,
            seq_len=seq_len,
            dropout=config.dropout > 0,
            element_bytes=element_bytes,
            loss_bytes=max(element_bytes, 4),
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            value_dim=config.value_dim,
            attention_input_width=narrow,
            moe_layers=len(mixed),
            first_moe_layer=min(mixed, default=None),
            has_shared_expert=bool(mixture and mixture.shared_ffn),
            causal=config.causal,
        )


def collectives(
    sizes: TransformerSizes, layout: Layout, recomputed: RecomputedLayers | None = None, *, partition: bool = False
) -> Iterable[Collective]:
    """What one step issues over tp for a transformer, apart from the once-a-step sums of `partial_sums`.

    `again` says which layers are repeated, where the layout does not; with `partition` their inputs are gathered.
    """
    if layout.tp == 1:
        return
    steps, t = layout.accumulate, sizes
    recomputed = recomputed or RecomputedLayers.from_policy(layout.recompute, layers=t.layers, moe_layers=t.moe_layers)
    crossed = _RegionCrossings.count(t, recomputed)
    if partition and recomputed.segments:
        size = partition_numel(t.batch * t.seq_len * t.width, layout.tp) * layout.tp * t.element_bytes
        count = recomputed.segments * steps
        yield Collective(op="all_gather", axis="tp", bytes=size, count=count, purpose="kept inputs")
    if layout.sp:
        gathered, scattered = crossed.gathered(), crossed.scattered()
        yield from sequence.sequence_parallel_collectives(
            layout, t.batch, t.seq_len, t.element_bytes, gathered, scattered
        )
    else:
        for elements, count in crossed.reduced().items():
            size = t.batch * t.seq_len * elements * t.element_bytes
            yield Collective(op="all_reduce", axis="tp", bytes=size, count=count * steps, purpose="activations")
    if not t.has_head:
        return
    numbers = 2 * layout.tp * t.batch * t.seq_len * t.loss_bytes
    yield Collective(op="all_gather", axis="tp", bytes=numbers, count=steps, purpose="loss")


@dataclass(frozen=True, kw_only=True)
class _RegionCrossings:
    """How often a microbatch enters and leaves regions, by the elements of a token that do. Backward, all do again."""

    enter: Counter[int]
    leave: Counter[int]
    reenter: Counter[int]
    """where blocks are recomputed"""
    releave: Counter[int]

    @classmethod
    def count(cls, t: TransformerSizes, again: RecomputedLayers) -> _RegionCrossings:
        plain = t.layers - t.moe_layers
        shared = t.moe_layers * t.has_shared_expert
        # Recomputing a block repeats what enters, and what leaves its first region; what leaves its last one only where
        # another block is repeated after it, dropout after it needs the result, or experts come after it.
        last = again.dense if t.dropout else again.dense - again.dense_tails
        return cls(
            enter=_region_inputs(t, t.layers, plain + shared) + Counter({t.width: t.has_head}),
            leave=Counter({t.width: t.layers + plain + shared + t.has_embedding}),
            reenter=_region_inputs(t, again.layers, again.dense + again.moe * t.has_shared_expert),
            releave=Counter({t.width: again.layers + last + again.moe * t.has_shared_expert}),
        )

    def reduced(self) -> Counter[int]:
        """Leaving is an all-reduce forward, entering one backward."""
        return self.leave + self.enter + self.releave

    def gathered(self) -> Counter[int]:
        """Entering gathers forward, leaving backward."""
        return self.enter + self.leave + self.reenter

    def scattered(self) -> Counter[int]:
        """Leaving scatters forward, entering backward."""
        return self.leave + self.enter + self.releave


def _region_inputs(t: TransformerSizes, attentions: int, others: int) -> Counter[int]:
    found = Counter({t.width: others})
    found[t.attention_input_width or t.width] += attentions
    return found


def partial_grad_collectives(
    groups: Iterable[ParamGroupSpec], reduce_bytes: int, shard_index: Callable[[ParamGroupSpec], int] = lambda _: 0
) -> Iterable[Collective]:
    """One all-reduce a step and axis for gradients of which each tp rank has only a part."""
    sizes: dict[str, int] = {}
    for unit in groups:
        for entry in unit.params:
            for axis in entry.partial_grad_axes:
                start, stop = unit.shard_interval(entry, shard_index(unit))
                sizes[axis] = sizes.get(axis, 0) + (stop - start) * unit.element_bytes(reduce_bytes)
    for axis, size in sizes.items():
        if size:
            yield Collective(op="all_reduce", axis=axis, bytes=size, purpose="partial gradients")
