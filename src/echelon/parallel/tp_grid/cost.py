"""What a tensor grid costs: the collectives of every linear, norm, embedding and loss, to the byte. No torch.

A sharded module is described by its sizes on one rank, padding included. With n tokens on a rank (those of its own
sequences), q the grid's side and sizes in elements:

    linear, 2d       forward     q broadcasts of x's block over x and of W's over y
                     backward    q broadcasts of W's over y, q reductions of x's over x;
                                 q broadcasts of x's over x, q reductions of W's over y
    linear, 3d       forward     X gathered over one axis, W over z, Y scattered over the other
                     backward    dY and W gathered, dX scattered; X gathered, dW scattered

2.5d is 2d with fewer tokens on a rank; gradients of its replicated weights are summed over z once a step, with all
partial gradients (tp/cost.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from echelon.layout import Layout
from echelon.layout.collective import Collective
from echelon.layout.rules import head_parallel_size


@dataclass(frozen=True, kw_only=True)
class LinearSizes:
    """Sizes of a linear layer."""

    inputs: int
    """on one rank, as all sizes here"""
    outputs: int
    source: str
    """the axis over which the input's columns are sharded"""
    target: str
    """the axis over which the output's columns are sharded"""
    shares_input: bool = False
    """another layer reads the same input, and communicates it for both"""


@dataclass(frozen=True)
class NormSizes:
    """Sizes of a norm."""

    reduced: int
    """numbers per token that are all-reduced: in forward if none are gathered, and in backward"""
    gathered: int
    """numbers per token that are all-gathered in forward"""


@dataclass(frozen=True)
class EmbeddingSizes:
    """Sizes of an embedding."""

    rows: int
    columns: int


@dataclass(frozen=True)
class HeadSizes:
    """Sizes of a language head with its loss."""

    rows: int
    columns: int


ModuleSizes = LinearSizes | NormSizes | EmbeddingSizes | HeadSizes

CollectiveSize = tuple[str, str, int, int]
"""op, axis, elements, count"""


