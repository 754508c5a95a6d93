"""When every action runs: by hand, against a slow solver of the same rules, and how long it takes."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import schedules

from echelon.pipeline.actions import COMPUTE, Action, ActionKind
from echelon.pipeline.lower import lower
from echelon.pipeline.schedule import Schedule, looped_placement, v_placement
from echelon.pipeline.schedules import make_schedule
from echelon.pipeline.simulate import UNIT, Durations, simulate


def by_hand(*lists, homes=None, name="by hand"):
    actions = [[Action.parse(text) for text in line.split()] for line in lists]
    return Schedule(
        name=name,
        rank_of_stage=homes or looped_placement(len(lists)),
        microbatches=2,
        rank_actions=tuple(map(tuple, actions)),
    )


def times(timeline, rank):
    return {str(action): (start, end) for action, start, end in timeline.spans(rank)}


ONE_F_ONE_B = ("0F0 0F1 0B0 0B1 0U1", "1F0 1B0 1F1 1B1 1U1")


def test_by_hand_in_unit_time():
    found = simulate(by_hand(*ONE_F_ONE_B))
    assert times(found, 0) == {"0F0": (0, 1), "0F1": (1, 2), "0B0": (4, 6), "0B1": (7, 9), "0U1": (9, 9)}
    assert times(found, 1) == {"1F0": (1, 2), "1B0": (2, 4), "1F1": (4, 5), "1B1": (5, 7), "1U1": (7, 7)}
    assert (found.duration, found.bubble) == (9, 1 - 12 / 18)


def test_every_duration_counts():
    durations = Durations(
        forward=(1.0, 2.0),
        input_grad=(3.0, 4.0),
        weight_grad=5.0,
        update=(6.0, 7.0),
        send_forward=0.5,
        send_backward=8.0,
    )
    found = simulate(by_hand("0F0 0B0 0U1", "1F0 1I0 1W0 1U1"), durations)
    assert times(found, 1) == {"1F0": (1.5, 3.5), "1I0": (3.5, 7.5), "1W0": (7.5, 12.5), "1U1": (12.5, 19.5)}
    assert times(found, 0) == {"0F0": (0, 1), "0B0": (15.5, 23.5), "0U1": (23.5, 29.5)}


def test_transfers_of_a_link_are_sequential():
    gpipe = by_hand("0F0 0F1 0F2", "1F0 1F1 1F2")
    found = simulate(gpipe, Durations(send_forward=3.0))
    assert [start for _, start, _ in found.spans(1)] == [4, 7, 10]
    assert [start for _, start, _ in found.spans(0)] == [0, 1, 2]
    blocking = simulate(gpipe, Durations(send_forward=3.0, overlap=False))
    assert [start for _, start, _ in blocking.spans(0)] == [0, 4, 8]
    assert [start for _, start, _ in blocking.spans(1)] == [4, 8, 12]


def test_sends_are_spans_of_a_lowered_schedule():
    lowered = by_hand("0F0 0SF0 0F1 0SF1", "1RF0 1RF1 1F0 1F1")
    found = simulate(lowered, Durations(send_forward=3.0))
    assert times(found, 0) == {"0F0": (0, 1), "0SF0": (1, 4), "0F1": (1, 2), "0SF1": (4, 7)}
    # Both receives are there from the start, and neither holds up what stands behind it.
    assert times(found, 1) == {"1RF0": (0, 4), "1RF1": (0, 7), "1F0": (4, 5), "1F1": (7, 8)}
    blocking = simulate(lowered, Durations(send_forward=3.0, overlap=False))
    assert times(blocking, 0)["0F1"] == (4, 5)


def test_nothing_is_sent_between_stages_of_one_rank():
    found = simulate(by_hand("0F0 3F0", "1F0 2F0", homes=v_placement(2)), Durations(send_forward=10.0))
    assert times(found, 1) == {"1F0": (11, 12), "2F0": (12, 13)}
    assert times(found, 0) == {"0F0": (0, 1), "3F0": (23, 24)}


def test_slices_have_factors():
    found = simulate(by_hand("0F0 0F0.1 0B0.1 0B0"), Durations(slices=(1.0, 0.25)))
    assert [end for _, _, end in found.spans(0)] == [1, 1.25, 1.75, 3.75]
    with pytest.raises(ValueError, match=r"^1 factors for 2 slices"):
        simulate(by_hand("0F0 0F0.1"), Durations(slices=(1.0,)))


def solved(schedule, durations):
    """The same times by going over all actions until nothing changes; rank by rank, with no order between ranks."""
    seconds = {
        ActionKind.FORWARD: durations.forward,
        ActionKind.BACKWARD: durations.input_grad + durations.weight_grad,
        ActionKind.INPUT_GRAD: durations.input_grad,
        ActionKind.WEIGHT_GRAD: durations.weight_grad,
    }
    ends: dict[tuple[object, ...], float] = {}
    changed = True
    while changed:
        changed = False
        for rank, actions in enumerate(schedule.rank_actions):
            now, lanes = 0.0, {}
            for action in actions:
                stage, kind, *what = action[:4]
                is_forward, is_backward = (
                    kind is ActionKind.FORWARD,
                    kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD),
                )
                step = 1 if is_forward else -1 if is_backward else 0
                needs = 0.0
                if step and 0 <= stage - step < schedule.stages:
                    needs = ends.get((stage - step, step, *what, "sent"), 0.0)
                end = max(now, needs) + seconds.get(kind, durations.update if kind is ActionKind.UPDATE else 0.0)
                changed |= ends.get((stage, kind, *what)) != end
                ends[stage, kind, *what] = now = end
                if step and 0 <= stage + step < schedule.stages:
                    home = schedule.rank_of_stage[stage + step]
                    link = durations.send_forward if is_forward else durations.send_backward
                    if home != rank:
                        end = lanes[home] = max(end, lanes.get(home, 0.0)) + link
                    ends[stage, step, *what, "sent"] = end
    return {key: end for key, end in ends.items() if key[-1] != "sent"}


eighths = st.integers(0, 24).map(lambda number: number / 8)  # sums of them are exact
durations_ = st.builds(
    Durations,
    forward=eighths,
    input_grad=eighths,
    weight_grad=eighths,
    update=eighths,
    send_forward=eighths,
    send_backward=eighths,
)


@settings(max_examples=60, deadline=None)
@given(schedules(), durations_)
def test_simulation_matches_a_slow_solver(schedule, durations):
    found = simulate(schedule, durations)
    ends = {action[:4]: end for rank in range(schedule.ranks) for action, _, end in found.spans(rank)}
    assert ends == solved(schedule, durations)


@settings(max_examples=60, deadline=None)
@given(schedules(), durations_)
def test_lowering_changes_no_time(schedule, durations):
    bare, lowered = simulate(schedule, durations), simulate(lower(schedule), durations)
    for rank in range(schedule.ranks):
        compute = [span for span in lowered.spans(rank) if span.action.kind in COMPUTE]
        assert compute == [span for span in bare.spans(rank) if span.action.kind in COMPUTE]
    assert (bare.duration, bare.bubble, bare.in_flight) == (lowered.duration, lowered.bubble, lowered.in_flight)


@pytest.mark.parametrize("name", ["pipedream", "pipedream-vsync", "2bw"])
@pytest.mark.parametrize("dress", [lambda schedule: schedule, lower], ids=["bare", "lowered"])
def test_a_window_of_a_stream_starts_with_what_the_one_before_left(name, dress):
    found = simulate(dress(make_schedule(name, 4, 6, first_microbatch=12, drain=False)))
    # A full pipeline: each rank runs six forwards and six backwards, and waits only for the first gradient.
    assert found.in_flight == (4, 3, 2, 1)
    assert found.duration <= 6 * 3 + 3
    simulate(dress(make_schedule(name, 4, 6, first_microbatch=12)))


@pytest.mark.parametrize(
    "lists",
    [
        ("0F5 0B3 0B4", "1F5 1B4 1B5"),
        ("0F5 0SF5 0RB3 0B3 0RB4 0B4", "1RF5 1F5 1B4 1SB4 1B5 1SB5"),
    ],
    ids=["bare", "lowered"],
)
def test_a_microbatch_of_an_earlier_window_waits_for_this_window(lists):
    found = times(simulate(by_hand(*lists)), 0)
    # The window before sent the gradient of microbatch 3. That of 4 comes at 4, from 1B4 behind 1F5.
    assert (found["0B3"], found["0B4"]) == ((1, 3), (4, 6))


def test_a_deadlock_names_what_each_rank_waits_for():
    with pytest.raises(ValueError, match="deadlocks") as raised:
        simulate(by_hand("0B0 0F0", "1F0 1I0 1W0"))
    assert "(by hand: rank 0 at 0B0 waits for 0F0, rank 1 at 1F0 waits for 0F0)" in str(raised.value)
    crossed = by_hand("0F0 0B0 0F1 0B1", "1F0 1F1 1I0 1W0 1I1 1W1")
    with pytest.raises(ValueError, match="rank 0 at 0B0 waits for 1I0, rank 1 at 1F1 waits for 0F1"):
        simulate(crossed)
    with pytest.raises(ValueError, match="rank 1 at 1F0 waits for 0SF0"):
        simulate(by_hand("0F0", "1RF0 1F0"))
    with pytest.raises(ValueError, match="rank 1 at 1F0 waits for 1RF0"):
        simulate(by_hand("0F0 0SF0", "1F0"))
    with pytest.raises(ValueError, match="rank 0 at 0W0 waits for 0I0"):
        simulate(by_hand("0F0 0W0"))
    with pytest.raises(ValueError, match="rank 0 at 0SF0 waits for 0F0"):
        simulate(by_hand("0SF0 0F0", "1RF0 1F0"))


def test_mismatched_durations_are_rejected():
    with pytest.raises(ValueError, match=r"negative or not finite \(forward=-1\)"):
        Durations(forward=-1)
    with pytest.raises(ValueError, match=r"\(update=\(1.0, nan\)\)"):
        Durations(update=(1.0, float("nan")))
    with pytest.raises(ValueError, match="3 numbers for 2 stages"):
        simulate(by_hand(*ONE_F_ONE_B), Durations(forward=(1.0, 2.0, 3.0)))
    with pytest.raises(ValueError, match="an action of stage 2 in a schedule of 2 stages"):
        simulate(by_hand("0F0", "2F0"))


def test_a_hundred_thousand_actions_in_a_second_or_so():
    schedule = make_schedule("1f1b", 16, 3125)
    begun = time.process_time()
    found = simulate(schedule, UNIT)
    assert time.process_time() - begun < 2.0
    assert found.duration == 3 * (3125 + 15)
