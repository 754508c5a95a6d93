"""Every pipeline schedule under its name: `make_schedule("1f1b", ranks, microbatches)`, and the table of families.

A new schedule is one file with `build`, and with `bubble` and `in_flight` unless it shares them, one row of
`FAMILIES` and its name in layout/; CONTRIBUTING.md lists the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction

from echelon.layout import Layout
from echelon.layout.validation_error import did_you_mean
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.schedules import (
    dualpipe_v,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    pipedream,
    pipedream_vsync,
    schedule_file,
    terapipe,
    two_bw,
    zb_h1,
    zb_v,
)

FILE_PREFIX = "file:"
"""stands before the path of a schedule that the user wrote"""

SYNC_RUNTIME = "echelon.pipeline.execution.runtime.PipelineRuntime"
ASYNC_RUNTIME = "echelon.pipeline.async_.async_runtime.AsyncRuntime"
SLICE_RUNTIME = "echelon.pipeline.slices.slice_runtime.SliceRuntime"


@dataclass(frozen=True)
class ScheduleFamily:
    """One pipeline schedule, for any number of ranks and microbatches."""

    name: str
    """as in the layout"""
    title: str
    """one line for people"""
    _: KW_ONLY
    build: Callable[..., Schedule]
    """from (ranks, chunks, microbatches); takes slices, or first_microbatch and drain, where the family has them"""
    bubble: Callable[..., Fraction | None]
    """from (ranks, chunks, microbatches), with F = I = W = 1, B = 2 and free transfers; None where no formula holds.
    For an asynchronous family, of a run of `microbatches` in all"""
    in_flight: Callable[..., tuple[int, ...]]
    """from the same: for each rank the most activations (of a stage, a microbatch and a slice) that it holds at once,
    from F until B, or until W where backward is split. The warm-up in `build` decides it; tests compare the two"""
    chunks: int | None = 1
    """stages per rank; None where the user chooses, 2 or more"""
    asynchronous: bool = False
    """whether a run is one endless stream, cut into windows"""
    updates_every_microbatch: bool = False
    """whether each microbatch makes an update; otherwise a step makes one"""
    weight_versions: Callable[[int], tuple[int, ...]] = lambda ranks: (1,) * ranks
    """from ranks: for each rank the most weight versions at once, with the latest, in an endless stream. The K and D
    of `build` decide it; tests compare the two"""
    splits_backward: bool = False
    """whether it has I and W"""
    has_slices: bool = False
    """whether it cuts sequences into slices of tokens"""

    @property
    def runtime(self) -> str:
        """The class that executes it; a path, because the families import no torch."""
        return ASYNC_RUNTIME if self.asynchronous else SLICE_RUNTIME if self.has_slices else SYNC_RUNTIME


# fmt: off
FAMILIES: dict[str, ScheduleFamily] = {family.name: family for family in (
    ScheduleFamily("naive", "naive layer split: one microbatch at a time through all stages",
        build=naive.build, bubble=naive.bubble, in_flight=naive.in_flight),
    ScheduleFamily("gpipe", "GPipe: all microbatches forward, then all backward",
        build=gpipe.build, bubble=gpipe.bubble, in_flight=gpipe.in_flight),
    ScheduleFamily("1f1b", "1F1B (PipeDream-flush): GPipe's bubble with as many microbatches in flight as stages",
        build=one_f_one_b.build, bubble=gpipe.bubble, in_flight=one_f_one_b.in_flight),
    ScheduleFamily("interleaved", "interleaved 1F1B: several chunks per rank, a bubble smaller by their number",
        build=interleaved.build, bubble=interleaved.bubble, in_flight=interleaved.in_flight, chunks=None),
    ScheduleFamily("zb-h1", "zero bubble, H1: weight gradients fill the bubble, with the memory of 1F1B",
        build=zb_h1.build, bubble=zb_h1.bubble, in_flight=zb_h1.in_flight, splits_backward=True),
    ScheduleFamily("zb-v", "zero bubble, V: two chunks there and back, no rank waits in between",
        build=zb_v.build, bubble=zb_v.bubble, in_flight=zb_v.in_flight, chunks=2, splits_backward=True),
    ScheduleFamily("dualpipe-v", "DualPipe-V: forwards of one direction alternate with backwards of the other",
        build=dualpipe_v.build, bubble=dualpipe_v.bubble, in_flight=dualpipe_v.in_flight, chunks=2,
        splits_backward=True),
    ScheduleFamily("pipedream", "PipeDream: no flush, each microbatch keeps the weights of its forward",
        build=pipedream.build, bubble=gpipe.bubble, in_flight=one_f_one_b.in_flight, asynchronous=True,
        updates_every_microbatch=True, weight_versions=pipedream.weight_versions),
    ScheduleFamily("pipedream-vsync", "PipeDream with vertical sync: one version of the weights on all stages",
        build=pipedream_vsync.build, bubble=gpipe.bubble, in_flight=one_f_one_b.in_flight, asynchronous=True,
        updates_every_microbatch=True, weight_versions=pipedream_vsync.weight_versions),
    ScheduleFamily("2bw", "PipeDream-2BW: no flush, two versions of the weights",
        build=two_bw.build, bubble=two_bw.bubble, in_flight=two_bw.in_flight, asynchronous=True,
        weight_versions=two_bw.weight_versions),
    ScheduleFamily("terapipe", "TeraPipe: a pipeline over slices of a sequence's tokens",
        build=terapipe.build, bubble=terapipe.bubble, in_flight=terapipe.in_flight, has_slices=True),
)}
# fmt: on
"""Every named schedule, in the order of the layout's grammar."""


