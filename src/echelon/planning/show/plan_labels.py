"""Labels, colours and figures of a plan, the same in every view.

Colours classify causes: blue is compute, orange communication, purple waiting, teal the rest of a step. They are those
of drawn schedules, in several shades, and always stand beside a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from echelon.draw.number_format import format_bytes, format_count, format_seconds, percent
from echelon.planning.cost.expert_traffic import all_to_all_bytes_per_token
from echelon.planning.priced_plan import Plan


@dataclass(frozen=True, kw_only=True)
class Label:
    """Name, meaning and colour of a cause of time or a category of memory."""

    name: str
    meaning: str
    colour: str


CAUSES = {
    "products": Label(
        name="GEMMs", meaning="matrix multiplications with the weights: the useful work", colour="#1f5fa8"
    ),
    "attention": Label(name="attention", meaning="softmax(q k) v of every token", colour="#4a8fd6"),
    "passing": Label(
        name="memory-bound operators",
        meaning="norms, activation functions, additions: bound by memory bandwidth",
        colour="#86b8ea",
    ),
    "head": Label(name="output layer and loss", meaning="logits and cross entropy", colour="#6f7fd0"),
    "recompute": Label(name="recomputation", meaning="forward recomputed in backward to save memory", colour="#b3d2f2"),
    "tp": Label(
        name="exposed tp communication",
        meaning="tensor-parallel collectives that compute does not overlap",
        colour="#c8551b",
    ),
    "cp": Label(
        name="exposed cp communication",
        meaning="context-parallel communication that attention does not overlap, and merging of blocks",
        colour="#f0a37a",
    ),
    "ep": Label(
        name="exposed ep communication",
        meaning="all-to-all of tokens and expert outputs that compute does not overlap",
        colour="#e2803f",
    ),
    "pp": Label(
        name="exposed pp communication",
        meaning="p2p transfers of activations and gradients between stages",
        colour="#f7d08a",
    ),
    "dp": Label(
        name="exposed dp communication",
        meaning="collectives of gradients, and under zero=3 of parameters, that compute does not overlap",
        colour="#f2b632",
    ),
    "bubble": Label(name="pipeline bubble", meaning="stages wait for each other and for the slowest", colour="#9b4a90"),
    "imbalance": Label(name="uneven stages", meaning="stages wait for the slowest", colour="#b87aae"),
    "launches": Label(name="kernel launches", meaning="kernels shorter than their launch", colour="#cfa3c8"),
    "jitter": Label(name="waiting for slow nodes", meaning="stragglers among many nodes", colour="#e3cbdf"),
    "offload": Label(
        name="exposed offload", meaning="transfers to and from the host that compute does not overlap", colour="#d9a06b"
    ),
    "update": Label(name="optimizer update", meaning="the update of the weights", colour="#3fa796"),
    "rest": Label(name="around the step", meaning="data loading, reading the loss, once per step", colour="#8fcfc4"),
}
"""of `Plan.times`, in the order of stacked bars"""

CATEGORIES = {
    "parameters": Label(name="parameters", meaning="the weights of forward and backward", colour="#1f5fa8"),
    "master": Label(
        name="master weights",
        meaning="fp32 weights of the optimizer, or their low 16 bits",
        colour="#4a8fd6",
    ),
    "gradients": Label(name="gradients", meaning="at the memory peak; accumulated in fp32", colour="#c8551b"),
    "optimizer": Label(name="optimizer state", meaning="moments of every parameter", colour="#9b4a90"),
    "versions": Label(
        name="weight versions", meaning="older weights that an asynchronous schedule needs", colour="#b3d2f2"
    ),
    "activations": Label(
        name="activations", meaning="saved for backward, of all microbatches in flight", colour="#3fa796"
    ),
    "working": Label(name="working memory", meaning="temporaries of a running layer", colour="#8fcfc4"),
    "logits": Label(
        name="logits",
        meaning="logits of a chunk of tokens, and their gradients",
        colour="#f2b632",
    ),
    "buffers": Label(
        name="communication buffers", meaning="prefetched parameters, gradients being reduced", colour="#f0a37a"
    ),
    "reserve": Label(
        name="reserve",
        meaning="CUDA context and fragmentation",
        colour="#9aa3b2",
    ),
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


@dataclass(frozen=True, kw_only=True)
class LabelledBar:
    """A labelled part of a total."""

    label: Label
    value: float
    share: float
    """of the total"""


def labelled_bars(parts: Mapping[str, float], labels: Mapping[str, Label]) -> list[LabelledBar]:
    """The parts in the order of the labels; negligible ones together at the end."""
    total = sum(parts.values()) or 1.0
    order = [*(name for name in labels if name in parts), *(name for name in parts if name not in labels)]
    found = [
        LabelledBar(label=labels.get(name) or _default_label(name), value=parts[name], share=parts[name] / total)
        for name in order
        if parts[name] / total >= NEGLIGIBLE
    ]
    rest = [name for name in order if 0 < parts[name] / total < NEGLIGIBLE]
    value = sum(parts[name] for name in rest)
    if value / total >= NEGLIGIBLE:
        listed = ", ".join((labels.get(name) or _default_label(name)).name for name in rest)
        label = Label(name="smaller parts", meaning=listed, colour=OTHER)
        found.append(LabelledBar(label=label, value=value, share=value / total))
    return found


def _default_label(name: str) -> Label:
    return Label(name=name.replace("_", " "), meaning="", colour=OTHER)


def largest_first(found: list[LabelledBar]) -> list[LabelledBar]:
    return sorted(found, key=lambda bar: -bar.value)


# -- numbers ----------------------------------------------------------------------------------------------------------


def format_interval(plan: Plan) -> str:
    """The 80 % interval: `6.90–8.59 s`."""
    low, high = format_seconds(plan.low), format_seconds(plan.high)
    number, _, unit = low.rpartition(" ")
    return f"{number}–{high}" if high.endswith(f" {unit}") else f"{low} – {high}"


def memory_share(plan: Plan) -> float:
    """Share of a device's memory that the fullest rank uses."""
    return plan.memory.total / plan.scenario.cluster.memory


