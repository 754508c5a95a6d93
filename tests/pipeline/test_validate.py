"""The validator finds what is wrong, says where, and finds nothing in what can run."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from shapes import schedules, streams, windows

from echelon.pipeline.actions import Action, ActionKind
from echelon.pipeline.dependencies import Dependencies, action_result
from echelon.pipeline.lower import lower
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.schedules import make_schedule
from echelon.pipeline.simulate import simulate
from echelon.pipeline.validate import check_schedule, fault_messages, join_windows


def parsed(*texts, homes=None, microbatches=1, slices=1):
    lists = tuple(tuple(map(Action.parse, text.split())) for text in texts)
    homes = homes or tuple(range(len(texts)))
    return Schedule(name="by hand", rank_of_stage=homes, microbatches=microbatches, rank_actions=lists, slices=slices)


def changed(schedule, rank, actions):
    return replace(
        schedule, rank_actions=(*schedule.rank_actions[:rank], tuple(actions), *schedule.rank_actions[rank + 1 :])
    )


@st.composite
def places(draw, least_ranks=1):
    """A schedule, lowered or not, and a place in one of its lists."""
    schedule = draw(schedules(least_ranks=least_ranks))
    schedule = lower(schedule) if draw(st.booleans()) else schedule
    rank = draw(st.integers(0, schedule.ranks - 1))
    return schedule, rank, draw(st.integers(0, len(schedule.rank_actions[rank]) - 1))


@settings(deadline=None)
@given(places())
def test_a_dropped_action_is_found(found):
    schedule, rank, place = found
    actions = schedule.rank_actions[rank]
    assert fault_messages(changed(schedule, rank, [*actions[:place], *actions[place + 1 :]]))


@settings(deadline=None)
@given(places())
def test_a_duplicated_action_is_found(found):
    schedule, rank, place = found
    actions = schedule.rank_actions[rank]
    assert fault_messages(changed(schedule, rank, [*actions[: place + 1], *actions[place:]]))


@settings(deadline=None)
@given(places(least_ranks=2), st.data())
def test_an_action_on_another_rank_is_found(found, data):
    schedule, rank, place = found
    action = schedule.rank_actions[rank][place]
    broken = changed(schedule, rank, [*schedule.rank_actions[rank][:place], *schedule.rank_actions[rank][place + 1 :]])
    other = data.draw(st.integers(0, schedule.ranks - 1).filter(lambda other: other != rank))
    there = data.draw(st.integers(0, len(schedule.rank_actions[other])))
    broken = changed(broken, other, [*broken.rank_actions[other][:there], action, *broken.rank_actions[other][there:]])
    text = f"rank {other}, position {there} ({action}): stage {action.stage} is on rank {rank}"
    assert text in fault_messages(broken)


@settings(deadline=None)
@given(places())
def test_an_action_before_its_dependency_is_found(found):
    schedule, rank, place = found
    actions = list(schedule.rank_actions[rank])
    needs = Dependencies(schedule).for_action(actions[place])
    first = next((at for at, action in enumerate(actions[:place]) if action_result(action) in needs), None)
    assume(first is not None)
    actions[first], actions[place] = actions[place], actions[first]
    wrong = fault_messages(changed(schedule, rank, actions))
    assert any(
        f"rank {rank}, position {first} ({actions[first]}): comes before {actions[place]}" in text for text in wrong
    )


@settings(deadline=None)
@given(places(), st.randoms(use_true_random=False))
def test_schedules_without_faults_can_run(found, random):
    """Some actions of a list change places. What the validator lets pass can be run, and lowered without a deadlock."""
    schedule, rank, _ = found
    actions = list(schedule.rank_actions[rank])
    start = random.randrange(len(actions))
    end = start + random.randint(2, 4)
    actions[start:end] = random.sample(actions[start:end], len(actions[start:end]))
    mixed = changed(schedule, rank, actions)
    if not fault_messages(mixed):
        assert simulate(mixed).duration > 0
        assert fault_messages(lower(mixed)) == []


@settings(deadline=None)
@given(streams())
def test_a_window_alone_is_not_a_stream(stream):
    name, ranks, sizes = stream
    assume(len(sizes) > 1)
    first, *rest = windows(name, ranks, sizes)
    assert fault_messages(first, drained=False) == []
    assert fault_messages(join_windows(rest))
    if ranks > 1:
        assert any(
            "is missing" in text or "no update" in text or "to the end" in text for text in fault_messages(first)
        )


def test_every_fault_at_once():
    schedule = parsed("0F0 0F0 0B1 0U1", "0B0 1B0 1F0 9F0 1F7 1U1", microbatches=2)
    assert fault_messages(schedule) == [
        "rank 1, position 0 (0B0): stage 0 is on rank 0",
        "rank 1, position 3 (9F0): there is no stage 9 (0 to 1)",
        "rank 1, position 4 (1F7): there is no microbatch 7 (0 to 1)",
        "rank 0, position 1 (0F0): is there twice (first on rank 0, position 0)",
        "0F1 is missing",
        "1F1 is missing",
        "1B1 is missing (or 1I1 and 1W1)",
        "rank 1, position 0 (0B0): comes before 1B0 (position 1), which it needs",
        "rank 1, position 1 (1B0): comes before 1F0 (position 2), which it needs",
    ]
    with pytest.raises(ValueError, match=r"cannot run \(by hand, 9 faults\); change its lists:\n  rank 1, position 0"):
        check_schedule(schedule)


def test_a_valid_schedule_passes():
    check_schedule(parsed("0F0 0B0 0U1", "1F0 1I0 1W0 1U1"))
    check_schedule(parsed("0F0 0SF0 0RB0 0B0 0U1", "1RF0 1F0 1B0 1SB0 1U1"))


def test_a_deadlock_reports_what_every_rank_waits_for():
    schedule = parsed("0F0 0B0 0F1 0B1 0U1", "1F0 1F1 1B0 1B1 1U1", microbatches=2)
    assert fault_messages(schedule) == [
        "deadlock: rank 0 at position 1 (0B0) waits for 1B0 (rank 1, position 2); "
        "rank 1 at position 1 (1F1) waits for 0F1 (rank 0, position 2)"
    ]


def test_a_receive_blocks():
    """No compute waits in a circle here, but each rank asks for a message before it makes what the other asks for."""
    schedule = parsed(
        "0F0 0SF0 0RB0 0F1 0SF1 0RB1 0B0 0B1 0U1", "1RF0 1F0 1RF1 1B0 1SB0 1F1 1B1 1SB1 1U1", microbatches=2
    )
    assert fault_messages(schedule) == [
        "deadlock: rank 0 at position 2 (0RB0) waits for 1SB0 (rank 1, position 4); "
        "rank 1 at position 2 (1RF1) waits for 0SF1 (rank 0, position 4)"
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("0F0 0B0 0W0 0U1", "0B0 is the whole backward, but one of its halves is there too"),
        ("0F0 0I0 0U1", "0I0 is there without 0W0"),
        ("0F0 0W0 0U1", "0W0 is there without 0I0"),
        ("0F0 0W0 0I0 0U1", "rank 0, position 1 (0W0): comes before 0I0 (position 2), which it needs"),
        ("0F0 0B0", "stage 0 has 1 gradients that no update uses"),
        ("0F0 0U1 0B0", "rank 0, position 1 (0U1): has no gradient since the update before"),
        ("0F0 0I0 0U1 0W0", "stage 0 has 1 gradients that no update uses"),
        ("0F0 0B0 0U2", "rank 0, position 2 (0U2): is not the next version (in force: 0, kept: none)"),
        ("0F0 0B0 0U1.1", "rank 0, position 2 (0U1.1): has a slice, and only microbatches have slices"),
        ("0F0 0B0 0U1@1", "rank 0, position 2 (0U1@1): has a version, and only F, B, I and W use weights"),
        ("0F0.1 0F0 0B0 0U1", "rank 0, position 0 (0F0.1): there is no slice 1 (0 to 0)"),
        ("0F0@1 0B0@1 0U1", "rank 0, position 0 (0F0@1): version 1 is not there (in force: 0, kept: none)"),
        ("0F0 0B0 0K1 0U1 0D1", "only a version in force can be kept, and once (in force: 0, kept: none)"),
        ("0F0 0B0 0K0 0U1", "stage 0 keeps versions to the end (0); drop them"),
        ("0F0 0B0 0D0 0U1", "only a version that is kept can be dropped (in force: 0, kept: none)"),
    ],
)  # fmt: skip
def test_faults_of_one_stage(text, fault):
    assert fault in "\n".join(fault_messages(parsed(text)))


def test_one_update_in_a_synchronous_step():
    schedule = parsed("0F0 0B0 0U1 0F1 0B1 0U2", microbatches=2)
    assert fault_messages(schedule) == ["stage 0 has 2 updates; a synchronous step has one"]
    assert fault_messages(parsed("0F0@0 0B0@0 0U1 0F1@1 0B1@1 0U2", microbatches=2)) == []


def test_backward_uses_the_weights_of_its_forward():
    schedule = parsed("0F0@0 0F1@0 0B0@0 0U1 0B1@1 0U2", microbatches=2)
    assert fault_messages(schedule) == ["rank 0, position 4 (0B1@1): uses version 1, but its forward used 0"]
    schedule = parsed("0F0 0F1 0B0 0U1 0B1 0U2", microbatches=2)
    assert "rank 0, position 4 (0B1): uses version 1, but its forward used 0" in fault_messages(schedule)
    schedule = parsed("0F0@0 0F1@0 0B0@0 0U1 0B1@0 0U2", microbatches=2)
    assert fault_messages(schedule) == ["rank 0, position 4 (0B1@0): version 0 is not there (in force: 1, kept: none)"]
    assert fault_messages(parsed("0F0@0 0F1@0 0B0@0 0K0 0U1 0B1@0 0D0 0U2", microbatches=2)) == []


def test_slices_wait_for_each_other():
    assert fault_messages(parsed("0F0 0F0.1 0B0.1 0B0 0U1", slices=2)) == []
    wrong = fault_messages(parsed("0F0.1 0F0 0B0 0B0.1 0U1", slices=2))
    assert wrong == [
        "rank 0, position 0 (0F0.1): comes before 0F0 (position 1), which it needs",
        "rank 0, position 2 (0B0): comes before 0B0.1 (position 3), which it needs",
    ]


@pytest.mark.parametrize(
    ("first", "second", "fault"),
    [
        ("0F0 0RB0 0B0 0U1", "1RF0 1F0 1B0 1SB0 1U1", "the output of 0F0 is not sent"),
        ("0F0 0SF0 0RB0 0B0 0U1", "1F0 1B0 1SB0 1U1", "the output of 1F0 is not received"),
        ("0F0 0SF0 0RB0 0B0 0U1", "1RF0 1F0 1B0 1U1", "the gradient of 1B0 is not sent"),
        ("0F0 0SF0 0SB0 0RB0 0B0 0U1", "1RF0 1F0 1B0 1SB0 1U1", "0SB0 has no gradient to be sent"),
        ("0F0 0SF0 0SF0 0RB0 0B0 0U1", "1RF0 1F0 1B0 1SB0 1U1", "rank 0, position 2 (0SF0): is there twice"),
        ("0SF0 0F0 0RB0 0B0 0U1", "1RF0 1F0 1B0 1SB0 1U1", "rank 0, position 0 (0SF0): comes before 0F0 (position 1)"),
    ],
)  # fmt: skip
def test_faults_of_transfers(first, second, fault):
    assert fault in "\n".join(fault_messages(parsed(first, second)))


def test_transfers_in_different_order_on_both_ends():
    one = "0F0 0SF0 0F1 0SF1 0RB0 0B0 0RB1 0B1 0U1"
    other = "1RF1 1RF0 1F0 1B0 1SB0 1F1 1B1 1SB1 1U1"
    assert fault_messages(parsed(one, other, microbatches=2)) == [
        "1RF1 is received where 0SF0 was sent; both ends of a channel need one order"
    ]


def test_a_stage_without_a_rank():
    assert "stage 1 is on rank 5, which has no list" in fault_messages(parsed("0F0 0B0 0U1", homes=(0, 5)))


def test_a_stream_that_does_not_drain():
    window = make_schedule("pipedream", 3, 4, drain=False)
    assert fault_messages(window, drained=False) == []
    check_schedule(window, drained=False)
    # The second stage would run ahead of the backward that it needs.
    ahead = changed(window, 1, [*window.rank_actions[1], Action(1, ActionKind.BACKWARD, 3, version=2)])
    cut = changed(ahead, 2, window.rank_actions[2][:-2])
    assert fault_messages(cut, drained=False) == [
        f"rank 1, position {len(window.rank_actions[1])} (1B3@2): comes before the backward that it needs"
    ]
