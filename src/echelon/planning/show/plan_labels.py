"""Labels, colours and figures of a plan, the same in every view.

Colours classify causes: blue is compute, orange communication, purple waiting, teal the rest of a step. They are those
of drawn schedules, in several shades, and always stand beside a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from echelon.draw.number_format import format_bytes, format_count, format_seconds, format_seconds_aligned, percent
from echelon.planning.cost.expert_traffic import all_to_all_bytes_per_token
from echelon.planning.priced_plan import Plan


@dataclass(frozen=True)
class Label:
    """Name, meaning and colour of a cause of time or a category of memory."""

    name: str
    meaning: str
    colour: str


CAUSES = {
    "products": Label("GEMMs", "matrix multiplications with the weights: the useful work", "#1f5fa8"),
    "attention": Label("attention", "softmax(q k) v of every token", "#4a8fd6"),
    "passing": Label(
        "memory-bound operators", "norms, activation functions, additions: bound by memory bandwidth", "#86b8ea"
    ),
    "head": Label("output layer and loss", "logits and cross entropy", "#6f7fd0"),
    "recompute": Label("recomputation", "forward recomputed in backward to save memory", "#b3d2f2"),
    "tp": Label("exposed tp communication", "tensor-parallel collectives that compute does not overlap", "#c8551b"),
    "cp": Label(
        "exposed cp communication",
        "context-parallel communication that attention does not overlap, and merging of blocks",
        "#f0a37a",
    ),
    "ep": Label(
        "exposed ep communication", "all-to-all of tokens and expert outputs that compute does not overlap", "#e2803f"
    ),
    "pp": Label("exposed pp communication", "p2p transfers of activations and gradients between stages", "#f7d08a"),
    "dp": Label(
        "exposed dp communication",
        "collectives of gradients, and under zero=3 of parameters, that compute does not overlap",
        "#f2b632",
    ),
    "bubble": Label("pipeline bubble", "stages wait for each other and for the slowest", "#9b4a90"),
    "imbalance": Label("uneven stages", "stages wait for the slowest", "#b87aae"),
    "launches": Label("kernel launches", "kernels shorter than their launch", "#cfa3c8"),
    "offload": Label("exposed offload", "transfers to and from the host that compute does not overlap", "#d9a06b"),
    "update": Label("optimizer update", "the update of the weights", "#3fa796"),
    "rest": Label("per-step overhead", "data loading, reading the loss, once per step", "#8fcfc4"),
}
"""of `Plan.times`, in the order of stacked bars"""

CATEGORIES = {
    "parameters": Label("parameters", "the weights of forward and backward", "#1f5fa8"),
    "master": Label("master weights", "fp32 weights of the optimizer, or their low 16 bits", "#4a8fd6"),
    "gradients": Label("gradients", "at the memory peak; accumulated in fp32", "#c8551b"),
    "optimizer": Label("optimizer state", "moments of every parameter", "#9b4a90"),
    "versions": Label("weight versions", "older weights that an asynchronous schedule needs", "#b3d2f2"),
    "activations": Label("activations", "saved for backward, of all microbatches in flight", "#3fa796"),
    "working": Label("working memory", "temporaries of a running layer", "#8fcfc4"),
    "logits": Label("logits", "logits of a chunk of tokens, and their gradients", "#f2b632"),
    "buffers": Label("communication buffers", "prefetched parameters, gradients being reduced", "#f0a37a"),
    "reserve": Label("reserve", "CUDA context and fragmentation", "#9aa3b2"),
}
"""of `Plan.memory.parts`, in the order of stacked bars"""

OTHER = "#9aa3b2"
NEGLIGIBLE = 5e-4
"""share below which parts are shown together"""
COLUMN_MEANINGS = [
    ("80 % of runs", "prediction interval: 80 % of measured runs lie in it"),
    ("MFU", "model FLOPs utilisation: share of the peak that the model needs"),
    ("HFU", "hardware FLOPs utilisation: with recomputation"),
    ("bubble", "share of the pipeline's time in which ranks wait"),
    ("memory", "peak of the fullest rank, and its share of a device"),
    ("plan only", "can be planned, not trained"),
    ("extrapolated", "nothing near was measured: the interval is wider"),
]
"""what the columns of the table mean"""
MOE_MEANINGS = [
    ("active", "parameters that one token uses"),
    ("to experts", "all-to-all bytes of a token and MoE layer in a step, forward and backward"),
    ("imbalance", "assumed max/mean expert load across ep ranks"),
]
"""what the numbers of an MoE model mean"""
NEARLY_FULL = 0.92
"""share of a device's memory from which on a plan is marked"""
PLAN_ONLY = "plan only"
DOES_NOT_FIT = "does not fit"
EXTRAPOLATED = "extrapolated"


@dataclass(frozen=True, kw_only=True)
class LabelledBar:
    label: Label
    value: float
    share: float
    """of the total"""


def time_bars(plan: Plan) -> list[tuple[LabelledBar, str]]:
    """The causes of a step's time with their seconds as text."""
    bars = labelled_bars(plan.times, CAUSES)
    return list(zip(bars, format_seconds_aligned([bar.value for bar in bars]), strict=True))


def memory_bars(plan: Plan) -> list[tuple[LabelledBar, str]]:
    """The categories of the fullest rank's memory with their bytes as text."""
    return [(bar, format_bytes(bar.value)) for bar in labelled_bars(plan.memory.parts, CATEGORIES)]


