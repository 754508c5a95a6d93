"""`LayoutCase`: a layout as it is verified, folded to this machine, with the model reduced for it. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from echelon.layout import Layout
from echelon.layout.rules import find_issues
from echelon.layout.validation_error import ValidationError
from echelon.models.model_config import ModelConfig
from echelon.models.reduced_model import describe_sizes, reduced_for_layout
from echelon.pipeline.schedules import FAMILIES, FILE_PREFIX, schedule_for_layout
from echelon.verification.fold_layout import FoldedLayout, fold_layout
from echelon.verification.verified_config import Replacement, fitted_config
from echelon.verification.verify_case import VerifyCase

GIB = 1 << 30
MAX_SEGMENT = 4
"""layers of a recomputed segment that are not folded"""
GPU_HEAD_DIM = 64
"""of the reduced model on a GPU: its kernels have blocks of this size"""


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
    head_dim = GPU_HEAD_DIM if case.config.device == "cuda" else 0
    stages = _num_stages(folded.layout)
    small = reduced_for_layout(model, layout, folded.layout, stages=stages, seq_len=seq_len, head_dim=head_dim)
    recompute = _reduced_recompute(folded.layout, small, seq_len)
    folded = replace(folded, layout=folded.layout.replace(recompute=recompute))
    if issues := find_issues(folded.layout, seq_len=seq_len, model=small):
        raise ValidationError(issues)
    config, replaced = fitted_config(case.config, layers=small.layers, stages=stages, seq_len=seq_len)
    case = replace(case, model=small, seq_len=seq_len, reduce=False, optimizer=config.optimizer, config=config)
    return LayoutCase(case=case, folded=folded, replaced=replaced)


def _reduced_recompute(layout: Layout, model: ModelConfig, seq_len: int) -> str:
    """The recompute policy for a reduced model: a segment of its few layers, a budget for its small activations."""
    kind, _, number = layout.recompute.partition(":")
    if kind == "every" and int(number) > MAX_SEGMENT:
        return "every:2"
    if kind != "budget":
        return layout.recompute
    family, stages = FAMILIES.get(layout.schedule), _num_stages(layout)
    in_flight = layout.accumulate * stages // layout.pp
    if family is not None:
        in_flight = max(family.in_flight(layout.pp, layout.vpp, layout.accumulate)) if layout.pp > 1 else 1
    num_layers = -(-model.layers // stages) * in_flight
    # What recomputes every layer, and a little more: some are recomputed then, and some are not.
    elements = num_layers * model.width + 1.2 * _saved_elements(model, seq_len)
    tokens = max(layout.microbatch, 2) * seq_len / layout.cp / (layout.tp if layout.sp else 1)
    return f"budget:{f'{8 * tokens * elements / GIB:.6f}'.rstrip('0')}GiB"


def _saved_elements(model: ModelConfig, seq_len: int) -> float:
    """Elements per token that autograd saves of a layer with torch's operators, or a few more."""
    q, kv = model.heads * model.head_dim, model.kv_heads * (model.head_dim + model.value_dim)
    scores = 2.2 * model.heads * seq_len if model.dropout or model.head_dim != model.value_dim else 0.0
    attention = 5 * model.width + (6 if model.qk_norm else 4) * q + 2 * kv + scores
    mlp = (2.0 if model.family == "gpt" else 4.0) * model.ffn
    if model.moe is not None:
        # The experts of one rank may get twice their share of the tokens.
        experts = 2 * model.moe.k * (2 * model.width + 4 * model.moe.ffn)
        mlp = max(mlp, experts + 4 * model.moe.shared_ffn + 4 * model.moe.experts + 4 * model.width)
    return attention + mlp


def _num_stages(layout: Layout) -> int:
    """Stages over all pipeline ranks; a file has its own number."""
    if layout.schedule.startswith(FILE_PREFIX) and layout.pp > 1:
        return schedule_for_layout(layout).stages
    return layout.pp * layout.vpp
