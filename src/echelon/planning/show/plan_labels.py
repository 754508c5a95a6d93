"""The words, colours and numbers of a plan, the same in every view.

Colours say what kind of thing a cause is: blue computes, orange sends, purple waits, teal is around the passes. They
are those of the pictures of schedules, in several lightnesses; names stand beside them wherever they are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from echelon.draw.number_format import format_time, percent
from echelon.planning.cluster.device_kinds import GIB
from echelon.planning.cost.expert_traffic import all_to_all_bytes_per_token
from echelon.planning.priced_plan import Plan


@dataclass(frozen=True, kw_only=True)
class Label:
    """What a cause of time or a category of memory is called."""

    name: str
    meaning: str
    colour: str


CAUSES = {
    "products": Label(name="matrix products", meaning="multiplying by the weights: the useful work", colour="#1f5fa8"),
    "attention": Label(name="attention", meaning="every token looks at those before it", colour="#4a8fd6"),
    "passing": Label(
        name="memory-bound operators",
        meaning="norms, activation functions, additions: they wait for the device's memory, not for its arithmetic",
        colour="#86b8ea",
    ),
    "head": Label(name="output layer and loss", meaning="a score for every word, and the loss", colour="#6f7fd0"),
    "recompute": Label(
        name="recomputation", meaning="forward done again in backward, to keep less in memory", colour="#b3d2f2"
    ),
    "tp": Label(
        name="tensor-parallel messages not hidden",
        meaning="ranks that share a layer exchange its results while nothing is computed",
        colour="#c8551b",
    ),
    "cp": Label(
        name="reaching other slices",
        meaning="context parallelism: keys, values or heads on their way that attention does not hide, and merging "
        "what its blocks give",
        colour="#f0a37a",
    ),
    "ep": Label(
        name="expert-parallel messages not hidden",
        meaning="tokens travel to their experts and back while nothing is computed",
        colour="#e2803f",
    ),
    "pp": Label(
        name="messages between stages not hidden",
        meaning="activations and their gradients on the way from stage to stage",
        colour="#f7d08a",
    ),
    "dp": Label(
        name="gradient messages not hidden",
        meaning="gradients, and under zero=3 parameters, on their way while nothing is computed",
        colour="#f2b632",
    ),
    "bubble": Label(
        name="pipeline bubble", meaning="stages wait for each other's results, and for the fullest", colour="#9b4a90"
    ),
    "imbalance": Label(name="uneven stages", meaning="stages wait for the one with most to do", colour="#b87aae"),
    "launches": Label(
        name="waiting for the host", meaning="kernels so short that starting them takes longer", colour="#cfa3c8"
    ),
    "jitter": Label(
        name="waiting for slow nodes", meaning="of many nodes some are late, and all wait for them", colour="#e3cbdf"
    ),
    "offload": Label(
        name="messages to the host not hidden", meaning="what lives off the device comes and goes", colour="#d9a06b"
    ),
    "update": Label(name="optimizer update", meaning="the step that changes the weights", colour="#3fa796"),
    "rest": Label(
        name="around the step", meaning="fetching data, reading the loss, all that is once per step", colour="#8fcfc4"
    ),
}
"""of `Plan.times`, in the order of stacked bars"""

CATEGORIES = {
    "parameters": Label(name="parameters", meaning="the weights that passes compute with", colour="#1f5fa8"),
    "master": Label(
        name="master copies",
        meaning="the weights in 32 bits, which the update changes, or what 16 bits leave out of them",
        colour="#4a8fd6",
    ),
    "gradients": Label(
        name="gradients", meaning="those that are there when memory is fullest; added up in 32 bits", colour="#c8551b"
    ),
    "optimizer": Label(name="optimizer state", meaning="two moments of every parameter", colour="#9b4a90"),
    "versions": Label(
        name="older weights", meaning="versions that an asynchronous schedule still needs", colour="#b3d2f2"
    ),
    "activations": Label(
        name="activations", meaning="what forward leaves for backward, of all microbatches in flight", colour="#3fa796"
    ),
    "working": Label(name="working room", meaning="what a layer needs while it runs", colour="#8fcfc4"),
    "logits": Label(
        name="logits",
        meaning="scores of every word for the tokens at hand, and the gradients that come of them",
        colour="#f2b632",
    ),
    "buffers": Label(
        name="message buffers", meaning="parameters gathered ahead, gradients on their way", colour="#f0a37a"
    ),
    "reserve": Label(
        name="reserve",
        meaning="the device's own context, and what the allocator loses between blocks",
        colour="#9aa3b2",
    ),
}
"""of `Plan.memory.parts`, in the order of stacked bars"""

OTHER = "#9aa3b2"
NEGLIGIBLE = 5e-4
"""share below which parts are told together"""
COLUMN_MEANINGS = [
    ("80 % of runs", "four of five measured runs lie in this interval around such a prediction"),
    ("MFU", "share of the devices' peak that the model's mathematics needs"),
    ("HFU", "share of the peak that is executed: with what is computed twice"),
    ("bubble", "share of the pipeline's time in which ranks wait"),
    ("memory", "of the fullest rank, at its fullest; and its share of a device"),
    ("plan only", "can be priced; training it is not built yet"),
]
"""what the columns of the table mean"""
MOE_MEANINGS = [
    ("active", "parameters that a token passes through"),
    ("to experts", "what a token and a layer with experts send to other ranks in a step, there and back"),
    ("imbalance", "assumed: rows of experts on the busiest of the ranks that divide them, to the mean"),
]
"""what the numbers of a mixture mean"""
NEARLY_FULL = 0.92
"""share of a device's memory from which on a plan is marked"""
PLAN_ONLY = "plan only"
DOES_NOT_FIT = "does not fit"


