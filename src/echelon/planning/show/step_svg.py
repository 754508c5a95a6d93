"""Pictures of one step of a plan, for the page: the pipeline's timeline, and memory over time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from itertools import pairwise

from echelon.draw import svg_writer
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
WIDTH, HEIGHT = 1000.0, 100.0

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
    drawn = f"Drawn with {count} of the step's {all_of_them} microbatches."
    note = f"{drawn} The full step is longer, and its bubble is {percent(plan.bubble)}."
    caption = f'<p class="quiet">{note}</p>' if count < all_of_them else ""
    picture = as_svg(step_timeline(plan.scenario, microbatches=count), in_seconds=True)
    before, style, after = re.split("(?<=<style>)|(?=</style>)", picture, maxsplit=2)
    scoped = re.sub(r"\.(\w+)\{", rf"#pipeline-{number} .\1{{", style)
    return f'{caption}<div class="picture" id="pipeline-{number}" tabindex="0">{before}{scoped}{after}</div>'


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
    levels = memory_over_time(with_layout_keys(plan.scenario, accumulate=count), plan.memory.stage)
    corners = [levels[0]]
    for (_, before), (second, level) in pairwise(levels):
        corners += [(second, before), (second, level)]
    return corners, count


def _ramps(plan: Plan, count: int) -> Curve:
    """Without a pipeline: activations grow through every forward, and go through its backward."""
    high = float(plan.memory.total)
    low = high - plan.memory.parts.get("activations", 0)
    level = {ActionKind.FORWARD: high, **dict.fromkeys(RELEASING_KINDS, low)}
    spans = step_timeline(plan.scenario, microbatches=count).spans(0)
    return [(0.0, low), *((end, level[action.kind]) for action, _, end in spans if action.kind in level)]


def memory_picture(plan: Plan) -> str:
    """Memory over time: what stays, what comes and goes, and the device's limit."""
    (corners, count), rank = memory_curve(plan), plan_labels.describe_fullest_rank(plan)
    end, limit = corners[-1][0] or 1.0, plan.scenario.cluster.memory
    top = 1.08 * max(limit, *(level for _, level in corners))
    still = plan.memory.total - plan.memory.parts.get("activations", 0)

    def up(level: float) -> float:
        return HEIGHT * (1 - level / top)

    def level_line(level: float, css_class: str) -> str:
        return f'<path class="{css_class}" d="M0 {up(level):.2f}H{WIDTH:g}"/>'

    points = " ".join(f"{WIDTH * second / end:.1f},{up(level):.2f}" for second, level in corners)
    marks = [tick for tick in ticks(top / GIB, 6) if tick * GIB < top]
    title = f"memory of {rank} through a step, at most {format_bytes(plan.memory.total)}"
    elements = [
        *(level_line(tick * GIB, "rule") for tick in marks),
        f'<polygon class="moving" points="0,{HEIGHT:g} {points} {WIDTH:g},{HEIGHT:g}"/>',
        f'<rect class="still" y="{up(still):.2f}" width="{WIDTH:g}" height="{HEIGHT - up(still):.2f}"/>',
        f'<polyline class="edge" points="{points}"/>',
        level_line(limit, "limit"),
    ]
    labels = "".join(f'<span style="top:{up(tick * GIB):.2f}%">{tick:g} GiB</span>' for tick in marks)
    times = "".join(
        f'<span style="left:{100 * tick / end:.2f}%">{escape(format_time(tick, True))}</span>' for tick in ticks(end, 5)
    )
    cut = "" if count == plan.layout.accumulate else f" Drawn with {count} of {plan.layout.accumulate} microbatches."
    return (
        f'<div class="chart"><div class="levels" aria-hidden="true">{labels}</div><div class="plot">'
        f"{svg_writer.stretched(elements, WIDTH, HEIGHT, title=title)}"
        f'<b class="limit" style="top:{up(limit):.2f}%">device: {format_bytes(limit)}</b></div>'
        f'<div class="seconds" aria-hidden="true">{times}</div></div>'
        f'<p class="legend"><span><i class="moving"></i>activations of microbatches in flight</span>'
        f'<span><i class="still"></i>all else, counted as if it stayed</span></p>'
        f'<p class="quiet">Of {escape(rank)}.{escape(cut)}</p>'
    )
