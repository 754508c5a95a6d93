"""`echelon draw`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echelon.cli.cli_errors import print_json, report_errors
from echelon.cli.cli_options import AsJson, optional
from echelon.layout.validation_error import ValidationError, ValidationIssue, did_you_mean

if TYPE_CHECKING:
    from echelon.pipeline.schedule import Schedule
    from echelon.pipeline.timeline import Timeline
    from echelon.report.run_picture import RunPicture

EXAMPLES = """[bold]Examples[/bold]\n
echelon draw\n
echelon draw 1f1b --stages 4 --microbatches 8\n
echelon draw interleaved --stages 4 --chunks 3 --svg interleaved.svg\n
echelon draw zb-v --weight-grad 0.8 --link 0.1 --html zb-v.html\n
echelon draw file:my_schedule.txt\n
echelon draw runs/gpt-tiny-20250131-120000 --html run.html
"""

DEFAULT_STAGES, DEFAULT_MICROBATCHES = 4, 8
MAX_DRAWN_FORWARDS = 100_000
"""forwards of a schedule: a page with more takes long to write and to open"""
SIZE_OPTIONS = ("stages", "microbatches", "chunks", "slices")


def command(
    what: Annotated[
        str,
        typer.Argument(
            metavar="[SCHEDULE|RUN]",
            help="A schedule's name, file:PATH of a custom one, or a run's directory. Without it: lists the names.",
            show_default=False,
        ),
    ] = "",
    stages: Annotated[int | None, optional(f"Ranks of the pipeline. Default: {DEFAULT_STAGES}.")] = None,
    microbatches: Annotated[int | None, optional(f"Microbatches per step. Default: {DEFAULT_MICROBATCHES}.")] = None,
    chunks: Annotated[int | None, optional("Chunks (virtual stages) per rank. Default: the schedule's.")] = None,
    slices: Annotated[int | None, optional("Token slices per sequence (terapipe). Default: 1.")] = None,
    forward: Annotated[float | None, optional("Seconds of a forward. Default: 1.")] = None,
    input_grad: Annotated[float | None, optional("Seconds of a stage's input gradient. Default: 1.")] = None,
    weight_grad: Annotated[float | None, optional("Seconds of a stage's weight gradients. Default: 1.")] = None,
    link: Annotated[float | None, optional("Seconds of a p2p transfer between ranks. Default: 0.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the picture to this SVG file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with zoom and hover to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Draw a pipeline schedule, or a run: its planned over its measured timeline, and its expert load."""
    sizes = {"stages": stages, "microbatches": microbatches, "chunks": chunks, "slices": slices}
    seconds = {"forward": forward, "input-grad": input_grad, "weight-grad": weight_grad, "link": link}
    given = {key: value for key, value in {**sizes, **seconds}.items() if value is not None}
    files = {"svg": svg, "html": html}
    with report_errors(as_json):
        if not what:
            given_files = {key: path for key, path in files.items() if path}
            _reject_options({**given, **given_files}, "requires a schedule or a run to draw")
            _list_schedules(as_json)
            return
        picture = _picture(what, given)
        for key, path in files.items():
            if path is not None:
                _write(key, path, picture)
    if as_json:
        print_json(_picture_json(picture))
    else:
        _show(picture, [path for path in files.values() if path is not None])


def _reject_options(given: dict[str, Any], rule: str) -> None:
    if given:
        raise ValidationError([ValidationIssue(f"--{key}", str(value), rule) for key, value in given.items()])


def _picture(what: str, given: dict[str, Any]) -> RunPicture:
    from echelon.pipeline.schedules import FAMILIES, FILE_PREFIX
    from echelon.report.run_picture import RunPicture

    if what in FAMILIES or what.startswith(FILE_PREFIX):
        return RunPicture(_simulate(what, given))
    if Path(what).is_dir():
        _reject_options(given, "applies to schedules; a run has its own sizes and durations")
        return RunPicture.from_run(Path(what))
    rule = "is neither a schedule nor the directory of a run"
    legal = f"{', '.join(FAMILIES)}, {FILE_PREFIX}PATH, a run's directory"
    raise ValidationError([ValidationIssue("draw", what, rule, legal=legal, hint=did_you_mean(what, FAMILIES))])


