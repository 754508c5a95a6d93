"""Actions and schedules as data with a text of their own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.pipeline.actions import COMPUTE, LATEST, RECEIVES, SENDS, VERSIONS, Action, ActionKind
from echelon.pipeline.schedule import Schedule, looped_placement, v_placement

numbers = st.integers(0, 10**6)
actions = st.builds(Action, numbers, st.sampled_from(ActionKind), numbers, numbers, st.integers(LATEST, 10**6))


@given(actions)
def test_text_and_back(action):
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(2, ActionKind.FORWARD, 0)),
        ("2F0.1", Action(2, ActionKind.FORWARD, 0, slice_index=1)),
        ("2F5@3", Action(2, ActionKind.FORWARD, 5, version=3)),
        ("12SB34", Action(12, ActionKind.SEND_BACKWARD, 34)),
        ("0RF7.2", Action(0, ActionKind.RECEIVE_FORWARD, 7, slice_index=2)),
        ("2U4", Action(2, ActionKind.UPDATE, 4)),
    ],
)
def test_texts(text, action):
    assert Action.parse(text) == action
    assert str(action) == text


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2F-1", "2 F 0", "2f0", "2F0@", "2F0.", "2F0@1.2", "2FB0"])
def test_invalid_actions_are_rejected(text):
    with pytest.raises(ValueError, match="is not an action; write stage, kind and microbatch as in 2F0"):
        Action.parse(text)


def test_every_kind_is_in_one_set():
    sorts = (COMPUTE, SENDS, RECEIVES, VERSIONS)
    assert sum(len(sort) for sort in sorts) == len(frozenset().union(*sorts)) == len(ActionKind)


def test_stage_placement():
    assert looped_placement(4, 2) == (0, 1, 2, 3, 0, 1, 2, 3)
    assert v_placement(4) == (0, 1, 2, 3, 3, 2, 1, 0)


def test_a_schedule_as_text():
    lists = ((Action(0, ActionKind.FORWARD, 0), Action(3, ActionKind.FORWARD, 0)), (Action(1, ActionKind.FORWARD, 0),))
    schedule = Schedule(name="", rank_of_stage=v_placement(2), microbatches=1, rank_actions=lists)
    assert (schedule.ranks, schedule.stages, schedule.stages_on(1)) == (2, 4, (1, 2))
    assert str(schedule) == "rank 0, stages 0 3: 0F0 3F0\nrank 1, stages 1 2: 1F0\n"
