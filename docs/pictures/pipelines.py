"""Drawings of pipelines: schedules beside each other, one at a time, and the versions of asynchronous ones."""

from __future__ import annotations

from dataclasses import replace

from svg import BLUE, FAINT, INK, ORANGE, PALE, Canvas

from echelon.pipeline.actions import COMPUTE, ActionKind
from echelon.pipeline.draw import action_colours, as_svg
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.schedules import make_schedule, two_bw
from echelon.pipeline.simulate import Durations, simulate

RANKS, MICROBATCHES = 4, 8
COMPARED = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")


def one(name: str, *, ranks: int = RANKS, microbatches: int = MICROBATCHES, slices: int = 1) -> str:
    """What `echelon draw NAME --svg FILE` writes."""
    return as_svg(simulate(make_schedule(name, ranks, microbatches, slices=slices), Durations()))


def compared() -> str:
    """Synchronous schedules on one time axis. A stage of one chunk in two takes half as long."""
    made = {name: make_schedule(name, RANKS, MICROBATCHES) for name in COMPARED}
    times = {name: simulate(schedule, _equal_work(schedule)) for name, schedule in made.items()}
    row, gap, left, width = 11, 18, 130.0, 510.0
    c = Canvas(104 + len(made) * (RANKS * row + gap), "The same work under six schedules")
    about = f"{RANKS} ranks, {MICROBATCHES} microbatches; F : I : W = 1 : 1 : 1. Pale cells are a rank's second chunk."
    c.text(24, 58, about, colour=FAINT)
    _legend(c, 24, 80)
    scale = width / max(timeline.duration for timeline in times.values())
    for number, (name, timeline) in enumerate(times.items()):
        y = 100 + number * (RANKS * row + gap)
        chunks = len(timeline.rank_of_stage) // RANKS
        c.text(24, y + 26, name, mono=True)
        for rank in range(RANKS):
            c.rect(left, y + rank * row, timeline.duration * scale, row - 1, action_colours.IDLE_COLOUR, "none")
            for action, start, end in timeline.spans(rank):
                if action.kind in COMPUTE:
                    fill = action_colours.cell_colour(action.kind, timeline.chunks[action.stage], chunks)
                    place = (left + start * scale + 0.4, y + rank * row, (end - start) * scale - 0.8, row - 1)
                    c.rect(*place, fill, "none")
        held = max(timeline.in_flight) / chunks
        c.text(656, y + 18, f"bubble {timeline.bubble:.1%}", size=12)
        c.text(656, y + 36, f"holds {held:g} microbatches", size=11, colour=FAINT)
    return c.finish()


def _legend(c: Canvas, x: float, y: float) -> None:
    words = {look.name: look.colour for kind, look in action_colours.ACTION_STYLES.items() if kind in COMPUTE}
    for word, colour in {**words, "idle": action_colours.IDLE_COLOUR}.items():
        c.rect(x, y - 10, 12, 12, colour, "none")
        c.text(x + 18, y, word, size=12, colour=FAINT)
        x += 38 + 6.4 * len(word)


def _equal_work(schedule: Schedule) -> Durations:
    part = schedule.ranks / schedule.stages
    return Durations(forward=part, input_grad=part, weight_grad=part)


def versions() -> str:
    """Which version of the weights every stage uses for every microbatch: read from the lists of actions."""
    ranks, microbatches, batch = 4, 12, 4
    rules = {
        "pipedream": make_schedule("pipedream", ranks, microbatches),
        "pipedream-vsync": make_schedule("pipedream-vsync", ranks, microbatches),
        "2bw": two_bw.build(ranks, 1, microbatches, microbatches_per_update=batch),
    }
    side, left, top = 38, 224, 92
    step = ranks * 26 + 40
    c = Canvas(top + len(rules) * step, "The version of the weights that a stage uses for a microbatch")
    c.text(24, 58, f"{ranks} stages, {microbatches} microbatches of a run; 2bw in batches of {batch}.", colour=FAINT)
    shades = list(PALE)
    for number, (name, schedule) in enumerate(rules.items()):
        y = top + number * step
        c.text(24, y + 16, name, mono=True, weight="bold")
        for m in range(microbatches):
            c.text(left + m * side + side / 2, y - 5, str(m), size=11, colour=FAINT, anchor="middle")
        c.text(left - 10, y - 5, "microbatch", size=11, colour=FAINT, anchor="end")
        held = simulate(schedule, Durations()).weight_versions
        for stage, actions in enumerate(schedule.rank_actions):
            c.text(left - 10, y + 17 + stage * 26, f"stage {stage}", size=12, anchor="end")
            for action in actions:
                if action.kind is ActionKind.FORWARD:
                    colour = shades[action.version % len(shades)]
                    x = left + action.index * side
                    c.rect(x, y + stage * 26, side - 3, 23, PALE[colour], colour)
                    c.text(x + side / 2 - 1, y + 16 + stage * 26, str(action.version), size=12, anchor="middle")
            c.text(left + microbatches * side + 12, y + 17 + stage * 26, f"holds {held[stage]}", size=12, colour=INK)
    return c.finish()


def cut_model() -> str:
    """A real model's chain, cut for 1F1B and for ZB-V."""
    from echelon import models
    from echelon.pipeline.execution.stage_assignment import cut_into_stages

    model = models.build(replace(models.find_model("gpt-tiny"), layers=7), "meta")
    c = Canvas(256, "Seven layers on two ranks: 1f1b and zb-v")
    for row, name in enumerate(("1f1b", "zb-v")):
        split = cut_into_stages(model, make_schedule(name, 2, MICROBATCHES).rank_of_stage).split
        y = 92 + row * 80
        c.text(24, y + 22, name, mono=True)
        x = 92.0
        for stage, links in enumerate(split.layers):
            colour = (BLUE, ORANGE)[split.rank_of_stage[stage]]
            wide = len(links) * 72 + 6
            c.text(x, y - 8, f"stage {stage}, rank {split.rank_of_stage[stage]}", size=12, colour=FAINT)
            c.rect(x - 3, y - 3, wide - 2, 44, "none", colour)
            for number, link in enumerate(links):
                c.box(x + number * 72 + 1, y, 68, 38, link, colour, size=12)
            x += wide + 6
    c.text(24, 58, "A model is a sequence of layers. It is split between two of them, balanced by cost.", colour=FAINT)
    text = "The output of a layer is sent to the next stage. zb-v places its stages in a V."
    c.text(24, 238, text, size=12, colour=FAINT)
    return c.finish()
