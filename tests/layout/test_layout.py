"""Layout: derived defaults, text form, diff, and that every key of the grammar can be run."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.layout import Layout, ValidationError
from echelon.layout.grammar import KEYS_BY_NAME
from echelon.layout.rules import find_issues

DEGREES = st.integers(1, 64)
SCHEDULES = "naive gpipe 1f1b interleaved zb-h1 zb-v dualpipe-v pipedream pipedream-vsync 2bw terapipe file:a/b.txt"


@st.composite
def layouts(draw):
    """Any complete layout, also ones that break rules: text and rules are separate things."""
    words = {
        "tp_kind": "1d 2d 2.5d 3d",
        "cp_kind": "ring ulysses gather ring-ulysses",
        "schedule": SCHEDULES,
        "recompute": "none full selective ops sqrt every:3 budget:2.5GiB",
        "offload": "none optimizer params+disk optimizer+params+activations+disk",
    }
    degrees = ["dp", "shard", "tp", "depth", "cp", "ulysses", "pp", "vpp", "ep", "etp", "microbatch", "accumulate"]
    values = {name: st.sampled_from(choices.split()) for name, choices in words.items()}
    values |= dict.fromkeys(degrees, DEGREES)
    values |= {"zero": st.integers(0, 3), "sp": st.integers(0, 1)}
    return Layout(**draw(st.fixed_dictionaries({}, optional=values)))


@settings(deadline=None)
@given(layouts())
def test_round_trip(layout):
    assert Layout.parse(str(layout)) == layout
    assert Layout.parse(str(layout), world=layout.world, batch=layout.batch) == layout
    assert str(Layout.parse(str(layout))) == str(layout)
    assert str(layout).startswith(f"dp={layout.dp}")


@settings(deadline=None)
@given(layouts(), layouts())
def test_diff_is_empty_only_for_equal_layouts_and_replace_without_changes_changes_nothing(one, other):
    assert (one.diff(other) == "") == (one == other)
    assert one.replace() == one


@settings(deadline=None)
@given(st.lists(layouts(), min_size=1, max_size=4))
def test_many_round_trip(many):
    assert Layout.parse_many("; ".join(map(str, many))) == many


@pytest.mark.parametrize(
    ("text", "world", "batch", "expected"),
    [
        ("", None, None, "dp=1"),
        ("  ", 6, None, "dp=6"),
        ("tp=2", 8, None, "dp=4,tp=2"),
        ("tp=2,pp=2,cp=2", 8, None, "dp=1,tp=2,cp=2,pp=2"),
        ("", 4, 24, "dp=4,microbatch=6"),
        ("accumulate=3", 4, 24, "dp=4,microbatch=2,accumulate=3"),
        ("microbatch=3", 4, 24, "dp=4,microbatch=3,accumulate=2"),
        ("microbatch=1", 4, 24, "dp=4,accumulate=6"),
        ("dp=2,microbatch=3,accumulate=4", None, 24, "dp=2,microbatch=3,accumulate=4"),
        (" tp = 2 , zero = 1 ", 4, None, "dp=2,zero=1,tp=2"),
        ("zero=1,pp=2", None, None, "dp=1,pp=2"),
        ("zero=0,pp=2", None, None, "dp=1,zero=0,pp=2"),
        ("shard=4", 4, None, "dp=4"),
        ("sp=1,tp=2", None, None, "dp=1,tp=2"),
        ("vpp=2,schedule=zb-v,pp=2", None, None, "dp=1,pp=2,schedule=zb-v"),
    ],
)
def test_the_text_form_is_short_and_canonical(text, world, batch, expected):
    assert str(Layout.parse(text, world=world, batch=batch)) == expected


def test_a_layout_is_always_complete():
    layout = Layout(dp=4, tp=2, cp=2, cp_kind="ulysses", pp=2, schedule="interleaved")
    assert (layout.zero, layout.shard, layout.sp, layout.ulysses, layout.vpp) == (1, 4, 1, 2, 2)
    assert (layout.world, layout.batch) == (32, 4)
    single = Layout()
    assert (single.zero, single.shard, single.sp, single.ulysses, single.vpp) == (0, 1, 0, 1, 1)


def test_replace_derives_keys_again_and_keeps_the_given_ones():
    assert Layout(dp=4).replace(dp=2, tp=2) == Layout(dp=2, tp=2)
    assert Layout(dp=4).replace(dp=2).shard == 2
    assert Layout(dp=4, shard=2).replace(dp=8).shard == 2


def test_diff():
    assert Layout(dp=4).diff(Layout(dp=2, tp=2)) == "dp 4 -> 2, shard 4 -> 2, tp 1 -> 2, sp 0 -> 1"


@pytest.mark.parametrize("values", [{"dp": 0}, {"zero": 4}, {"tp_kind": "4d"}, {"sp": True}, {"offload": "cpu"}])
def test_a_layout_cannot_hold_an_illegal_value(values):
    with pytest.raises(ValidationError) as caught:
        Layout(**values)
    assert [fault.key for fault in caught.value.issues] == list(values)


def test_parse_refuses_a_world_or_a_batch_that_it_cannot_fill():
    with pytest.raises(ValidationError) as caught:
        Layout.parse("tp=4", world=6, batch=7)
    assert [fault.key for fault in caught.value.issues] == ["tp"]
    with pytest.raises(ValidationError) as caught:
        Layout.parse("dp=4", world=6, batch=10)
    assert [fault.key for fault in caught.value.issues] == ["dp", "batch"]


def test_parse_many_reports_the_issues_of_all_and_where():
    assert Layout.parse_many("") == [Layout()]
    assert Layout.parse_many("dp=2; tp=2,zero=1;") == [Layout(dp=2), Layout(tp=2, zero=1)]
    with pytest.raises(ValidationError) as caught:
        Layout.parse_many("dp=x; tp=2; sched=gpipe")
    first, second = caught.value.issues
    assert (first.key, second.key) == ("dp", "sched")
    assert 'in "dp=x"' in first.hint
    assert "did you mean" in second.hint


@pytest.mark.parametrize(
    "text",
    [
        "",
        "dp=4,zero=3,shard=2",
        "dp=2,tp=4,sp=0,zero=2",
        "tp=2,microbatch=2,accumulate=4,recompute=full",
        "pp=4,schedule=zb-v",
        "pp=2,schedule=file:own.txt",
        "cp=4,cp_kind=ring-ulysses,ulysses=2",
        "tp=8,tp_kind=2.5d,depth=2",
        "dp=4,ep=2,etp=2",
        "recompute=selective",
        "recompute=budget:1.5GiB",
        "offload=optimizer+disk",
    ],
)
def test_layouts_that_can_be_run(text):
    assert find_issues(Layout.parse(text)) == []


def test_every_schedule_of_the_grammar_can_be_run():
    for schedule in KEYS_BY_NAME["schedule"].syntax.words:
        assert find_issues(Layout.parse(f"dp=1,pp=2,zero=1,sp=0,schedule={schedule}")) == []


def test_layout_imports_no_torch():
    code = "import sys, echelon.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