def make_schedule(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    chunks: int = 0,
    slices: int = 1,
    first_microbatch: int = 0,
    drain: bool = True,
) -> Schedule:
    """Build the schedule of a name, or read that of a file: `file:PATH`.

    `chunks` are the stages per rank; 0 takes the family's number, or 2 where the user chooses. `first_microbatch` and
    `drain` cut a window from the endless stream of an asynchronous schedule: `microbatches` of them from
    `first_microbatch` on; without `drain`, backwards that are not due yet are left to the next window.
    """
    family = FAMILIES.get(name)
    errors = [
        *_size_errors(ranks, microbatches, chunks, slices, first_microbatch),
        *_option_errors(name, family, chunks, slices),
    ]
    if errors:
        raise ValueError("\n".join(errors))
    if family is None:
        wanted = 0 if slices == 1 else slices
        path = name.removeprefix(FILE_PREFIX)
        return schedule_file.load_schedule(path, ranks=ranks, chunks=chunks, microbatches=microbatches, slices=wanted)
    chunks = chunks or family.chunks or 2
    if family.asynchronous:
        return family.build(ranks, chunks, microbatches, first_microbatch=first_microbatch, drain=drain)
    if family.has_slices:
        return family.build(ranks, chunks, microbatches, slices=slices)
    return family.build(ranks, chunks, microbatches)


def schedule_for_layout(layout: Layout) -> Schedule:
    """The schedule of one training step; TeraPipe's before its sequences are sliced."""
    is_file = layout.schedule.startswith(FILE_PREFIX)
    # A file fixes its number of chunks. The layout must agree with it, unless vpp is the default of 1.
    chunks = 0 if is_file and layout.vpp == 1 else layout.vpp
    schedule = make_schedule(layout.schedule, layout.pp, layout.accumulate, chunks=chunks)
    if is_file:
        schedule_file.check_runnable(schedule)
    return schedule


def runtime_path(schedule: str) -> str:
    """The dotted path of the runtime class that executes a schedule."""
    return FAMILIES[schedule].runtime if schedule in FAMILIES else SYNC_RUNTIME


def updates_per_step(layout: Layout) -> int:
    """How many optimizer updates a step makes."""
    family = FAMILIES.get(layout.schedule)
    return layout.accumulate if family is not None and family.updates_every_microbatch else 1


def weight_versions(layout: Layout) -> tuple[int, ...]:
    """For every rank of the pipeline, the most weight versions that it holds at once, the latest included."""
    family = FAMILIES.get(layout.schedule)
    return family.weight_versions(layout.pp) if family is not None and layout.pp > 1 else (1,) * layout.pp


def _size_errors(ranks: int, microbatches: int, chunks: int, slices: int, first: int) -> list[str]:
    given = {"ranks": ranks, "microbatches": microbatches, "slices": slices, "chunks": chunks, "first": first}
    least = {"chunks": 0, "first": 0}
    return [
        f"{noun} is too small ({noun}={value}); give {least.get(noun, 1)} or more"
        for noun, value in given.items()
        if value < least.get(noun, 1)
    ]


def _option_errors(name: str, family: ScheduleFamily | None, chunks: int, slices: int) -> list[str]:
    """Options that a schedule of this name does not support."""
    errors = []
    if family is None:
        if not name.startswith(FILE_PREFIX):
            remedy = f"choose one of {', '.join(FAMILIES)}, {FILE_PREFIX}PATH"
            hint = did_you_mean(name, FAMILIES)
            errors.append(f"unknown schedule ({name!r}); {remedy}{'; ' if hint else ''}{hint}")
        return errors
    if family.chunks is None and chunks == 1:
        errors.append(f"too few chunks for {name} (chunks=1); give 2 or more, or choose 1f1b")
    elif family.chunks is not None and chunks not in (0, family.chunks):
        other = ", or choose interleaved" if family.chunks == 1 else ""
        errors.append(f"{name} has another number of chunks per rank (chunks={chunks}); give {family.chunks}{other}")
    if slices != 1 and not family.has_slices:
        errors.append(f"{name} has no slices (slices={slices}); give 1, or choose terapipe")
    return errors


def schedule_file_error(layout: Layout, layers: int = 0) -> str:
    """What is wrong with the schedule file of a layout, or "". `layers` is the number of the model's layers."""
    if not layout.schedule.startswith(FILE_PREFIX) or layout.pp == 1:
        return ""
    try:
        stages = schedule_for_layout(layout).stages
    except ValueError as error:
        return str(error)
    return f"its {stages} stages leave some without a layer (the model has {layers})" if 0 < layers < stages else ""