def labelled_bars(parts: Mapping[str, float], labels: Mapping[str, Label]) -> list[LabelledBar]:
    """The parts in the order of the labels; negligible ones together at the end."""
    total = sum(parts.values()) or 1.0
    order = [*(name for name in labels if name in parts), *(name for name in parts if name not in labels)]
    labels = {name: labels.get(name) or Label(name.replace("_", " "), "", OTHER) for name in order}
    large = [name for name in order if parts[name] / total >= NEGLIGIBLE]
    bars = [LabelledBar(label=labels[name], value=parts[name], share=parts[name] / total) for name in large]
    small = [name for name in order if 0 < parts[name] / total < NEGLIGIBLE]
    value = sum(parts[name] for name in small)
    if value / total >= NEGLIGIBLE:
        label = Label("smaller parts", ", ".join(labels[name].name for name in small), OTHER)
        bars.append(LabelledBar(label=label, value=value, share=value / total))
    return bars


def largest_first(bars: Iterable[tuple[LabelledBar, str]]) -> list[tuple[LabelledBar, str]]:
    return sorted(bars, key=lambda labelled: -labelled[0].value)


def format_interval(plan: Plan) -> str:
    """The 80 % interval: `6.90–8.59 s`."""
    low, high = format_seconds(plan.low), format_seconds(plan.high)
    number, _, unit = low.rpartition(" ")
    return f"{number}–{high}" if high.endswith(f" {unit}") else f"{low} – {high}"


def memory_share(plan: Plan) -> float:
    """Share of a device's memory that the fullest rank uses."""
    return plan.memory.total / plan.scenario.cluster.memory


def describe_request(plan: Plan) -> str:
    scenario, shape, cluster = plan.scenario, plan.scenario.shape, plan.scenario.cluster
    devices = "" if cluster.name.startswith(f"{cluster.devices}x") else f" ({cluster.devices} devices)"
    sequences = "sequence" if plan.layout.batch == 1 else "sequences"
    program = "" if scenario.is_own else f", by {_program(plan)}"
    return (
        f"{shape.name} ({_billions(shape.parameters)} parameters) on {cluster.name}{devices}, "
        f"{plan.layout.batch} {sequences} of {scenario.seq_len} tokens a step, {scenario.precision}{program}"
    )


def _program(plan: Plan) -> str:
    return "an unknown program" if plan.scenario.program == "unknown" else plan.scenario.program


def _billions(count: float) -> str:
    return format_count(count).replace("G", "B")


def describe_memory(plan: Plan) -> str:
    return f"{format_bytes(plan.memory.total)} of {format_bytes(plan.scenario.cluster.memory)}"


def describe_fullest_rank(plan: Plan) -> str:
    """The rank whose memory is shown."""
    last = plan.layout.pp - 1
    if not last:
        return "each rank"
    place = {0: "first", last: "last"}.get(plan.memory.stage, f"number {plan.memory.stage}")
    return f"the fullest rank ({place} of {last + 1} stages)"


def warning_marks(plan: Plan) -> list[tuple[str, str]]:
    marks = [
        (PLAN_ONLY, "yellow", plan.runnable or not plan.scenario.is_own),
        (DOES_NOT_FIT, "red", plan.fits),
        (EXTRAPOLATED, "yellow", not plan.extrapolated),
    ]
    return [(mark, colour) for mark, colour, fine in marks if not fine]


def describe_confidence(plan: Plan) -> str:
    """Whether the interval is near what was measured, or why it is not."""
    return f"{EXTRAPOLATED}: {'; '.join(plan.extrapolated)}" if plan.extrapolated else "near what was measured"


def why_not_run(plan: Plan) -> str:
    """Why there is no command that runs a plan; empty if `train` runs it."""
    if not plan.scenario.is_own:
        return f"this plan is priced for {_program(plan)}, which Echelon does not run"
    return "" if plan.runnable else f"this plan cannot be run yet: {plan.scenario.refusal}"


def key_figures(plan: Plan) -> list[tuple[str, str]]:
    return [
        ("a step", format_seconds(plan.seconds)),
        ("80 % of runs", format_interval(plan)),
        ("tokens/s", format_count(plan.tokens_per_s)),
        ("MFU", percent(plan.mfu)),
        *([("HFU", percent(plan.hfu))] if plan.hfu != plan.mfu else []),
        ("memory", f"{format_bytes(plan.memory.total)}, {100 * memory_share(plan):.0f} %"),
        ("bubble", percent(plan.bubble)),
        *(_moe_figures(plan) if plan.scenario.shape.experts else []),
    ]


def _moe_figures(plan: Plan) -> Iterator[tuple[str, str]]:
    scenario, shape = plan.scenario, plan.scenario.shape
    yield "active", f"{_billions(shape.active_parameters)} of {_billions(shape.parameters)} parameters"
    if plan.layout.ep > 1:
        yield "to experts", f"{all_to_all_bytes_per_token(scenario) / 2**10:,.0f} KiB a token and layer"
        yield "imbalance", f"{scenario.imbalance:g} (assumed)"


def all_reasons(plan: Plan, explanation: Sequence[str] = ()) -> list[str]:
    """Explanation and reasons of a plan, without duplicates."""
    return list(dict.fromkeys([*explanation, *plan.reasons]))


def command_for(plan: Plan, best: Plan, command: str) -> str:
    """The command for a plan, given that for the best; empty if unknown."""
    here = str(best.layout)
    return command if plan is best else command.replace(here, str(plan.layout)) if here in command else ""
