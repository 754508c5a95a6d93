"""What was asked of `verify`: a case and layouts, or every fault in the question at once. No torch, so it is quick."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from echelon.layout import Layout
from echelon.layout import check as check_layout
from echelon.layout.faults import Fault, FaultError
from echelon.models import sizes
from echelon.models.own import spec_of
from echelon.models.sizes import ModelConfig
from echelon.proof.case import Case
from echelon.train.config import Config, is_own
from echelon.train.start import default_procs

DEFAULT_LAYOUTS = (
    "dp=2; dp=3,zero=1; dp=4,zero=2,accumulate=4; dp=2,zero=3; dp=4,zero=3,shard=2; "
    "tp=2; tp=2,sp=0,recompute=full; tp=4,accumulate=4; dp=2,tp=2,zero=1; dp=2,tp=4,zero=3,recompute=full"
)

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
AXES = ("dp", "replica", "shard", "tp", "shard*tp")


@dataclass(frozen=True, kw_only=True)
class Request:
    config: Path | None = None
    layouts: str = ""
    model: str = ""
    leave_out: str = ""

    def read(self) -> tuple[Case, list[Layout]]:
        """The case and its layouts. Raises FaultError with everything that is wrong."""
        if self.leave_out:
            check_leave_out(self.leave_out)
        config = Config.load(self.config) if self.config else None
        model = self.model or (config.model if config else "llama-tiny")
        layouts = self.layouts
        if not layouts and config and config.layout:
            layouts = str(Layout.parse(config.layout, world=default_procs(config)).replace(microbatch=1))
        case = make_case(model)
        if config and isinstance(case.model, ModelConfig) and not is_own(model):
            changes: dict[str, Any] = {
                key: value for key, value in (("dropout", config.dropout), ("tied", config.tied)) if value is not None
            }
            case = replace(case, model=replace(case.model, **changes), optimizer=config.optimizer, clip=config.clip)
        return case, parse(layouts or DEFAULT_LAYOUTS, case)


def make_case(
    model: str | ModelConfig | Callable[[], Any], batch: str | Callable[[int, int], Any] = "", **options: Any
) -> Case:
    if isinstance(model, ModelConfig):
        return Case(model=model, **options)
    spec = model if isinstance(model, str) else spec_of(model)
    if ":" not in spec:
        return Case(model=sizes.reduced(sizes.find(spec)), **options)
    batches = batch if isinstance(batch, str) else spec_of(batch)
    return Case(model=spec, batches=batches or spec.rpartition(":")[0] + ":batch", **options)


def parse(layouts: str | Sequence[str | Layout], case: Case) -> list[Layout]:
    """The layouts, each with its faults checked against the shrunken model; all faults at once."""
    texts = (
        [t for t in layouts.split(";") if t.strip()]
        if isinstance(layouts, str)
        else [str(layout) for layout in layouts]
    )
    found: list[Layout] = []
    faults: list[Fault] = []
    model = case.model if isinstance(case.model, ModelConfig) else None
    for text in texts:
        try:
            layout = check_layout(text, seq_len=case.seq_len, model=model)
        except FaultError as error:
            faults += error.faults
            continue
        faults += [Fault(key="layout", value=str(layout), rule=reason) for reason in layout.plan_only]
        found.append(layout)
    if faults:
        raise FaultError(faults)
    return found


def check_leave_out(text: str) -> None:
    axis, _, kind = text.partition(":")
    if (axis not in AXES and not axis.startswith("tp/")) or kind not in KINDS:
        legal = f"AXIS:COLLECTIVE, an axis of {', '.join(AXES)} and a collective of {', '.join(KINDS)}"
        raise FaultError([Fault(key="leave-out", value=text, rule="names no collective of a run", legal=legal)])
