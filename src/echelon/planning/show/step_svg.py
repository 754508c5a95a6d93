"""Pictures of one step of a plan, for the page: the pipeline's timeline, and memory over time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from itertools import pairwise

from echelon.draw.number_format import format_bytes, format_time, percent, ticks
from echelon.pipeline.actions import ActionKind
from echelon.pipeline.draw import action_colours, as_svg
from echelon.pipeline.draw import timeline_svg as drawing
from echelon.pipeline.timeline import RELEASING_KINDS
from echelon.planning.cluster.device_kinds import GIB
from echelon.planning.priced_plan import Plan, memory_over_time, step_timeline, with_layout_keys
from echelon.planning.show import plan_labels

MICROBATCHES = 16
"""drawn at most, but as many as the pipeline has stages: fewer would not fill it"""
ACTIONS = 20_000
"""of a step whose memory is followed to its end"""
INKS = {
    "#ffffff": "paper",
    action_colours.DARK_INK: "ink",
    action_colours.IDLE_COLOUR: "idle",
    drawing.GREY: "quiet",
    drawing.PALE: "quiet",
    "#c3c9d4": "line",
}
"""colours of a picture of a schedule that are others in the dark, by the names that `plan.html` gives them"""
HEIGHT = 100.0

Curve = Sequence[tuple[float, float]]
"""(seconds, bytes)"""


def num_drawn_microbatches(plan: Plan) -> int:
    """Microbatches to draw: a multiple of the stages, as some schedules require."""
    stages = plan.layout.pp
    return min(plan.layout.accumulate, max(stages, MICROBATCHES // stages * stages))


def pipeline_picture(plan: Plan, number: int) -> str:
    """The timeline of a step as SVG whose style touches nothing else on the page; empty without a pipeline."""
    if plan.layout.pp == 1:
        return ""
    count, all_of_them = num_drawn_microbatches(plan), plan.layout.accumulate
    note = (
        f"Drawn with {count} of the step's {all_of_them} microbatches. "
        f"The full step is longer, and its bubble is {percent(plan.bubble)}."
    )
    caption = f'<p class="quiet">{note}</p>' if count < all_of_them else ""
    picture = as_svg(step_timeline(plan.scenario, microbatches=count), in_seconds=True)
    before, opening, rest = picture.partition("<style>")
    style, closing, after = rest.partition("</style>")
    scoped = re.sub(r"\.(\w+)\{", rf"#pipeline-{number} .\1{{", style)
    drawn = before + opening + scoped + closing + after
    return f'{caption}<div class="picture" id="pipeline-{number}" tabindex="0">{drawn}</div>'


def dark_mode_style() -> str:
    """CSS that gives drawn schedules the colours of the page, light or dark."""
    return "\n".join(
        f'  .picture [{what}="{colour}"] {{ {what}: var(--{name}); }}'
        for colour, name in INKS.items()
        for what in ("fill", "stroke")
    )


def memory_curve(plan: Plan) -> tuple[Curve, int]:
    """The fullest rank's bytes through a step, as corners of a line; and how many microbatches that is."""
    layout = plan.layout
    if layout.pp == 1:
        return _ramps(plan, count := min(layout.accumulate, MICROBATCHES)), count
    is_long = 3 * layout.pp * layout.vpp * layout.accumulate > ACTIONS
    count = min(layout.accumulate, max(2 * layout.pp, MICROBATCHES)) if is_long else layout.accumulate
    found = memory_over_time(with_layout_keys(plan.scenario, accumulate=count), plan.memory.stage)
    corners = [found[0]]
    for (_, before), (second, level) in pairwise(found):
        corners += [(second, before), (second, level)]
    return corners, count


def _ramps(plan: Plan, count: int) -> Curve:
    """Without a pipeline: activations grow through every forward, and go through its backward."""
    high = float(plan.memory.total)
    low = high - plan.memory.parts.get("activations", 0)
    line = step_timeline(plan.scenario, microbatches=count)
    found = [(0.0, low)]
    for action, _, end in line.spans(0):
        if action.kind is ActionKind.FORWARD or action.kind in RELEASING_KINDS:
            found.append((end, high if action.kind is ActionKind.FORWARD else low))
    return found


def memory_picture(plan: Plan) -> str:
    """Memory over time: what stays, what comes and goes, and the device's limit."""
    corners, count = memory_curve(plan)
    end = corners[-1][0] or 1.0
    limit = plan.scenario.cluster.memory
    top = 1.08 * max(limit, *(level for _, level in corners))
    still = plan.memory.total - plan.memory.parts.get("activations", 0)

    def up(level: float) -> float:
        return HEIGHT * (1 - level / top)

    points = " ".join(f"{1000 * second / end:.1f},{up(level):.2f}" for second, level in corners)
    marks = [tick for tick in ticks(top / GIB, 6) if tick * GIB < top]
    lines = "".join(f'<path class="rule" d="M0 {up(tick * GIB):.2f}H1000"/>' for tick in marks)
    labels = "".join(f'<span style="top:{up(tick * GIB):.2f}%">{tick:g} GiB</span>' for tick in marks)
    times = "".join(
        f'<span style="left:{100 * tick / end:.2f}%">{escape(format_time(tick, True))}</span>' for tick in ticks(end, 5)
    )
    title = (
        f"memory of {plan_labels.describe_fullest_rank(plan)} through a step, at most {format_bytes(plan.memory.total)}"
    )
    cut = "" if count == plan.layout.accumulate else f" Drawn with {count} of {plan.layout.accumulate} microbatches."
    return (
        f'<div class="chart"><div class="levels" aria-hidden="true">{labels}</div><div class="plot">'
        f'<svg viewBox="0 0 1000 {HEIGHT:g}" preserveAspectRatio="none" role="img"><title>{escape(title)}</title>'
        f'{lines}<polygon class="moving" points="0,{HEIGHT:g} {points} 1000,{HEIGHT:g}"/>'
        f'<rect class="still" y="{up(still):.2f}" width="1000" height="{HEIGHT - up(still):.2f}"/>'
        f'<polyline class="edge" points="{points}"/><path class="limit" d="M0 {up(limit):.2f}H1000"/></svg>'
        f'<b class="limit" style="top:{up(limit):.2f}%">device: {format_bytes(limit)}</b></div>'
        f'<div class="seconds" aria-hidden="true">{times}</div></div>'
        f'<p class="legend"><span><i class="moving"></i>activations of microbatches in flight</span>'
        f'<span><i class="still"></i>all else, counted as if it stayed</span></p>'
        f'<p class="quiet">Of {escape(plan_labels.describe_fullest_rank(plan))}.{escape(cut)}</p>'
    )
