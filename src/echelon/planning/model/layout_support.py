"""What `train` refuses a model in a layout for, beyond the rules of the grammar: what its modules do not declare."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.layout import Layout
from echelon.planning.model.model_shape import ModelShape


def unsupported_keys(shape: ModelShape, layout: Layout) -> dict[str, str]:
    """Return the keys of a layout that the model does not support, each with the reason."""
    return dict(_unsupported(shape, layout))


def _unsupported(shape: ModelShape, layout: Layout) -> Iterator[tuple[str, str]]:
    tp = layout.tp
    if tp > 1 and not shape.supports_tp:
        yield "tp", f"{shape.name} has no table that says how tp splits its modules"
    elif tp > 1 and layout.tp_kind != "1d" and not shape.supports_grids:
        yield "tp_kind", f"the table of {shape.name} does not divide all that a grid must divide"
    elif tp > 1 and layout.sp and not shape.supports_sp:
        yield "sp", f'the table of {shape.name} calls no module "vocabulary", where sequence parallelism begins'
    elif tp > 1 and layout.tp_kind == "1d" and (odd := [size for size in shape.tp_row_inputs if size % tp]):
        yield "tp", f"tp={tp} does not divide the {odd[0]} inputs of a row-parallel GEMM of {shape.name}"
    elif tp > 1 and layout.tp_kind == "1d" and (odd := [n for n in shape.tp_column_units if n % tp and tp % n]):
        yield "tp", f"tp={tp} does not divide the {odd[0]} outputs or heads of a column-parallel GEMM of {shape.name}"
    if layout.cp > 1 and not shape.supports_cp:
        yield "cp", f"the attention of {shape.name} cannot be divided over cp"
    if layout.pp > 1 and not shape.supports_pp:
        yield "pp", f"the pipeline layers of {shape.name} are not known"
    if layout.ep * layout.etp > 1 and not shape.supports_ep:
        yield "ep", f"the experts of {shape.name} cannot be divided over ep"
