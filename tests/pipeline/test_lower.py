"""Messages: what is added, where it stands, and that both ends agree."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import schedules, streams, windows

from echelon.pipeline.actions import COMPUTE, RECEIVES, SENDS, Action, ActionKind
from echelon.pipeline.channels import incoming_channel, outgoing_channel, transfer_channel
from echelon.pipeline.lower import lower
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.schedules import make_schedule
from echelon.pipeline.validate import fault_messages


def without_messages(actions):
    return tuple(action for action in actions if action.kind not in SENDS and action.kind not in RECEIVES)


def ends(schedule, kinds):
    """The messages of every channel, in the order of one end."""
    found = {}
    for actions in schedule.rank_actions:
        for action in actions:
            if action.kind in kinds:
                found.setdefault(transfer_channel(action), []).append((action.index, action.slice_index))
    return found


@settings(deadline=None)
@given(schedules())
def test_lowering_only_adds_sends_and_receives(schedule):
    lowered = lower(schedule)
    assert replace(lowered, rank_actions=tuple(map(without_messages, lowered.rank_actions))) == schedule
    assert lower(lowered) == lowered


@settings(deadline=None)
@given(schedules())
def test_both_ends_of_a_channel_have_one_order(schedule):
    lowered = lower(schedule)
    assert ends(lowered, SENDS) == ends(lowered, RECEIVES)
    across = sum(one != other for one, other in pairwise(schedule.rank_of_stage))
    sends = sum(len(messages) for messages in ends(lowered, SENDS).values())
    assert sends == 2 * across * schedule.microbatches * schedule.slices


@settings(deadline=None)
@given(schedules())
def test_sends_follow_their_producer_and_receives_are_one_action_ahead(schedule):
    for actions in lower(schedule).rank_actions:
        for place, action in enumerate(actions):
            if action.kind in SENDS:
                assert outgoing_channel(schedule.rank_of_stage, actions[place - 1]) == transfer_channel(action)
            elif action.kind in RECEIVES:
                message = (action.index, action.slice_index)
                behind = [other for other in actions[place:] if other.kind in COMPUTE][:2]
                assert (transfer_channel(action), message) in [
                    (incoming_channel(schedule.rank_of_stage, other), (other.index, other.slice_index))
                    for other in behind
                ]


def test_by_hand():
    assert str(lower(make_schedule("1f1b", 2, 3))) == (
        "rank 0, stages 0: 0F0 0SF0 0F1 0SF1 0RB0 0B0 0RB1 0F2 0SF2 0B1 0RB2 0B2 0U1\n"
        "rank 1, stages 1: 1RF0 1F0 1RF1 1B0 1SB0 1F1 1B1 1SB1 1RF2 1F2 1B2 1SB2 1U1\n"
    )


def test_neighbours_on_one_rank_send_nothing():
    lists = lower(make_schedule("zb-v", 2, 3)).rank_actions
    texts = {str(action) for actions in lists for action in actions}
    assert {"0SF0", "1RF0", "2SF0", "3RF0", "3SB0", "2RB0"} <= texts
    assert not {"1SF0", "2RF0", "2SB0", "1RB0"} & texts
    assert lower(make_schedule("interleaved", 1, 3)) == make_schedule("interleaved", 1, 3)


def test_an_early_receive_hides_the_transfer():
    """In the steady state of 1F1B the gradient is on its way while the forward before it runs."""
    actions = [str(action) for action in lower(make_schedule("1f1b", 4, 16)).rank_actions[1]]
    assert actions.index("1RB8") < actions.index("1F10") < actions.index("1B8")


def test_transfers_used_in_another_order_are_received_in_send_order():
    """Rank 1 wants the second message first: it takes the first one with it, in the order of the sends."""

    def list_of(stage, text):
        return tuple(Action(stage, ActionKind(word[0]), int(word[1:])) for word in text.split())

    lists = (list_of(0, "F0 F1 B0 B1 U1"), list_of(1, "F1 F0 B0 B1 U1"))
    lowered = lower(Schedule(name="crossed", rank_of_stage=(0, 1), microbatches=2, rank_actions=lists))
    assert [str(action) for action in lowered.rank_actions[1]][:4] == ["1RF0", "1RF1", "1F1", "1F0"]
    assert fault_messages(lowered) == []


@settings(deadline=None)
@given(streams(), st.booleans())
def test_a_window_receives_what_the_one_before_sent(stream, drain):
    name, ranks, sizes = stream
    lowered = [lower(window) for window in windows(name, ranks, sizes, drain=drain)]
    sent, received = {}, {}
    for window in lowered:
        for found, kinds in ((sent, SENDS), (received, RECEIVES)):
            for channel, messages in ends(window, kinds).items():
                found.setdefault(channel, []).extend(messages)
    for channel, messages in received.items():
        assert messages == sent[channel][: len(messages)]
    if drain:
        assert sent == received


def test_schedules_that_deadlock_are_rejected():
    lists = ((Action(0, ActionKind.BACKWARD, 0), Action(0, ActionKind.FORWARD, 0)), (Action(1, ActionKind.FORWARD, 0),))
    with pytest.raises(ValueError, match="deadlocks"):
        lower(Schedule(name="wrong", rank_of_stage=(0, 1), microbatches=1, rank_actions=lists))