@dataclass(frozen=True)
class GridShape:
    """The ranks of a grid along each axis."""

    z: int
    y: int
    x: int

    @property
    def batch_parts(self) -> int:
        """Parts into which a microbatch's sequences are divided."""
        return self.z * self.y

    def local_batch(self, batch: int) -> int:
        """Return the sequences of a microbatch on one rank, padding included."""
        return -(-batch // self.batch_parts)


def grid_shape(layout: Layout) -> GridShape:
    side = head_parallel_size(layout)
    assert side is not None
    return GridShape(layout.tp // side**2, side, side)


def local_activation_shape(layout: Layout, batch: int, width: int) -> tuple[int, int]:
    """Return (sequences, columns) of a microbatch between regions on one rank; all of them with tp_kind=1d."""
    if layout.tp_kind == "1d":
        return batch, width
    grid = grid_shape(layout)
    return grid.local_batch(batch), -(-width // grid.x)


def padded_vocab_rows(layout: Layout, rows: int) -> int:
    """Return the rows of a padded table on all ranks together: 3d splits a rank's part once more."""
    side = grid_shape(layout).x
    here = -(-rows // side)
    return (-(-here // side) * side if layout.tp_kind == "3d" else here) * side


def num_weight_shards(layout: Layout) -> int:
    """Return the tp ranks that hold different parts of a weight: 2.5d replicates them over its layers."""
    return layout.tp // layout.depth


def linear_sizes(layout: Layout, inputs: int, outputs: int, *, leaves_region: bool, shares_input: bool) -> LinearSizes:
    """Return the sizes of a linear layer that enters a region, or leaves it."""
    side, region = grid_shape(layout).x, _COSTS[layout.tp_kind].region
    source, target = (region, "x") if leaves_region else ("x", region)
    here = -(-inputs // side), -(-outputs // side)
    return LinearSizes(inputs=here[0], outputs=here[1], source=source, target=target, shares_input=shares_input)


def embedding_and_head_sizes(layout: Layout, vocab_size: int, width: int) -> tuple[EmbeddingSizes, HeadSizes]:
    """Return the sizes of the embedding and of the language head."""
    side = grid_shape(layout).x
    sizes = -(-vocab_size // side), -(-width // side)
    return EmbeddingSizes(*sizes), HeadSizes(*sizes)


def collectives(
    modules: Iterable[tuple[ModuleSizes, int]],
    layout: Layout,
    *,
    batch: int,
    seq_len: int,
    element_bytes: int,
    loss_bytes: int,
) -> Iterator[Collective]:
    """Yield the collectives of a step for some modules, each with how often its forward is recomputed.

    `batch` is the sequences of a microbatch, and `loss_bytes` an element of norm statistics and of the loss, which are
    never 16-bit.
    """
    grid = grid_shape(layout)
    kind = _COSTS[layout.tp_kind](grid)
    tokens = grid.local_batch(batch) * seq_len
    for part, again in modules:
        size = loss_bytes if isinstance(part, NormSizes) else element_bytes
        purpose = _PURPOSES[type(part)]
        for repeats, messages in ((1 + again, kind.forward(part, tokens)), (1, kind.backward(part, tokens))):
            for name, axis, elements, count in messages:
                # Of several block transfers, all but one overlap the GEMM of another block.
                for steps, hidden in ((1, False), (count - 1, True)):
                    times = steps * repeats * layout.accumulate
                    yield Collective(
                        op=name, axis=axis, bytes=elements * size, count=times, overlapped=hidden, purpose=purpose
                    )
        if isinstance(part, HeadSizes):
            numbers = 2 * grid.x * tokens * loss_bytes
            yield Collective(op="all_gather", axis=kind.region, bytes=numbers, count=layout.accumulate, purpose="loss")


class _SummaCost:
    region = "x"
    """the axis over which columns inside a region and the vocabulary are sharded"""

    def __init__(self, grid: GridShape):
        self.grid, self.side = grid, grid.x

    def forward(self, part: ModuleSizes, n: int) -> Iterator[CollectiveSize]:
        q = self.side
        if isinstance(part, LinearSizes):
            if not part.shares_input:
                yield "broadcast", "x", n * part.inputs, q
            yield "broadcast", "y", part.inputs * part.outputs, q
        elif isinstance(part, EmbeddingSizes):
            yield "broadcast", "y", part.rows * part.columns, q
        elif isinstance(part, HeadSizes):
            yield "broadcast", "y", part.rows * part.columns, q
            yield "reduce", "x", n * part.rows, q
        else:
            yield from _norm_forward(part, n, self.grid)

    def backward(self, part: ModuleSizes, n: int) -> Iterator[CollectiveSize]:
        q = self.side
        if isinstance(part, LinearSizes):
            for axis, elements in (("x", n * part.inputs), ("y", part.inputs * part.outputs))[part.shares_input :]:
                yield "broadcast", axis, elements, q
                yield "reduce", axis, elements, q
        elif isinstance(part, EmbeddingSizes):
            yield "reduce", "y", part.rows * part.columns, q
        elif isinstance(part, HeadSizes):
            yield "broadcast", "x", n * part.rows, q
            yield "broadcast", "y", part.rows * part.columns, q
            yield "reduce", "y", part.rows * part.columns, q
        else:
            yield "all_reduce", "x", part.reduced * n, 1


class _Cost3D:
    region = "y"

    def __init__(self, grid: GridShape):
        self.grid, self.side = grid, grid.z

    def forward(self, part: ModuleSizes, n: int) -> Iterator[CollectiveSize]:
        p = self.side
        if isinstance(part, LinearSizes):
            if not part.shares_input:
                yield "all_gather", part.target, p * n * part.inputs, 1
            yield "all_gather", "z", self._padded(part.outputs) * part.inputs, 1
            yield "reduce_scatter", part.source, p * n * part.outputs, 1
        elif isinstance(part, EmbeddingSizes):
            yield "all_gather", "z", self._padded(part.rows) * part.columns, 1
            yield "reduce_scatter", "y", p * n * part.columns, 1
        elif isinstance(part, HeadSizes):
            yield from self.forward(_as_linear(part), n)
        else:
            yield from _norm_forward(part, n, self.grid)

    def backward(self, part: ModuleSizes, n: int) -> Iterator[CollectiveSize]:
        p = self.side
        if isinstance(part, LinearSizes):
            weight = self._padded(part.outputs) * part.inputs
            yield "all_gather", part.source, p * n * part.outputs, 1
            yield "all_gather", "z", weight, 1
            yield "reduce_scatter", "z", weight, 1
            if not part.shares_input:
                yield "all_gather", part.target, p * n * part.inputs, 1
                yield "reduce_scatter", part.target, p * n * part.inputs, 1
        elif isinstance(part, EmbeddingSizes):
            yield "all_gather", "y", p * n * part.columns, 1
            yield "reduce_scatter", "z", self._padded(part.rows) * part.columns, 1
        elif isinstance(part, HeadSizes):
            yield from self.backward(_as_linear(part), n)
        else:
            yield "all_reduce", "x", part.reduced * n, 1

    def _padded(self, rows: int) -> int:
        """Return the rows of a block that z splits once more, padded."""
        return -(-rows // self.side) * self.side


_COSTS: dict[str, type[_SummaCost | _Cost3D]] = {"2d": _SummaCost, "2.5d": _SummaCost, "3d": _Cost3D}


_PURPOSES: dict[type, str] = {LinearSizes: "linear", NormSizes: "norm", EmbeddingSizes: "embedding", HeadSizes: "head"}


def _as_linear(head: HeadSizes) -> LinearSizes:
    return LinearSizes(inputs=head.columns, outputs=head.rows, source="x", target="y")


def _norm_forward(part: NormSizes, n: int, grid: GridShape) -> Iterator[CollectiveSize]:
    if part.gathered:
        yield "all_gather", "x", grid.x * part.gathered * n, 1
    else:
        yield "all_reduce", "x", part.reduced * n, 1
