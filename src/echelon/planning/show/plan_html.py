"""Plans as a page: one file that needs no network. `plan.html` is the page; here are the parts that go into it.

Everything is in the file as HTML and SVG. Without a script the best plan is shown, and the links of the table choose
another; the script lets rows of the table choose, without a jump, and copies commands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files

from echelon.draw.number_format import format_bytes, format_count, format_seconds, percent
from echelon.planning.priced_plan import Plan
from echelon.planning.show import plan_labels, step_svg

Bars = Sequence[tuple[plan_labels.LabelledBar, str]]
"""bars with their values as text"""
TEMPLATE = "plan.html"
COMPARED, SLOWEST = 8, 3.0
"""most plans that are compared, and how much slower than the best they may be"""
DRAWN = 12
"""plans whose step is drawn; a page of more would be slow to open"""


def plans_html(plans: Sequence[Plan], *, title: str, command: str = "", explanation: Sequence[str] = ()) -> str:
    """The page as the text of an HTML file, of plans best first. `command` runs the first, `explanation` is of it."""
    parts = {
        "TITLE": escape(title),
        "QUESTION": escape(plan_labels.describe_request(plans[0])) if plans else "",
        "DARK_INKS": step_svg.dark_mode_style(),
        "TABLE": "".join(_table(plans)) if plans else "<p>No plan.</p>" + _reasons(explanation),
        # The best is the last, so that a style can hide it when another is the target of a link.
        "PLANS": "".join(
            _plan(plan, number, plan_labels.command_for(plan, plans[0], command), explanation if number == 0 else ())
            for number, plan in reversed(list(enumerate(plans)))
        ),
        "COMPARED": "".join(_compared(plans)) if len(plans) > 1 else "",
        "GLOSSARY": "".join(_glossary(plans)),
    }
    template = files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")
    return re.sub(r"\{\{([A-Z_]+)\}\}", lambda found: parts[found[1]], template)


def _layout(plan: Plan) -> str:
    """A line may break behind every comma."""
    return escape(str(plan.layout)).replace(",", ",<wbr>")


def _marks(plan: Plan) -> str:
    return "".join(f' <span class="mark {colour}">{mark}</span>' for mark, colour in plan_labels.warning_marks(plan))


def _table(plans: Sequence[Plan]) -> Iterator[str]:
    yield '<div class="wide" tabindex="0"><table id="plans"><thead><tr>'
    yield "".join(f'<th scope="col">{head}</th>' for head in ("", "layout", *_cells(plans[0])))
    yield "</tr></thead><tbody>"
    for number, plan in enumerate(plans):
        chosen = ' class="chosen"' if number == 0 else ""
        yield f'<tr data-plan="{number + 1}"{chosen}><td class="number">{number + 1}</td>'
        yield f'<th scope="row"><a href="#plan-{number + 1}">{_layout(plan)}</a>{_marks(plan)}</th>'
        # In a narrow window there is no head: every cell says what it is.
        yield "".join(f'<td data-name="{name}">{value}</td>' for name, value in _cells(plan).items())
        yield "</tr>"
    yield "</tbody></table></div>"


def _cells(plan: Plan) -> dict[str, str]:
    share = plan_labels.memory_share(plan)
    level = "over" if not plan.fits else "near" if share > plan_labels.NEARLY_FULL else "well"
    gauge = f'<span class="gauge {level}"><span style="width:{100 * min(1.0, share):.1f}%"></span></span>'
    return {
        "step": f"<b>{format_seconds(plan.seconds)}</b>",
        "80 % of runs": plan_labels.format_interval(plan),
        "tokens/s": format_count(plan.tokens_per_s),
        "MFU": percent(plan.mfu),
        "memory": f"{gauge}{format_bytes(plan.memory.total)} <small>{100 * share:.0f} %</small>",
        "bubble": percent(plan.bubble),
    }


def _plan(plan: Plan, number: int, command: str, explanation: Sequence[str]) -> str:
    best = " best chosen" if number == 0 else ""
    numbers = plan_labels.key_figures(plan)
    figures = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in numbers)
    times, sizes = _bars(plan_labels.time_bars(plan)), _bars(plan_labels.memory_bars(plan))
    of, confidence = plan_labels.describe_memory(plan), plan_labels.describe_confidence(plan)
    return (
        f'<section class="plan{best}" id="plan-{number + 1}"><h2><span class="number">{number + 1}</span> '
        f"{_layout(plan)}{_marks(plan)}</h2>"
        f'<dl class="figures">{figures}</dl><p class="quiet">80 % of runs: {escape(confidence)}.</p>'
        f"{_run(plan, command)}{_reasons(plan_labels.all_reasons(plan, explanation))}"
        f'<div class="beside"><div><h3>Time of a step by cause</h3>{times}</div>'
        f"<div><h3>Memory by category</h3>{sizes}"
        f'<p class="quiet">{escape(of)}, of {escape(plan_labels.describe_fullest_rank(plan))}.</p></div></div>'
        f"{_step(plan, number)}</section>"
    )


def _step(plan: Plan, number: int) -> str:
    if number >= DRAWN:
        return f'<p class="quiet">The steps of the first {DRAWN} plans are drawn.</p>'
    without = "One stage (pp=1): each rank works through its microbatches one by one, without a bubble."
    picture = step_svg.pipeline_picture(plan, number + 1) or f'<p class="quiet">{without}</p>'
    memory = step_svg.memory_picture(plan)
    return f"<h3>Memory over time</h3>{memory}<h3>The pipeline, rank by rank</h3>{picture}"


def _run(plan: Plan, command: str) -> str:
    if reason := plan_labels.why_not_run(plan):
        return f"<h3>{escape(reason[:1].upper() + reason[1:])}</h3>"
    if not command:
        return ""
    button = '<button type="button" class="copy">copy</button>'
    return f'<h3>Run it</h3><div class="command"><pre><code>{escape(command)}</code></pre>{button}</div>'


def _reasons(lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<h3>Why</h3><ul class="reasons">{items}</ul>' if items else ""


def _bars(bars: Bars) -> str:
    most = max((bar.value for bar, _ in bars), default=1.0)
    rows = "".join(
        f'<li title="{escape(bar.label.meaning)}"><span class="name">{escape(bar.label.name)}</span>'
        f'<span class="track"><i style="width:{100 * bar.value / most:.2f}%;background:{bar.label.colour}"></i></span>'
        f'<b>{value}</b><span class="share">{100 * bar.share:.1f} %</span></li>'
        for bar, value in plan_labels.largest_first(bars)
    )
    return f'<ul class="bars">{rows}</ul>'


def _compared(plans: Sequence[Plan]) -> Iterator[str]:
    # A very slow plan would squeeze the others.
    longest = SLOWEST * plans[0].seconds
    near = [(n, plan) for n, plan in enumerate(plans) if n < 2 or plan.seconds <= longest][:COMPARED]
    longest = max(plan.high for _, plan in near)
    causes = [plan_labels.time_bars(plan) for _, plan in near]
    yield '<section class="beside compared"><div><h2>Time, side by side</h2>'
    for (number, plan), bars in zip(near, causes, strict=True):
        where = f"left:{100 * plan.low / longest:.2f}%;width:{100 * (plan.high - plan.low) / longest:.2f}%"
        stack = _stack(bars, plan.seconds / longest)
        spread = f'<u style="{where}" title="80 % of runs: {plan_labels.format_interval(plan)}"></u>'
        yield _row(plan, number, stack + spread, format_seconds(plan.seconds))
    yield _legend(causes)
    left_out = f" Of {len(plans)} plans, {len(near)} are compared." if len(near) < len(plans) else ""
    yield f'<p class="quiet">The thin line: where 80 % of runs lie.{left_out}</p></div>'
    limit = plans[0].scenario.cluster.memory
    # What takes more than two devices is cut off: its number stands beside it.
    most = min(2 * limit, max(limit * 1.02, *(plan.memory.total for _, plan in near)))
    categories = [plan_labels.memory_bars(plan) for _, plan in near]
    yield "<div><h2>Memory, side by side</h2>"
    for (number, plan), bars in zip(near, categories, strict=True):
        stack = _stack(bars, plan.memory.total / most)
        line = f'<s style="left:{100 * limit / most:.2f}%"></s>'
        yield _row(plan, number, stack + line, format_bytes(plan.memory.total))
    yield _legend(categories)
    yield f'<p class="quiet">The dashed line: what a device has, {format_bytes(limit)}.</p></div></section>'


def _stack(bars: Bars, length: float) -> str:
    return "".join(
        f'<i style="width:{100 * length * bar.share:.3f}%;background:{bar.label.colour}" '
        f'title="{escape(bar.label.name)}: {value}"></i>'
        for bar, value in bars
    )


def _row(plan: Plan, number: int, stack: str, value: str) -> str:
    name = f'<span class="name"><span class="number">{number + 1}</span> {_layout(plan)}</span>'
    return f'<div class="compare" data-plan="{number + 1}">{name}<b>{value}</b><span class="stack">{stack}</span></div>'


def _legend(stacks: Sequence[Bars]) -> str:
    """Every part of any of the stacks, once."""
    seen = {bar.label.name: bar.label.colour for stack in stacks for bar, _ in stack}
    order = [label.name for label in (*plan_labels.CAUSES.values(), *plan_labels.CATEGORIES.values())]
    names = sorted(seen, key=lambda name: order.index(name) if name in order else len(order))
    entries = "".join(f'<span><i style="background:{seen[name]}"></i>{escape(name)}</span>' for name in names)
    return f'<p class="legend">{entries}</p>'


def _glossary(plans: Sequence[Plan]) -> Iterator[str]:
    """What the words of these plans mean."""
    from echelon.layout.grammar import KEYS_BY_NAME

    keys = {key for plan in plans for key in plan.layout.explicit}
    causes = {name for plan in plans for name in plan.times}
    categories = {name for plan in plans for name in plan.memory.parts}
    groups = {
        "Causes of time": _meanings(plan_labels.CAUSES, causes),
        "Categories of memory": _meanings(plan_labels.CATEGORIES, categories),
        "Keys of a layout": [(key.name, key.meaning) for key in KEYS_BY_NAME.values() if key.name in keys],
        "Numbers": [
            *plan_labels.COLUMN_MEANINGS,
            *(plan_labels.MOE_MEANINGS if plans and plans[0].scenario.shape.experts else []),
        ],
    }
    for heading, entries in groups.items():
        listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(meaning)}</dd>" for name, meaning in entries)
        yield f"<div><h3>{heading}</h3><dl>{listed}</dl></div>"


def _meanings(table: dict[str, plan_labels.Label], names: set[str]) -> list[tuple[str, str]]:
    return [(word.name, word.meaning) for name, word in table.items() if name in names]
