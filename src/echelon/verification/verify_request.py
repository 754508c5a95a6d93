"""The request of `verify`: its case and layouts, or all invalid options at once. No torch, so it is quick."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from echelon.config.config_rules import conflicts_with_layout
from echelon.config.run_config import Config
from echelon.layout import Layout, check_layouts, grammar
from echelon.layout.layout import ASYNC_SCHEDULES
from echelon.layout.rules import LayoutConstraints, find_violations
from echelon.layout.validation_error import ValidationError, ValidationIssue
from echelon.models import model_config, user_model
from echelon.models.foreign.hf_source import is_hf_model, read_hf_source
from echelon.models.hf.hf_config_reader import CONFIG_FILE, read_hf_config
from echelon.models.model_config import ModelConfig
from echelon.models.model_dir import is_model_dir
from echelon.models.user_model import factory_spec
from echelon.pipeline.schedules import schedule_file_error
from echelon.training.run.budget_check import run_budget_issues
from echelon.training.start_training import default_procs
from echelon.verification.fold_layout import DEFAULT_MAX_RANKS
from echelon.verification.layout_case import case_for_layout
from echelon.verification.verified_config import Replacement, float64_config
from echelon.verification.verify_case import VerifyCase

DEFAULT_LAYOUTS = (
    "dp=2; dp=3,zero=1; dp=4,zero=2,accumulate=4; dp=2,zero=3; dp=4,zero=3,shard=2; "
    "tp=2; tp=2,sp=0,recompute=full; tp=4,accumulate=4; dp=2,tp=2,zero=1; dp=2,tp=4,zero=3,recompute=full; "
    "pp=2,accumulate=4; pp=2,schedule=zb-v,accumulate=4; dp=2,tp=2,pp=2,accumulate=2"
)
DEFAULT_MOE_LAYOUTS = (
    "dp=2; dp=2,ep=2; dp=4,ep=2,zero=1,accumulate=4; dp=4,ep=2,etp=2,zero=2; dp=4,ep=4,zero=3,recompute=full; "
    "tp=2; dp=2,tp=2,ep=4; cp=2,ep=2; dp=4,ep=4,ep_inner=2; "
    "pp=2,accumulate=4; dp=2,pp=2,ep=2,accumulate=2; tp=2,pp=2,ep=2,schedule=zb-v,accumulate=4"
)
"""the default layouts of MoE models"""

MAX_RANKS = 1024
"""processes that one machine may start"""
DEFAULT_GPU_LAYOUTS = "dp=1,accumulate=2; dp=1,recompute=full; dp=1,recompute=ops; dp=1,offload=optimizer"
"""the default layouts of one GPU, as configured"""
GPU_SEQ_LEN = 257
"""tokens of a sequence as configured on a GPU: several blocks of its kernels, and odd"""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send")
EXPERT_AXES = ("edp", "ereplica", "eshard", "ep", "etp")
AXES = ("dp", "replica", "shard", "tp", "x", "y", "z", "cp", "ring", "ulysses", "pp", *EXPERT_AXES)


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    """The options of `echelon verify`."""

    config: Path | None = None
    settings: Sequence[str] = ()
    """`key=value` over the configuration"""
    layouts: str = ""
    model: str = ""
    leave_out: str = ""
    max_ranks: int = DEFAULT_MAX_RANKS
    as_configured: bool = False

    def resolve(self) -> ResolvedRequest:
        """Return the case and its layouts. Raise ValidationError with every issue."""
        issues: list[ValidationIssue] = []
        config, case, layouts = None, VerifyCase(model=""), self.layouts
        with collect_faults(issues):
            check_leave_out(self.leave_out)
        with collect_faults(issues):
            check_max_ranks(self.max_ranks)
        with collect_faults(issues):
            config = Config.load(self.config, self.settings) if self.config or self.settings else None
        if not layouts and config and config.layout:
            procs = default_procs(config)
            layouts = str(Layout.parse(config.layout, world=procs, batch=config.batch))
            issues += run_budget_issues(
                config, procs
            )  # of the model's own sizes: the reduced one gets a budget of its own
        with collect_faults(issues):
            case = make_case(self.model or (config.model if config else "llama-tiny"))
        replaced: tuple[Replacement, ...] = ()
        case = replace(case, max_ranks=self.max_ranks)
        if config or self.as_configured:
            case, replaced = configure_case(case, config or Config(), as_configured=self.as_configured)
            issues += adapter_issues(case)
        parsed_layouts: list[Layout] = []
        with collect_faults(issues):
            parsed_layouts = parse_layouts(layouts or default_layouts(case), case)
        if issues:
            raise ValidationError(issues)
        return ResolvedRequest(case=case, layouts=tuple(parsed_layouts), replaced=replaced)


@dataclass(frozen=True, kw_only=True)
class ResolvedRequest:
    """What `verify` runs."""

    case: VerifyCase
    layouts: tuple[Layout, ...]
    replaced: tuple[Replacement, ...]
    """values of the configuration that are not run as they are"""


def adapter_issues(case: VerifyCase) -> Iterator[ValidationIssue]:
    """Yield patterns of adapters that match nothing; a custom model is built on the ranks alone."""
    lora = case.config.lora
    is_custom = isinstance(case.model, str) and user_model.is_user_model(case.model)
    if not lora.rank or not (lora.targets or lora.train) or is_custom or not case.model:
        return
    from echelon.models.lora.add_lora import check_patterns

    yield from check_patterns(case.build_base("meta"), lora)


def configure_case(
    case: VerifyCase, config: Config, *, as_configured: bool = False
) -> tuple[VerifyCase, tuple[Replacement, ...]]:
    """Return the case with a configuration, and what of it is not run as it is."""
    model = config.override_model(case.model) if isinstance(case.model, ModelConfig) else case.model
    runs, replaced = (config, ()) if as_configured else float64_config(config)
    packed = config.data.mask_documents
    case = replace(case, model=model, packed=packed, optimizer=runs.optimizer, clip=runs.clip, config=runs)
    return (on_real_device(case) if as_configured else case), replaced


def on_real_device(case: VerifyCase) -> VerifyCase:
    """Return the case for the device of a run: on a GPU with its number of ranks, and sizes for its kernels."""
    import torch

    config, num_gpus = case.config, torch.cuda.device_count()
    if config.dtype == "float64":
        raise ValidationError.single("dtype", "float64", "is what verify runs without --as-configured")
    if config.device == "cuda" and not num_gpus:
        raise ValidationError.single("device", "cuda", "requires a GPU (none here)", legal="cpu, auto")
    on_gpu = config.device != "cpu" and num_gpus > 0
    case = replace(case, config=replace(config, device="cuda" if on_gpu else "cpu"), steps=min(case.steps, 3))
    if not on_gpu:
        return case
    seq_len = GPU_SEQ_LEN
    if isinstance(case.model, ModelConfig) and not case.reduce:
        seq_len = min(seq_len, case.model.max_seq_len - 1)
    return replace(case, max_ranks=min(case.max_ranks or num_gpus, num_gpus), seq_len=seq_len)


@contextmanager
def collect_faults(issues: list[ValidationIssue]) -> Iterator[None]:
    """Collect validation issues, so that those of one option do not hide those of the next."""
    try:
        yield
    except ValidationError as error:
        issues += error.issues


def make_case(
    model: str | ModelConfig | Callable[[], Any], batch: str | Callable[[int, int], Any] = "", **options: Any
) -> VerifyCase:
    user_model.refuse_while_loading("verify")
    if isinstance(model, ModelConfig):
        return VerifyCase(model=model, **options)
    spec = model if isinstance(model, str) else factory_spec(model)
    if is_hf_model(spec):
        read_hf_source(spec)
        return VerifyCase(model=spec, **options)
    if ":" not in spec:
        return VerifyCase(model=_find_model(spec), reduce=True, **options)
    batches = batch if isinstance(batch, str) else factory_spec(batch)
    batches = batches or spec.rpartition(":")[0] + ":batch"
    legal = "a function batch(rows, seed), in the file of the model or named"
    issues = list(user_model.validate_spec(spec)) or list(user_model.validate_spec(batches, key="batch", legal=legal))
    if issues:
        raise ValidationError(issues)
    return VerifyCase(model=spec, batch_function=batches, **options)


def _find_model(spec: str) -> ModelConfig:
    """A named model, one that `echelon import` wrote, or one that a Hugging Face config describes, as in `plan`."""
    is_hf = spec.endswith(".json") or (Path(spec) / CONFIG_FILE).is_file()
    return read_hf_config(Path(spec)).config if is_hf and not is_model_dir(spec) else model_config.find_model(spec)


def default_layouts(case: VerifyCase) -> str:
    """The layouts to verify if the user names none: the usual ones that divide the model."""
    if case.config.device == "cuda" and case.max_ranks == 1:
        return DEFAULT_GPU_LAYOUTS
    if not isinstance(case.model, ModelConfig):
        return DEFAULT_LAYOUTS
    usual = Layout.parse_many(DEFAULT_MOE_LAYOUTS if case.model.moe else DEFAULT_LAYOUTS)
    constraints = LayoutConstraints(model=case.model)
    return "; ".join(str(layout) for layout in usual if not find_violations(layout, constraints))


def parse_layouts(layouts: str | Sequence[str | Layout], case: VerifyCase) -> list[Layout]:
    """The layouts, validated against the model and the reduced one; raises ValidationError with the issues of all."""
    text = layouts if isinstance(layouts, str) else "; ".join(str(layout) for layout in layouts)
    model = case.model if isinstance(case.model, ModelConfig) else None
    # An empty text would parse as the layout of one device.
    parts = [part for part in text.split(";") if part.strip()]
    parsed_layouts: list[Layout] = []
    issues: list[ValidationIssue] = []
    with collect_faults(issues):
        seq_len = None if case.reduce else case.seq_len  # a reduced model's sequences are as long as a layout needs
        parsed_layouts = check_layouts(text, seq_len=seq_len, model=model) if parts else []
    # From the keys as written, so that a layout with other issues reports it too.
    for layout in (Layout.resolve(grammar.parse_pairs(part).values) for part in parts):
        if wrong := schedule_file_error(layout, model.layers if model else 0):
            issues.append(ValidationIssue(key="schedule", value=layout.schedule, message=f"cannot be run: {wrong}"))
        if not case.is_float64 and layout.schedule in ASYNC_SCHEDULES:
            rule, legal = "is compared in float64 only", "a synchronous schedule, or verify without --as-configured"
            issues.append(ValidationIssue("schedule", layout.schedule, rule, legal=legal))
    for layout in parsed_layouts if not issues else ():
        with collect_faults(issues):
            case_for_layout(case, layout)
        issues += (issue for issue in conflicts_with_layout(case.config, layout) if issue not in issues)
    if issues:
        raise ValidationError(issues)
    return parsed_layouts


def check_max_ranks(max_ranks: int) -> None:
    if not 2 <= max_ranks <= MAX_RANKS:
        rule = "is not a number of ranks to verify on" if max_ranks else "verifies nothing"
        raise ValidationError.single("max-ranks", str(max_ranks), rule, legal=f"2 to {MAX_RANKS}")


def check_leave_out(text: str) -> None:
    axis, _, kind = text.partition(":")
    is_part = axis.startswith(("tp/", "x/", "y/", "pp[", "ep*etp/", "ep*etp%"))
    if text and (not (is_part or set(axis.split("*")) <= set(AXES)) or kind not in COLLECTIVES):
        legal = (
            f"AXIS:COLLECTIVE, an axis of {', '.join(AXES)}, a product (shard*tp), tp/2 or pp[0+1] and a collective of "
            f"{', '.join(COLLECTIVES)}"
        )
        issue = ValidationIssue(key="leave-out", value=text, message="is no collective of a run", legal=legal)
        raise ValidationError([issue])