def describe_request(plan: Plan) -> str:
    """The model, cluster and batch of a plan."""
    case = plan.scenario
    devices = "" if case.cluster.name.startswith(f"{case.cluster.devices}x") else f" ({case.cluster.devices} devices)"
    sequences = "sequence" if plan.layout.batch == 1 else "sequences"
    parameters = format_count(case.shape.parameters).replace("G", "B")
    return (
        f"{case.shape.name} ({parameters} parameters) on {case.cluster.name}{devices}, "
        f"{plan.layout.batch} {sequences} of {case.seq_len} tokens a step, {case.precision}"
    )


def describe_fullest_rank(plan: Plan) -> str:
    """The rank whose memory is shown."""
    last = plan.layout.pp - 1
    if not last:
        return "each rank"
    place = {0: "first", last: "last"}.get(plan.memory.stage, f"number {plan.memory.stage}")
    return f"the fullest rank ({place} of {last + 1} stages)"


def warning_marks(plan: Plan) -> list[tuple[str, str]]:
    """Warnings with their colours."""
    found = [] if plan.runnable else [(PLAN_ONLY, "yellow")]
    return found if plan.fits else [*found, (DOES_NOT_FIT, "red")]


def key_figures(plan: Plan) -> list[tuple[str, str]]:
    """A plan's numbers, each with its name."""
    found = [
        ("a step", format_seconds(plan.seconds)),
        ("80 % of runs", format_interval(plan)),
        ("tokens/s", format_count(plan.tokens_per_s)),
        ("MFU", percent(plan.mfu)),
        ("HFU", percent(plan.hfu)),
        ("memory", f"{format_bytes(plan.memory.total)}, {100 * memory_share(plan):.0f} %"),
        ("bubble", percent(plan.bubble)),
    ]
    found = [(name, value) for name, value in found if name != "HFU" or plan.hfu != plan.mfu]
    return [*found, *_moe_figures(plan)] if plan.scenario.shape.experts else found


def _moe_figures(plan: Plan) -> Iterator[tuple[str, str]]:
    case = plan.scenario
    total, active = (
        format_count(count).replace("G", "B") for count in (case.shape.parameters, case.shape.active_parameters)
    )
    yield "active", f"{active} of {total} parameters"
    if plan.layout.ep > 1:
        yield "to experts", f"{all_to_all_bytes_per_token(case) / 2**10:,.0f} KiB a token and layer"
        yield "imbalance", f"{case.imbalance:g} (assumed)"


def all_reasons(plan: Plan, explanation: Sequence[str] = ()) -> list[str]:
    """Explanation and reasons of a plan, without duplicates."""
    return list(dict.fromkeys([*explanation, *plan.reasons]))


def command_for(plan: Plan, best: Plan, command: str) -> str:
    """The command for a plan, given that for the best; empty if unknown."""
    here = str(best.layout)
    return command if plan is best else command.replace(here, str(plan.layout)) if here in command else ""
