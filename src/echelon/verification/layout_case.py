"""`LayoutCase`: a layout as it is verified, folded to this machine, with the model reduced for it. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from echelon.layout import Layout
from echelon.layout.rules import find_issues
from echelon.layout.validation_error import ValidationError
from echelon.models.model_config import ModelConfig
from echelon.models.reduced_model import describe_sizes, reduced_for_layout
from echelon.pipeline.schedules import FILE_PREFIX, schedule_for_layout
from echelon.verification.fold_layout import FoldedLayout, fold_layout
from echelon.verification.verified_config import Replacement, fitted_config
from echelon.verification.verify_case import VerifyCase


@dataclass(frozen=True, kw_only=True)
class LayoutCase:
    """What one device and one layout run."""

    case: VerifyCase
    """with the model as it runs"""
    folded: FoldedLayout
    replaced: tuple[Replacement, ...] = ()
    """values of the configuration that the reduced model is too small for"""

    @property
    def layout(self) -> Layout:
        """The layout as it runs."""
        return self.folded.layout

    @property
    def model(self) -> str:
        """The sizes of the model that runs; a custom model runs as it is."""
        model = self.case.model
        if not isinstance(model, ModelConfig):
            return model
        return f"{describe_sizes(model)}, {self.case.seq_len} tokens per sequence"


def case_for_layout(case: VerifyCase, layout: Layout) -> LayoutCase:
    """Fold a layout to the case's ranks, and reduce the model for it. Raises ValidationError where it cannot."""
    model, folded = case.model, FoldedLayout(requested=layout, layout=layout)
    if case.max_ranks:
        folded = fold_layout(layout, case.max_ranks, model_follows=case.reduce)
    if not case.reduce or not isinstance(model, ModelConfig):
        return LayoutCase(case=case, folded=folded)
    # Two tokens for each rank that has some of a sequence, and odd on purpose.
    seq_len = max(case.seq_len, 2 * folded.layout.cp * folded.layout.tp + 1)
    small = reduced_for_layout(model, layout, folded.layout, stages=_num_stages(folded.layout), seq_len=seq_len)
    if issues := find_issues(folded.layout, seq_len=seq_len, model=small):
        raise ValidationError(issues)
    config, replaced = fitted_config(
        case.config, layers=small.layers, stages=_num_stages(folded.layout), seq_len=seq_len
    )
    case = replace(case, model=small, seq_len=seq_len, reduce=False, optimizer=config.optimizer, config=config)
    return LayoutCase(case=case, folded=folded, replaced=replaced)


def _num_stages(layout: Layout) -> int:
    """Stages over all pipeline ranks; a file has its own number."""
    if layout.schedule.startswith(FILE_PREFIX) and layout.pp > 1:
        return schedule_for_layout(layout).stages
    return layout.pp * layout.vpp
