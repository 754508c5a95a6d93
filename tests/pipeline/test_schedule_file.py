"""Schedules that users wrote."""

import pytest
from hypothesis import given, settings
from shapes import schedules

from echelon.config.run_config import Config
from echelon.layout import Layout, ValidationError
from echelon.pipeline.lower import lower
from echelon.pipeline.schedules import make_schedule, schedule_file_error
from echelon.pipeline.schedules.schedule_file import parse_schedule
from echelon.verification.verify_request import VerifyRequest

BY_HAND = """
# 1F1B, 2 ranks, 2 microbatches
rank 0, stages 0: 0F0 0F1 0B0 0B1 0U1   # the first one

rank 1, stages 1: 1F0 1B0 1F1 1B1 1U1
"""


def same(one, other):
    return (one.rank_of_stage, one.microbatches, one.slices, one.rank_actions) == (
        *(other.rank_of_stage, other.microbatches, other.slices),
        other.rank_actions,
    )


@settings(deadline=None)
@given(schedules())
def test_built_in_schedules_round_trip(schedule):
    assert same(parse_schedule(str(schedule)), schedule)
    assert same(parse_schedule(str(lower(schedule))), lower(schedule))


def test_a_file(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(BY_HAND, encoding="utf-8")
    schedule = make_schedule(f"file:{path}", 2, 2)
    assert schedule.rank_actions == make_schedule("1f1b", 2, 2).rank_actions
    assert schedule.name == f"file:{path}"
    assert make_schedule(f"file:{path}", 2, 2, chunks=1) == schedule


def test_a_file_fixes_the_sizes(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(BY_HAND, encoding="utf-8")
    with pytest.raises(ValueError, match="2 faults") as caught:
        make_schedule(f"file:{path}", 4, 8)
    assert str(caught.value).splitlines()[1:] == [
        "  it has 2 ranks, but 4 are asked for",
        "  it has 2 microbatches, but 8 are asked for",
    ]
    with pytest.raises(ValueError, match="it has 2 stages, but 4 are asked for"):
        make_schedule(f"file:{path}", 2, 2, chunks=2)
    with pytest.raises(ValueError, match="it has 1 slices, but 3 are asked for"):
        make_schedule(f"file:{path}", 2, 2, slices=3)


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.txt cannot be read \(no such file.*\); give a text file"):
        make_schedule(f"file:{tmp_path / 'nothing.txt'}", 2, 2)


def test_all_syntax_errors_are_reported_with_their_lines():
    text = "rank 0, stages 0: 0F0 0X0 F\n\nrnk 1: 1F0\nrank 0, stages 1: 1F0\n"
    with pytest.raises(ValueError, match="4 faults") as caught:
        parse_schedule(text)
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
def test_schedule_faults_are_reported(text, fault):
    with pytest.raises(ValueError, match=fault):
        parse_schedule(text)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("rank 0, stages 0: 0F0 0B0 0F30000000 0U1", "0F1 is missing"),
        ("rank 0, stages 0: 0F0 0B0 0F0.30000000 0U1", "0F0.1 is missing"),
        ("rank 0, stages 30000000: 0F0", "stage 0 is on no rank"),
        ("rank 30000000, stages 0: 0F0", "rank 0 has no line"),
        (f"rank {'9' * 5000}, stages 0: 0F0", "is not rank, stages and actions"),
    ],
)
def test_very_large_numbers_are_rejected_at_once(text, fault):
    with pytest.raises(ValueError, match=fault) as caught:
        parse_schedule(text)
    assert len(str(caught.value)) < 5000


def two_ranks(tmp_path, pattern):
    """A file with the same list on both ranks, S for the stage."""
    path = tmp_path / "mine.txt"
    path.write_text("".join(f"rank {s}, stages {s}: {pattern.replace('S', str(s))}\n" for s in range(2)))
    return path


@pytest.mark.parametrize(
    ("pattern", "microbatches", "why"),
    [
        ("SF0@0 SB0@0 SU1 SF1@1 SB1@1 SU2", 2, "it has weight versions (K, D, @)"),
        ("SF0@0 SB0@0 SU1 SF1@1 SB1@1 SU2", 2, "updates more than once (stage 0)"),
        ("SK0 SF0 SB0 SU1 SD0", 1, "it has weight versions (K, D, @)"),
        ("SF0 SF0.1 SB0.1 SB0 SU1", 1, "cuts microbatches into slices (2)"),
    ],
)
def test_schedules_that_can_be_drawn_but_not_run(tmp_path, pattern, microbatches, why):
    path = two_ranks(tmp_path, pattern)
    make_schedule(f"file:{path}", 2, microbatches, slices=2 if ".1" in pattern else 1)
    fault = schedule_file_error(Layout.parse(f"pp=2,schedule=file:{path},accumulate={microbatches}"))
    assert why in fault
    assert "draw it, or choose pipedream, 2bw or terapipe" in fault


def test_a_files_stages_are_those_of_the_layout(tmp_path):
    """llama-tiny has four layers."""
    path = tmp_path / "six.txt"
    path.write_text(str(make_schedule("interleaved", 2, 2, chunks=3)))
    layout = f"dp=1,pp=2,schedule=file:{path},accumulate=2"
    with pytest.raises(ValidationError, match=r"its 6 stages leave some without a layer \(the model has 4\)"):
        Config.load(None, [f"layout={layout}"])
    path.write_text(str(make_schedule("1f1b", 2, 2)))
    with pytest.raises(ValidationError, match="it has 2 stages, but 4 are asked for"):
        Config.load(None, [f"layout={layout},vpp=2"])
    path.write_text(str(make_schedule("interleaved", 2, 2)))
    with pytest.raises(ValidationError, match=r"to 4 stages; legal: 4 numbers"):
        Config.load(None, [f"layout={layout}", "pipeline.layers=[2, 2]"])
    Config.load(None, [f"layout={layout}", "pipeline.layers=[1, 1, 1, 1]"])


def test_a_missing_file_is_reported_with_the_other_issues(tmp_path):
    with pytest.raises(ValidationError) as caught:
        VerifyRequest(layouts=f"pp=2,schedule=file:{tmp_path}/nothing.txt; tp=3").resolve()
    assert [fault.key for fault in caught.value.issues] == ["tp", "schedule"]
