"""What a timeline says of itself, and that it survives a run's directory."""

import json
from itertools import accumulate

import pytest
from hypothesis import given, settings
from shapes import schedules

from echelon.pipeline.actions import Action, ActionKind
from echelon.pipeline.execution.timeline_recording import planned_and_measured
from echelon.pipeline.lower import lower
from echelon.pipeline.schedules import make_schedule, schedule_file
from echelon.pipeline.simulate import Durations, simulate
from echelon.pipeline.timeline import TIMELINE_FILE, Timeline, read_timelines, write_timelines


@pytest.fixture
def planned():
    return simulate(make_schedule("1f1b", 2, 3), Durations(forward=0.25, update=0.5))


@pytest.fixture
def measured(planned):
    spans = [[(str(action), 7 + start, 7 + end * 1.1) for action, start, end in planned.spans(rank)] for rank in (0, 1)]
    return Timeline.from_spans("1f1b", (0, 1), spans, note="a note")


def test_only_forward_and_backward_count_as_busy():
    found = simulate(make_schedule("1f1b", 2, 2), Durations(update=5.0, send_forward=1.0))
    assert found.busy(0) == found.busy(1) == 6
    assert found.bubble == 1 - 12 / (2 * found.duration)


@settings(max_examples=40, deadline=None)
@given(schedules())
def test_in_flight_counts_activations(schedule):
    change = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.WEIGHT_GRAD: -1}
    counted = [accumulate(change.get(action.kind, 0) for action in actions) for actions in schedule.rank_actions]
    assert simulate(schedule).in_flight == simulate(lower(schedule)).in_flight == tuple(map(max, counted))


def test_in_flight_of_a_small_schedule():
    found = simulate(schedule_file.parse_schedule("rank 0, stages 0: 0F0@0 0F1@0 0B0@0 0K0 0U1 0B1@0 0D0 0U2"))
    assert (found.in_flight, found.weight_versions) == ((2,), (2,))
    assert simulate(schedule_file.parse_schedule("rank 0, stages 0: 0F0 0I0 0F1 0W0 0I1 0W1 0U1")).in_flight == (2,)


def test_memory_over_time():
    found = simulate(make_schedule("1f1b", 2, 2))
    # rank 0: 0F0 0F1 0B0 0B1, with B from 4 to 6 and from 7 to 9.
    assert found.memory_over_time(0, activations=(10.0, 99.0)) == [(0.0, 10.0), (1.0, 20.0), (6.0, 10.0), (9.0, 0.0)]
    assert found.peak_memory(0, activations=(10.0, 99.0)) == 20
    assert found.memory_over_time(1) == [(0.0, 0.0), (1.0, 1.0), (4.0, 1.0), (7.0, 0.0)]


def test_activations_count_until_the_weight_gradients():
    found = simulate(make_schedule("zb-h1", 4, 8))
    assert found.in_flight == (4, 4, 4, 4)
    assert found.memory_over_time(3)[-1] == (found.duration, 0.0)


@pytest.mark.parametrize(("name", "versions"), [("pipedream", (4, 3, 2, 1)), ("1f1b", (1, 1, 1, 1))])
def test_stashed_weight_versions_are_counted(name, versions):
    found = simulate(make_schedule(name, 4, 12))
    assert found.weight_versions == versions
    for rank in range(4):
        assert found.peak_memory(rank, activations=0.0, versions=100.0) == 100 * (versions[rank] - 1)
        assert found.memory_over_time(rank, activations=1.0, versions=100.0)[-1][1] == 0


def test_a_window_counts_activations_of_earlier_windows():
    found = simulate(make_schedule("pipedream", 4, 6, first_microbatch=12, drain=False))
    assert found.weight_versions == (4, 3, 2, 1)
    # Rank 0 begins with a forward at once; the others hold only what their backwards will need.
    assert [found.memory_over_time(rank)[0] for rank in range(4)] == [(0.0, 4.0), (0.0, 2.0), (0.0, 1.0), (0.0, 0.0)]


def test_clock_readings_start_at_zero(measured, planned):
    assert measured.measured
    assert not planned.measured
    assert measured.starts[0][0] == 0
    assert measured.duration == pytest.approx(1.1 * planned.duration)
    assert measured.rank_actions == planned.rank_actions
    with pytest.raises(ValueError, match=r"ends before it starts \(rank 0, 0F0: 2 to 1\)"):
        Timeline.from_spans("x", (0,), [[(Action.parse("0F0"), 2, 1)]])


@settings(max_examples=20, deadline=None)
@given(schedules())
def test_json_holds_everything(schedule):
    found = simulate(lower(schedule), Durations(forward=1 / 3, send_forward=0.1))
    assert Timeline.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_run_stores_planned_and_measured(tmp_path, planned, measured):
    write_timelines(tmp_path, planned, measured)
    assert json.loads((tmp_path / TIMELINE_FILE).read_text()).keys() == {"planned", "measured"}
    assert read_timelines(tmp_path) == (planned, measured)
    write_timelines(tmp_path, None, measured)
    assert read_timelines(tmp_path) == (None, measured)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not valid JSON"),
        ("[]", "is not an object"),
        ("{}", "is empty"),
        ('{"planned": {"homes": [0]}}', "not a timeline"),
        ('{"planned": {"name": "x", "homes": [0], "ranks": [[["0Q0", 0, 1]]]}}', "'0Q0' is not an action"),
        ('{"planned": {"name": "x", "homes": [0], "ranks": [[["0F0", 0]]]}}', "not an action with"),
        ('{"planned": {"name": "x", "homes": [0], "ranks": [[["2F0", 0, 1]]]}}', "a stage without a rank"),
        (None, "no timeline in the run"),
    ],
)
def test_a_broken_file_is_rejected(tmp_path, text, says):
    if text is not None:
        (tmp_path / TIMELINE_FILE).write_text(text)
    with pytest.raises(ValueError, match=says):
        read_timelines(tmp_path)


def test_a_synchronous_step_has_no_time_for_updates():
    """They are made after it. `draw RUN` named them in its legend, for the microseconds of passing them by."""
    for name, seconds in (("1f1b", 0.0), ("pipedream", 0.5)):
        schedule = make_schedule(name, 2, 3)
        reported = simulate(schedule, Durations(update=0.5))
        spans = [[(str(action), start, end) for action, start, end in reported.spans(rank)] for rank in (0, 1)]
        for found in planned_and_measured(schedule, spans):
            updates = [end - start for action, start, end in found.spans(0) if action.kind is ActionKind.UPDATE]
            assert updates == [seconds] * len(updates) != []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"homes": [], "ranks": [[], []]}, "has no stages"),
        ({"homes": [0, 2]}, "a stage is on a rank that is not there"),
        ({"homes": [0, -1]}, "a stage is on a rank that is not there"),
        ({"ranks": []}, "a stage is on a rank that is not there"),
        ({"ranks": [[["0F0", 0, float("nan")]], []]}, "not an action with its start and end"),
        ({"ranks": [[["0F0", 0, float("inf")]], []]}, "not an action with its start and end"),
    ],
)
def test_an_invalid_timeline_is_rejected(planned, change, fault):
    broken = json.loads(json.dumps(planned.to_json() | change))
    with pytest.raises(ValueError, match=fault):
        Timeline.from_json(broken)
