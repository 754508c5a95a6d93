"""`ModelSupport`: which layouts `train` has for a model, beyond the rules of the grammar. All of them for ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from echelon.layout import Layout


@dataclass(frozen=True, kw_only=True)
class ModelSupport:
    """What the modules of a model declare, or let be derived."""

    tp: bool = True
    """it is known how tp splits its modules"""
    sp: bool = True
    """sequence parallelism knows where it begins: at the embedding"""
    grids: bool = True
    """everything that a tensor grid must divide is known"""
    tp_divides: tuple[int, ...] = ()
    """numbers that tp must divide, of a model that is not ours: inputs of row-parallel GEMMs, heads"""
    tp_shares: tuple[int, ...] = ()
    """numbers that tp must divide or be a multiple of: outputs of column-parallel GEMMs, heads of keys"""
    cp: bool = True
    """context parallelism can split its sequences"""
    pp: bool = True
    """its pipeline layers are known"""
    slices: bool = True
    """a pipeline can cut its sequences (TeraPipe)"""
    ep: bool = True
    """its experts can be divided over ranks"""
    etp: bool = True
    """and each of them, and tokens can be sent in two hops"""
    ep_needs_sp: bool = True
    """tokens must be divided over tp where they are dispatched"""
    core: bool = True
    """recomputation knows the core of its attention"""
    own_recompute: bool = True
    """its modules recompute operators themselves, as divided ones must"""


FULL_SUPPORT = ModelSupport()


def unsupported_keys(name: str, support: ModelSupport, layout: Layout) -> dict[str, str]:
    """Return the keys of a layout that `train` refuses for this model, each with the reason."""
    if support == FULL_SUPPORT:
        return {}
    return dict([*_unsupported_tp(name, support, layout), *_unsupported(name, support, layout)])


def _unsupported_tp(name: str, support: ModelSupport, layout: Layout) -> Iterator[tuple[str, str]]:
    tp = layout.tp
    if tp == 1:
        return
    if not support.tp:
        yield "tp", f"it is not known how tp splits the modules of {name}"
    elif layout.tp_kind != "1d" and not support.grids:
        yield "tp_kind", f"it is not known how a grid divides all modules of {name}"
    elif layout.sp and not support.sp:
        yield "sp", f'the table of {name} calls no module "vocabulary", where sequence parallelism begins'
    elif layout.tp_kind == "1d":
        undivided = [size for size in support.tp_divides if size % tp]
        undivided += [size for size in support.tp_shares if size % tp and tp % size]
        if undivided:
            yield "tp", f"tp={tp} does not divide {undivided[0]} heads, inputs or outputs of a split GEMM of {name}"


def _unsupported(name: str, support: ModelSupport, layout: Layout) -> Iterator[tuple[str, str]]:
    if layout.cp > 1 and not support.cp:
        yield "cp", f"the attention of {name} cannot be divided over cp"
    if layout.pp > 1 and not support.pp:
        yield "pp", f"the pipeline layers of {name} are not known"
    if layout.schedule == "terapipe" and not support.slices:
        yield "schedule", f"a pipeline cannot cut the sequences of {name}"
    if layout.ep > 1 and not support.ep:
        yield "ep", f"the experts of {name} cannot be divided over ep"
    if layout.ep > 1 and layout.tp > 1 and not layout.sp and support.ep_needs_sp:
        yield "sp", "ep > 1 requires tokens that are divided over tp by position (sp=1)"
    if layout.etp > 1 and not support.etp:
        yield "etp", f"an expert of {name} cannot be split itself"
    if layout.ep_inner > 1 and not support.etp:
        yield "ep_inner", f"tokens of {name} are not sent to experts in two hops"
    if "selective" in layout.recompute and not support.core:
        yield "recompute", f"the core of the attention of {name} is not known"
    if layout.recompute == "ops" and layout.tp * layout.cp > 1 and not support.own_recompute:
        yield "recompute", f"modules of {name} that tp or cp divides do not recompute their operators themselves"