def _simulate(name: str, given: dict[str, Any]) -> Timeline:
    from echelon.pipeline.lower import lower
    from echelon.pipeline.simulate import Durations, simulate

    faults = [
        ValidationIssue(f"--{key}", str(given[key]), "is too small", legal="1 or more")
        for key in SIZE_OPTIONS
        if given.get(key, 1) < 1
    ]
    faults += [
        ValidationIssue(f"--{key}", str(given[key]), "is not a valid duration", legal="seconds, 0 or more")
        for key in ("forward", "input-grad", "weight-grad", "link")
        if not 0 <= given.get(key, 0.0) < float("inf")
    ]
    sizes = {"stages": DEFAULT_STAGES, "microbatches": DEFAULT_MICROBATCHES, "chunks": 1, "slices": 1}
    if not faults and math.prod(given.get(key, default) for key, default in sizes.items()) > MAX_DRAWN_FORWARDS:
        rule = f"is too large to draw: stages x microbatches x chunks x slices exceed {MAX_DRAWN_FORWARDS:,}"
        key = max((key for key in SIZE_OPTIONS if key in given), key=given.__getitem__)
        faults.append(ValidationIssue(f"--{key}", str(given[key]), rule, hint="draw fewer"))
    if faults:
        raise ValidationError(faults)
    link = given.get("link", 0.0)
    durations = Durations(
        forward=given.get("forward", 1.0),
        input_grad=given.get("input-grad", 1.0),
        weight_grad=given.get("weight-grad", 1.0),
        send_forward=link,
        send_backward=link,
    )
    schedule = _build_schedule(name, given)
    # P2p transfers that take time are drawn.
    return simulate(lower(schedule) if link else schedule, durations)


def _build_schedule(name: str, given: dict[str, Any]) -> Schedule:
    from echelon.pipeline.schedules import FILE_PREFIX, make_schedule

    if name.startswith(FILE_PREFIX):
        return _read_schedule(name.removeprefix(FILE_PREFIX), given)
    stages, microbatches = given.get("stages", DEFAULT_STAGES), given.get("microbatches", DEFAULT_MICROBATCHES)
    return make_schedule(name, stages, microbatches, chunks=given.get("chunks", 0), slices=given.get("slices", 1))


def _read_schedule(path: str, given: dict[str, Any]) -> Schedule:
    """Read a schedule file, which determines all sizes; given sizes must agree with it."""
    from echelon.pipeline.schedules import schedule_file

    schedule = schedule_file.load_schedule(path)
    sizes = {"stages": schedule.ranks, "microbatches": schedule.microbatches, "slices": schedule.slices}
    sizes["chunks"] = schedule.stages // schedule.ranks
    different = {key: given[key] for key in SIZE_OPTIONS if given.get(key, sizes[key]) != sizes[key]}
    _reject_options(different, "does not match the file")
    return schedule


def _write(kind: str, path: Path, picture: RunPicture) -> None:
    try:
        path.write_text(picture.as_svg() if kind == "svg" else picture.as_html(), encoding="utf-8")
    except OSError as error:
        rule = f"cannot be written ({error.strerror})"
        raise ValidationError([ValidationIssue(f"--{kind}", str(path), rule, hint="choose another")]) from error


def _picture_json(picture: RunPicture) -> dict[str, Any]:
    """The object of `--json`: the measured timeline, if there is one, with the planned one."""
    report: dict[str, Any] = {}
    if picture.planned is not None:
        report = _timeline_json(picture.measured or picture.planned, picture.planned.note)
        if picture.measured is not None:
            report["planned"] = _timeline_json(picture.planned, picture.planned.note)
    if picture.expert_load is not None:
        report["experts"] = picture.expert_load.to_json()
    return report


def _timeline_json(shown: Timeline, note: str) -> dict[str, Any]:
    from echelon.pipeline.actions import RECEIVES, SENDS

    return {
        "bubble": shown.bubble,
        "in_flight": list(shown.in_flight),
        "duration": shown.duration,
        # Without p2p actions, which the runtime places.
        "ranks": [
            [str(action) for action in actions if action.kind not in SENDS | RECEIVES] for actions in shown.rank_actions
        ],
        "note": note,
    }


def _show(picture: RunPicture, files: list[Path]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    # Sixteen colours are too few for shades: letters are used instead.
    colour = console.color_system in ("256", "truecolor") and not console.no_color
    console.print(picture.as_text(width=console.width, colour=colour), end="", soft_wrap=True)
    for path in files:
        console.print(f"wrote {path}", soft_wrap=True, markup=False)


def _list_schedules(as_json: bool) -> None:
    from echelon.pipeline.schedules import FAMILIES, FILE_PREFIX

    if as_json:
        print_json({"schedules": {family.name: family.title for family in FAMILIES.values()}})
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    rows = [*((family.name, family.title) for family in FAMILIES.values()), (f"{FILE_PREFIX}PATH", "a custom schedule")]
    width = max(len(name) for name, _ in rows)
    for name, title in rows:
        console.print(Text.assemble((f"{name:<{width}}", "cyan"), f"  {title}"), soft_wrap=True)
