"""The layouts and variants of `verify --all`: every supported layout with every option that must not change results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, product

from echelon.config.sections import OptimizerConfig
from echelon.launch.rank_pool import RankPool
from echelon.models import model_config
from echelon.verification.verifier import PRELOAD, LayoutVerdict, Report, Verifier
from echelon.verification.verify_case import DEFAULT_ADAMW, VerifyCase
from echelon.verification.verify_request import parse_layouts

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
ALL_LAYOUTS = (
    *(f"dp={dp}" for dp in (2, 3, 4, 8)),
    *(f"dp={dp},zero={zero}" for zero in (1, 2, 3) for dp in (2, 3, 4)),
    "dp=4,shard=2",
    *(f"tp={tp},sp={sp}" for tp in (2, 4) for sp in (0, 1)),
    *(f"dp=2,tp={tp},zero={zero}" for tp in (2, 4) for zero in (0, 1, 2, 3)),
    *("tp=4,tp_kind=2d", "dp=2,tp=4,tp_kind=2d", "tp=8,tp_kind=2.5d,depth=2", "tp=8,tp_kind=3d"),
    *(f"pp=2,schedule={schedule}" for schedule in ("naive", "gpipe", *SCHEDULES)),
    *(f"dp=2,pp=2,zero={zero}" for zero in (0, 1, 2, 3)),
    *("cp=2", "dp=2,cp=2,cp_kind=gather,zero=3", "cp=4,cp_kind=ring-ulysses,ulysses=2"),
    *("pp=4", "tp=2,pp=2", "dp=2,tp=2,pp=2"),
)
"""every supported kind of layout, on up to eight ranks"""

ALL_MOE_LAYOUTS = (
    *(f"dp=4,ep={ep},zero={zero}" for ep in (2, 4) for zero in (0, 1, 2, 3)),
    *("dp=4,ep=2,etp=2", "dp=4,shard=2,ep=2"),
    *("tp=2", "tp=2,ep=2", "dp=2,tp=2,ep=4", "dp=4,tp=2,ep=4,etp=2,zero=3"),
    *(f"dp=4,ep=4,ep_inner=2,zero={zero}" for zero in (0, 3)),
    "dp=2,tp=2,cp=2,ep=8,ep_inner=4",
    *(f"dp=2,cp=2,cp_kind={kind},ep=4" for kind in ("ring", "ulysses", "gather")),
    *(f"dp=2,pp=2,ep=2,schedule={schedule}" for schedule in SCHEDULES),
    "dp=2,tp=2,pp=2,ep=4,zero=3",
)
"""the same for MoE models"""


@dataclass(frozen=True, kw_only=True)
class VerifyVariant:
    """One combination of model options and layout options."""

    label: str
    case: VerifyCase
    accumulate: int
    recompute: str


def variants() -> Iterator[VerifyVariant]:
    """Accumulation 1 and 4, tied or not, dropout 0 and 0.1, recompute none and full, GPT and Llama, AdamW and SGD."""
    rules = {"adamw": DEFAULT_ADAMW, "sgd": OptimizerConfig(name="sgd", lr=1e-1, momentum=0.9)}
    for family, tied, dropout, (name, rule) in product(("gpt", "llama"), (True, False), (0.0, 0.1), rules.items()):
        shape = replace(model_config.find_model(f"{family}-tiny"), tied=tied, dropout=dropout)
        label = f"{family} {'tied' if tied else 'untied'} dropout={dropout:g} {name}"
        yield from _with_layout_options(label, VerifyCase(model=shape, optimizer=rule))


def moe_variants() -> Iterator[VerifyVariant]:
    """The same for MoE models: dropless, with a capacity, and with a shared expert and latent attention."""
    for name, dropout in product(("moe-tiny", "switch-tiny", "deepseek-tiny"), (0.0, 0.1)):
        shape = model_config.override_config(model_config.find_model(name), dropout=dropout, expert_dropout=dropout)
        yield from _with_layout_options(f"{name} dropout={dropout:g}", VerifyCase(model=shape))


def _with_layout_options(label: str, case: VerifyCase) -> Iterator[VerifyVariant]:
    for accumulate, recompute in product((1, 4), ("none", "full", "ops")):
        yield VerifyVariant(label=label, case=case, accumulate=accumulate, recompute=recompute)


def verify_all(leave_out: str, progress: Callable[[LayoutVerdict, str], None]) -> Report:
    verdicts: list[LayoutVerdict] = []
    with RankPool(preload=PRELOAD) as pool:
        pairs = chain(product(variants(), [ALL_LAYOUTS]), product(moe_variants(), [ALL_MOE_LAYOUTS]))
        for variant, layouts in pairs:
            verifier = Verifier(pool, variant.case, leave_out)
            for layout in parse_layouts(layouts, variant.case):
                layout = layout.replace(accumulate=variant.accumulate, recompute=variant.recompute)
                verdicts.append(verifier.verify_layout(layout))
                progress(verdicts[-1], variant.label)
    return Report(verdicts=tuple(verdicts))