@dataclass(frozen=True, kw_only=True)
class LabelledBar:
    """One part of a whole, ready to be drawn."""

    label: Label
    value: float
    share: float
    """of the whole"""


def labelled_bars(parts: Mapping[str, float], labels: Mapping[str, Label]) -> list[LabelledBar]:
    """The parts in the order of the table; those too small to see as one, at the end."""
    whole = sum(parts.values()) or 1.0
    order = [*(name for name in labels if name in parts), *(name for name in parts if name not in labels)]
    found = [
        LabelledBar(label=labels.get(name) or _default_label(name), value=parts[name], share=parts[name] / whole)
        for name in order
        if parts[name] / whole >= NEGLIGIBLE
    ]
    rest = [name for name in order if 0 < parts[name] / whole < NEGLIGIBLE]
    value = sum(parts[name] for name in rest)
    if value / whole >= NEGLIGIBLE:
        listed = ", ".join((labels.get(name) or _default_label(name)).name for name in rest)
        word = Label(name="smaller parts", meaning=listed, colour=OTHER)
        found.append(LabelledBar(label=word, value=value, share=value / whole))
    return found


def _default_label(name: str) -> Label:
    return Label(name=name.replace("_", " "), meaning="", colour=OTHER)


def largest_first(found: list[LabelledBar]) -> list[LabelledBar]:
    return sorted(found, key=lambda bar: -bar.value)


# -- numbers ----------------------------------------------------------------------------------------------------------


def format_seconds(value: float) -> str:
    """Three digits and a unit: `7.70 s`, `812 ms`."""
    if value >= 999.5:
        return f"{value:,.0f} s"
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= 0.9995 * size:
            return f"{_three(value / size)} {unit}"
    return format_time(value, True)


def _three(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def format_seconds_aligned(values: Sequence[float]) -> list[str]:
    """Times in one unit and with equally many digits, to stand under each other."""
    size, unit = (1.0, "s") if max(values, default=0.0) >= 0.5 else (1e-3, "ms")
    digits = max(0, 3 - len(str(int(max(values, default=0.0) / size))) + (unit == "s"))
    return [f"{value / size:.{digits}f} {unit}" for value in values]


def format_interval(plan: Plan) -> str:
    """Where four of five runs lie: `6.90–8.59 s`."""
    low, high = format_seconds(plan.low), format_seconds(plan.high)
    number, _, unit = low.rpartition(" ")
    return f"{number}–{high}" if high.endswith(f" {unit}") else f"{low} – {high}"


def format_bytes(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= 0.095 * GIB else f"{count / 2**20:.1f} MiB"


def format_count(count: float) -> str:
    """`68.1k` for 68,123."""
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * unit:
            return f"{_three(count / unit)}{letter}"
    return f"{count:.0f}"


def memory_share(plan: Plan) -> float:
    """Share of a device's memory that the fullest rank takes."""
    return plan.memory.total / plan.scenario.cluster.memory


def describe_request(plan: Plan) -> str:
    """What was asked: the model, the cluster, the batch."""
    case = plan.scenario
    devices = "" if case.cluster.name.startswith(f"{case.cluster.devices}x") else f" ({case.cluster.devices} devices)"
    sequences = "sequence" if plan.layout.batch == 1 else "sequences"
    parameters = format_count(case.shape.parameters).replace("G", "B")
    return (
        f"{case.shape.name} ({parameters} parameters) on {case.cluster.name}{devices}, "
        f"{plan.layout.batch} {sequences} of {case.seq_len} tokens a step, {case.precision}"
    )


def describe_fullest_rank(plan: Plan) -> str:
    """Which rank the memory is of."""
    last = plan.layout.pp - 1
    if not last:
        return "each rank"
    place = {0: "first", last: "last"}.get(plan.memory.stage, f"number {plan.memory.stage}")
    return f"the fullest rank ({place} of {last + 1} stages)"


def warning_marks(plan: Plan) -> list[tuple[str, str]]:
    """What a reader must not miss, each with a colour."""
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
    """What is to be said of a plan, each line once."""
    return list(dict.fromkeys([*explanation, *plan.reasons]))


def command_for(plan: Plan, best: Plan, command: str) -> str:
    """The command for a plan, given that for the best; empty where it cannot be told."""
    here = str(best.layout)
    return command if plan is best else command.replace(here, str(plan.layout)) if here in command else ""


__all__ = ["CATEGORIES", "CAUSES", "Label", "LabelledBar", "format_time", "labelled_bars", "percent"]
