"""Schedules that users wrote."""

import pytest
from hypothesis import given, settings
from shapes import schedules

from echelon.pipeline.lower import lower
from echelon.pipeline.schedules import make
from echelon.pipeline.schedules.from_file import parse

BY_HAND = """
# 1F1B, 2 ranks, 2 microbatches
rank 0, stages 0: 0F0 0F1 0B0 0B1 0U1   # the first one

rank 1, stages 1: 1F0 1B0 1F1 1B1 1U1
"""


def same(one, other):
    return (one.homes, one.microbatches, one.slices, one.lists) == (
        *(other.homes, other.microbatches, other.slices),
        other.lists,
    )


@settings(deadline=None)
@given(schedules())
def test_our_own_come_back(schedule):
    assert same(parse(str(schedule)), schedule)
    assert same(parse(str(lower(schedule))), lower(schedule))


def test_a_file(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(BY_HAND, encoding="utf-8")
    schedule = make(f"file:{path}", 2, 2)
    assert schedule.lists == make("1f1b", 2, 2).lists
    assert schedule.name == f"file:{path}"
    assert make(f"file:{path}", 2, 2, chunks=1) == schedule


def test_a_file_fixes_the_sizes(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(BY_HAND, encoding="utf-8")
    with pytest.raises(ValueError, match="2 faults") as caught:
        make(f"file:{path}", 4, 8)
    assert str(caught.value).splitlines()[1:] == [
        "  it has 2 ranks, but 4 are asked for",
        "  it has 2 microbatches, but 8 are asked for",
    ]
    with pytest.raises(ValueError, match="it has 2 stages, but 4 are asked for"):
        make(f"file:{path}", 2, 2, chunks=2)
    with pytest.raises(ValueError, match="it has 1 slices, but 3 are asked for"):
        make(f"file:{path}", 2, 2, slices=3)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"the schedule cannot be read \(.*nothing\.txt: .*\); give a text file"):
        make(f"file:{tmp_path / 'nothing.txt'}", 2, 2)


def test_all_faults_of_the_text_with_their_lines():
    text = "rank 0, stages 0: 0F0 0X0 F\n\nrnk 1: 1F0\nrank 0, stages 1: 1F0\n"
    with pytest.raises(ValueError, match="4 faults") as caught:
        parse(text)
    lines = str(caught.value).splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == ["line 1", "line 1", "line 3", "line 4"]
    assert "'0X0' is not an action" in lines[0]
    assert "rank 0 is on line 1 already" in lines[3]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("rank 1, stages 0: 0F0 0B0 0U1", "rank 0 has no line"),
        ("rank 0, stages 1: 1F0 1B0 1U1", "stage 0 is on no rank"),
        ("rank 0, stages 0: 0F0 0B0 0U1\nrank 1, stages 0: 0F0", "stage 0 is there 2 times"),
        ("# nothing", "rank 0 has no line"),
        ("rank 0, stages 0: 0F0 0B0", "stage 0 has 1 gradients that no update uses"),
        ("\nrank 0, stages 0: 0B0 0F0 0U1", r"line 2: rank 0, position 0 \(0B0\): comes before 0F0 \(position 1\)"),
    ],
)
def test_faults_of_the_lists(text, fault):
    with pytest.raises(ValueError, match=fault):
        parse(text)
