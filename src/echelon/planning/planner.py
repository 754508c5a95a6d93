"""The entry point of planning, for `echelon plan`, `echelon.plan(...)` and `train --plan auto`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from echelon.layout import check_layout, grammar
from echelon.layout.validation_error import ValidationError, ValidationIssue, did_you_mean
from echelon.optim import cost
from echelon.optim.update_rule import UpdateRule
from echelon.planning.calibrate import correction as corrections
from echelon.planning.calibrate.constants import DEFAULT_IMBALANCE
from echelon.planning.calibrate.programs import OWN_PROGRAMS, PLANNED_PROGRAMS, attention_kernel, reduced_gradient_bytes
from echelon.planning.cluster.cluster import Cluster, parse_cluster
from echelon.planning.cluster.device_kinds import DEVICE_KINDS
from echelon.planning.cost.recompute_cost import budget_issues
from echelon.planning.explain.baselines import Baseline, price_baselines
from echelon.planning.explain.reasons import explain_infeasible, explain_plan, training_cost
from echelon.planning.explain.replicated_stages import ReplicatedStages, replicated_stages
from echelon.planning.memory_options import MemoryOptions
from echelon.planning.model.adapter_shapes import target_issues
from echelon.planning.model.model_shape import ModelShape, default_seq_len
from echelon.planning.model.model_sources import resolve_shape
from echelon.planning.priced_plan import Plan, price
from echelon.planning.scenario import DEFAULT_MEMORY_OPTIONS, NUM_MOMENTS, OBJECTIVES, PlanRequest
from echelon.planning.search.layout_search import least_memory_plan, search_plans

if TYPE_CHECKING:
    from torch import Tensor, nn

T = TypeVar("T")
PRECISIONS = ("bf16", "fp16", "fp8", "fp4", "fp32")
DEFAULT_SEQUENCES_PER_DEVICE = 16


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """Plans, best first, with an explanation."""

    plans: tuple[Plan, ...]
    explanation: tuple[str, ...] = ()
    """why nothing fits"""
    nearest: Plan | None = None
    """where nothing fits, the plan that needs the least memory"""
    baselines: tuple[Baseline, ...] = ()
    """simpler ways, if they were asked for"""
    replicated_stages: ReplicatedStages | None = None
    """what PipeDream's optimizer would choose, if the best plan is PipeDream's schedule"""


def plan(model: str | nn.Module, cluster: str = "here", **options: Any) -> list[Plan]:
    """Rank layouts of a model on a cluster, best first; an empty list where none fits.

    The model is what `echelon plan` takes, a model of transformers, or any module with `inputs` of its forward.
    Options are those of `find_plans` and of `echelon plan`. No device is needed.

    >>> best = ec.plan("llama-8b", "8xh100", batch=64, seq_len=4096)[0]
    >>> best.fits
    True
    """
    return list(find_plans(model, cluster, **options).plans)


def find_plans(
    model: str | nn.Module,
    cluster: str,
    *,
    inputs: Mapping[str, Tensor] | None = None,
    batch: int = 0,
    seq_len: int = 0,
    layout: str = "",
    fixed: str = "",
    precision: str = "bf16",
    program: str = "echelon",
    objective: str = "time",
    plan_only: bool = False,
    top: int = 10,
    correct: str = "",
    tokens: float = 0.0,
    imbalance: float = 0.0,
    optimizer: UpdateRule | None = None,
    memory_options: MemoryOptions = DEFAULT_MEMORY_OPTIONS,
    host_share: float | None = None,
    baselines: bool = False,
    lora_rank: int = 0,
    lora_targets: Sequence[str] = (),
) -> PlanResult:
    """Search plans for a model on a cluster, or price `layout`; with `fixed`, only layouts that have these keys.

    Defaults: 16 sequences per device, and the model's longest sequence up to 4,096 tokens. `correct` is the directory
    of a run: times are multiplied by its measured over predicted step time. `tokens` adds the cost of training on
    them to the reasons. `program` is one of PLANNED_PROGRAMS: what another one than Echelon would do is priced, in the
    layouts that it has. `imbalance` is the max/mean expert load across ep ranks, `host_share` the share of the
    optimizer state that an offloading layout puts on the host. `baselines` prices simpler ways too. `lora_rank` prices
    LoRA adapters on the linears of frozen layers that `lora_targets` match, or beside all.
    """
    if not 0 <= tokens < float("inf"):
        raise ValidationError.single("tokens", str(tokens), "is not a positive number of tokens", legal="> 0")
    issues: list[ValidationIssue] = []
    sizes: dict[str, Any] = {"seq_len": max(0, seq_len), "precision": precision}
    shape = _collect_issues(issues, lambda: resolve_shape(model, **sizes, inputs=inputs))
    target = _collect_issues(issues, lambda: parse_cluster(cluster))
    correction = _collect_issues(issues, lambda: corrections.read_correction(correct, target)) if correct else 1.0
    keys = grammar.parse_pairs(fixed)
    issues += [*keys.issues, *_option_issues(shape, target, batch, seq_len, precision, objective, imbalance)]
    issues += _program_issues(program, correct)
    issues += target_issues(shape, lora_targets) if shape is not None else ()
    if issues or shape is None or target is None or correction is None:
        raise ValidationError(issues)
    request = PlanRequest(
        shape=shape,
        cluster=target,
        batch=batch or DEFAULT_SEQUENCES_PER_DEVICE * target.devices,
        seq_len=seq_len or default_seq_len(shape.max_seq_len),
        precision=precision,
        program=program,
        attention_kernel=attention_kernel(program, target.device.generation),
        reduce_bytes=reduced_gradient_bytes(program, target.device.generation),
        fixed=dict(keys.values),
        plan_only=plan_only,
        objective=objective,
        correction=correction,
        imbalance=imbalance or DEFAULT_IMBALANCE,
        optimizer=optimizer,
        moment_bytes=cost.state_bytes_per_element(optimizer) / NUM_MOMENTS if optimizer else PlanRequest.moment_bytes,
        memory_options=memory_options,
        host_share=host_share,
        lora_rank=lora_rank,
        lora_targets=tuple(lora_targets),
    )
    result = _find_plans(request, model if isinstance(model, str) else shape.name, layout, top)
    if layout and imbalance and result.plans[0].layout.ep == 1:
        why = "requires ep > 1: a rank that holds all experts computes as many tokens, however they are routed"
        raise ValidationError.single("imbalance", f"{imbalance:g}", why, hint="leave it out, or give ep")
    if correct:
        result = replace(result, plans=tuple(corrections.note_correction(plan, correct) for plan in result.plans))
    if result.plans and (chosen := replicated_stages(result.plans[0])) is not None:
        first = replace(result.plans[0], reasons=(*result.plans[0].reasons, str(chosen)))
        result = replace(result, plans=(first, *result.plans[1:]), replicated_stages=chosen)
    if baselines:
        result = replace(result, baselines=tuple(price_baselines(request)))
    if tokens:
        priced = (replace(plan, reasons=(*plan.reasons, training_cost(plan, tokens))) for plan in result.plans)
        result = replace(result, plans=tuple(priced))
    return result


def _find_plans(request: PlanRequest, model: str, layout: str, top: int) -> PlanResult:
    if layout:
        if request.fixed:
            fixed = ",".join(f"{key}={value}" for key, value in request.fixed.items())
            rule = "is incompatible with --layout, which prices one layout"
            raise ValidationError.single("fix", fixed, rule, hint="leave it out")
        return PlanResult(plans=(price_layout(request, layout),))
    plans = search_plans(request, top=top)
    if plans:
        return PlanResult(plans=(explain_plan(request, plans), *plans[1:]))
    least = least_memory_plan(request)
    if least is None:
        rule = f"cannot be divided over {request.cluster.devices} devices with a batch of {request.batch}"
        raise ValidationError.single("model", model, rule, hint="change the batch, or fix fewer keys")
    return PlanResult(plans=(), explanation=tuple(explain_infeasible(least)), nearest=least)


def price_layout(request: PlanRequest, text: str) -> Plan:
    """Price one layout. It must match the devices and the batch, whether or not it fits into memory."""
    world, dimensions = request.cluster.devices, request.shape.dimensions
    layout = check_layout(text, world=world, batch=request.batch, seq_len=request.seq_len, model=dimensions)
    scenario = request.scenario(layout)
    if issues := budget_issues(scenario):
        raise ValidationError(issues)
    plan = price(scenario)
    refused = scenario.is_own and scenario.refusal
    return replace(plan, reasons=(f"train refuses this layout: {refused}",)) if refused else plan


def _option_issues(
    shape: ModelShape | None,
    cluster: Cluster | None,
    batch: int,
    seq_len: int,
    precision: str,
    objective: str,
    imbalance: float,
) -> Iterator[ValidationIssue]:
    """Yield what is wrong with the options; a model or cluster that is None is an issue already."""

    def issue(key: str, value: object, message: str, *, legal: str = "", hint: str = "") -> ValidationIssue:
        return ValidationIssue(key=key, value=f"{value}", message=message, legal=legal, hint=hint)

    if precision not in PRECISIONS:
        yield issue("precision", precision, "is not known", legal=", ".join(PRECISIONS))
    if objective not in OBJECTIVES:
        yield issue("objective", objective, "is not known", legal=", ".join(OBJECTIVES))
    for key, value in (("batch", batch), ("seq-len", seq_len)):
        if value < 0:
            yield issue(key, value, "is less than 1", legal=">= 1")
    if imbalance and not 1 <= imbalance < float("inf"):
        yield issue("imbalance", f"{imbalance:g}", "is not a max/mean expert load", legal=">= 1")
    elif imbalance and shape is not None and not shape.experts:
        rule = f"requires MoE layers, which {shape.name} does not have"
        yield issue("imbalance", f"{imbalance:g}", rule, hint="leave it out")
    # RoPE has no longest sequence; learned positions have.
    if shape is not None and shape.position_parameters and seq_len > shape.max_seq_len:
        rule = f"exceeds the longest sequence of {shape.name}"
        yield issue("seq-len", seq_len, rule, legal=f"1 to {shape.max_seq_len}")
    if cluster is not None and precision in PRECISIONS and not cluster.device.supports(precision):
        device = cluster.device
        legal = ", ".join(dtype for dtype in PRECISIONS if dtype in device.flops)
        hint = "" if device.name in DEVICE_KINDS else f"or state its {precision}_tflops in the cluster file"
        yield issue("precision", precision, f"cannot be multiplied by {device.name}", legal=legal, hint=hint)


def _program_issues(program: str, correct: str) -> Iterator[ValidationIssue]:
    if program not in PLANNED_PROGRAMS:
        legal, hint = ", ".join(PLANNED_PROGRAMS), did_you_mean(program, PLANNED_PROGRAMS)
        yield ValidationIssue(key="program", value=program, message="is not known", legal=legal, hint=hint)
    elif correct and program not in OWN_PROGRAMS:
        rule = f"corrects times by a run of Echelon, and is incompatible with program={program}"
        yield ValidationIssue(key="correct", value=correct, message=rule, hint="leave one of them out")


def _collect_issues(issues: list[ValidationIssue], read: Callable[[], T]) -> T | None:
    try:
        return read()
    except ValidationError as error:
        issues += error.issues
        return None


def train_command(plan: Plan, model: str, settings: Sequence[str] = ()) -> str:
    """The command that trains a plan with these settings; empty if it cannot be trained."""
    if not plan.runnable or model.endswith(".json"):
        return ""
    layout, cluster = plan.layout, plan.scenario.cluster
    here = min(cluster.per_node, layout.world)
    nodes = -(-layout.world // here)
    chosen = {
        "model": model,
        "layout": str(layout),
        "batch": layout.batch,
        "seq_len": plan.scenario.seq_len,
        "dtype": {"fp32": "float32", "fp16": "float16"}.get(plan.scenario.precision, "bfloat16"),
        **({"precision.compute": "fp8"} if plan.scenario.precision == "fp8" else {}),
    }
    options = " ".join(f"--set {text}" for text in (*(f"{key}={value}" for key, value in chosen.items()), *settings))
    several = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:PORT " if nodes > 1 else ""
    return f"torchrun {several}--nproc-per-node {here} -m echelon train {options}"
