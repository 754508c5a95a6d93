"""Every schedule: valid, with the bubble and the activations in flight that its formulas say."""

import importlib
import time
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import ASYNCHRONOUS, shapes, streams, windows

from echelon.layout import Layout
from echelon.layout.grammar import KEYS_BY_NAME
from echelon.layout.layout import ASYNC_SCHEDULES, MULTI_CHUNK_SCHEDULES, SPLIT_BACKWARD_SCHEDULES
from echelon.pipeline.actions import COMPUTE, ActionKind
from echelon.pipeline.lower import lower
from echelon.pipeline.schedules import FAMILIES, make_schedule, two_bw, weight_versions
from echelon.pipeline.schedules.bubble_time import DUALPIPE_V, INTERLEAVED, ZB_H1, ZB_V, bubble_times
from echelon.pipeline.simulate import Durations, simulate
from echelon.pipeline.validate import fault_messages, join_windows

SYNCHRONOUS = tuple(name for name in FAMILIES if name not in ASYNCHRONOUS)


def bubble_of(schedule):
    """With F = I = W = 1, as an exact fraction: all times are whole."""
    timeline = simulate(schedule)
    busy = sum(Fraction(timeline.busy(rank)) for rank in range(schedule.ranks))
    return 1 - busy / (schedule.ranks * Fraction(timeline.duration))


def formula(family, which, sizes):
    more = {"slices": sizes["slices"]} if family.has_slices else {}
    return getattr(family, which)(sizes["ranks"], sizes["chunks"], sizes["microbatches"], **more)


def test_the_registry_has_the_names_of_the_layout():
    assert tuple(FAMILIES) == KEYS_BY_NAME["schedule"].syntax.words
    for name, family in FAMILIES.items():
        assert family.name == name
        chunks = family.chunks or 2
        schedule = make_schedule(name, 2, 4)
        assert (schedule.name, schedule.stages) == (name, 2 * chunks)
        kinds = {action.kind for actions in schedule.rank_actions for action in actions}
        assert (ActionKind.WEIGHT_GRAD in kinds) == family.splits_backward
        assert (sum(action.kind is ActionKind.UPDATE for action in schedule.rank_actions[0]) > chunks) == (
            family.asynchronous and name != "2bw"
        )


@settings(deadline=None, max_examples=250)
@given(shapes())
def test_every_schedule_is_valid(shape):
    family, sizes = shape
    schedule = make_schedule(family.name, **sizes)
    assert fault_messages(schedule) == []
    assert fault_messages(lower(schedule)) == []
    assert simulate(schedule).in_flight == formula(family, "in_flight", sizes)


@settings(deadline=None, max_examples=250)
@given(shapes())
def test_the_bubble_is_that_of_the_formula(shape):
    family, sizes = shape
    schedule = make_schedule(family.name, **sizes)
    expected = formula(family, "bubble", sizes)
    ranks, microbatches = sizes["ranks"], sizes["microbatches"]
    if expected is None:
        assert family.name == "interleaved"
        assert microbatches > ranks
        assert microbatches % ranks
        # Leaving microbatches out cannot make a step longer.
        whole = make_schedule(family.name, ranks, -(-microbatches // ranks) * ranks, chunks=sizes["chunks"])
        assert simulate(schedule).duration < simulate(whole).duration
    else:
        assert bubble_of(schedule) == bubble_of(lower(schedule)) == expected


@settings(deadline=None, max_examples=120)
@given(
    st.sampled_from(["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"]),
    st.integers(2, 8),
    st.integers(1, 24),
    st.integers(0, 8),
    st.integers(0, 16),
)
def test_formulas_of_the_planner_are_the_simulated_waiting_times(name, ranks, microbatches, forward, input_grad):
    """With weight gradients of 8, forwards of 8 to 16 and input gradients of up to 32, in eighths.

    The formula of dualpipe-v lacked up to a forward between d and 2d microbatches, and as much as (d - 2) forwards of a
    chunk with more; that of zb-v up to 3 % of a step.
    """
    index = {"1f1b": INTERLEAVED, "interleaved": INTERLEAVED, "zb-h1": ZB_H1, "zb-v": ZB_V, "dualpipe-v": DUALPIPE_V}
    chunks = FAMILIES[name].chunks or 2
    if name == "interleaved":
        microbatches = -(-microbatches // ranks) * ranks
    f, i, w = 8 + forward, 8 + forward + input_grad, 8
    seconds = Durations(forward=f / chunks, input_grad=i / chunks, weight_grad=w / chunks)
    waiting = simulate(make_schedule(name, ranks, microbatches), seconds).duration - microbatches * (f + i + w)
    assert bubble_times(ranks, microbatches, chunks, f, f + i + w, w)[index[name]] == waiting


def test_a_rank_does_one_thing_at_a_time():
    """Also under dualpipe-v, whose paper overlaps the two of a pair: nothing here runs, draws or prices them so."""
    for name in FAMILIES:
        schedule = make_schedule(name, 4, 10)
        timeline = simulate(schedule)
        for rank, actions in enumerate(schedule.rank_actions):
            spans = list(timeline.spans(rank))
            assert [span.action for span in spans] == list(actions)
            assert all(first.end <= second.start for first, second in pairwise(spans))


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 40), st.integers(2, 5))
def test_published_bubbles(ranks, microbatches, chunks):
    d, m, v = ranks, microbatches, chunks
    said = {
        name: family.bubble(d, v if family.chunks is None else family.chunks, m) for name, family in FAMILIES.items()
    }
    assert said["naive"] == 1 - Fraction(1, d)
    assert said["gpipe"] == said["1f1b"] == Fraction(d - 1, m + d - 1)
    if m % d == 0:
        assert said["interleaved"] == Fraction(d - 1, v * m + d - 1)
    if m >= d:
        assert said["zb-h1"] == Fraction(d - 1, 3 * m + d - 1)
    if m >= 2 * d - 1:
        assert said["zb-v"] == Fraction(d - 1, 6 * m + d - 1)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 30))
def test_published_memory(ranks, microbatches):
    one = max(simulate(make_schedule("1f1b", ranks, microbatches)).in_flight)
    assert one == min(ranks, microbatches)
    assert max(simulate(make_schedule("zb-h1", ranks, microbatches)).in_flight) == one
    assert max(simulate(make_schedule("zb-v", ranks, microbatches)).in_flight) <= 2 * one  # of half the size
    assert max(simulate(make_schedule("dualpipe-v", ranks, microbatches)).in_flight) <= 2 * ranks + 1


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_no_rank_of_zb_v_waits_in_between(ranks):
    timeline = simulate(make_schedule("zb-v", ranks, 2 * ranks))
    for rank in range(ranks):
        spans = [span for span in timeline.spans(rank) if span.action.kind in COMPUTE]
        assert spans[-1].end - spans[0].start == timeline.busy(rank)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 6))
def test_the_naive_split_keeps_one_rank_busy(ranks, microbatches):
    timeline = simulate(make_schedule("naive", ranks, microbatches))
    spans = [span for rank in range(ranks) for span in timeline.spans(rank) if span.action.kind in COMPUTE]
    spans.sort(key=lambda span: span.start)
    assert all(one.end <= other.start for one, other in pairwise(spans))


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "written"),
    [
        *[("interleaved", 4, 5, 8), ("interleaved", 4, 8, 8), ("zb-v", 4, 6, 7), ("zb-v", 4, 7, 7)],
        *[("dualpipe-v", 4, 7, 8), ("dualpipe-v", 4, 8, 8), ("1f1b", 4, 1, 1)],
    ],
)
def test_a_fallback_is_noted(name, ranks, microbatches, written):
    note = make_schedule(name, ranks, microbatches).note
    assert (f"the schedule for {written} with {written - microbatches} left out" in note) == (written > microbatches)
    assert bool(note) == (written > microbatches)


@settings(deadline=None)
@given(streams(), st.booleans())
def test_windows_are_one_stream(stream, drain):
    name, ranks, sizes = stream
    more = {"microbatches_per_update": sizes[0]} if name == "2bw" else {}
    long = FAMILIES[name].build(ranks, 1, sum(sizes), drain=drain, **more)
    whole = join_windows(windows(name, ranks, sizes, drain=drain))
    assert whole.rank_actions == long.rank_actions
    assert whole.microbatches == sum(sizes)
    assert fault_messages(whole, drained=drain) == []
    lowered = join_windows([lower(window) for window in windows(name, ranks, sizes, drain=drain)])
    assert fault_messages(lowered, drained=drain) == []


@settings(deadline=None)
@given(streams())
def test_the_versions_are_those_of_the_papers(stream):
    name, ranks, sizes = stream
    for actions in join_windows(windows(name, ranks, sizes)).rank_actions:
        for stage, kind, m, _, version in actions:
            if kind in COMPUTE:
                batch = m // sizes[0]
                rules = {"pipedream": m - (ranks - 1 - stage), "pipedream-vsync": m - ranks + 1, "2bw": batch - 1}
                assert version == max(0, rules[name])


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(2, 4))
def test_weight_versions_held(ranks, batch, batches):
    many = 2 * ranks + batch * batches
    assert simulate(make_schedule("pipedream", ranks, many)).weight_versions == tuple(
        ranks - stage for stage in range(ranks)
    )
    assert simulate(make_schedule("pipedream-vsync", ranks, many)).weight_versions == (ranks,) * ranks
    assert (
        simulate(two_bw.build(ranks, 1, batch * batches, microbatches_per_update=batch)).weight_versions == (2,) * ranks
    )
    assert simulate(make_schedule("1f1b", ranks, many)).weight_versions == (1,) * ranks


def most_versions(schedule: str, ranks: int, microbatches: int) -> list[int]:
    """The most versions at once on every rank, by its K and D in a long stream of windows of `microbatches`."""
    stream = join_windows(windows(schedule, ranks, [microbatches] * (4 * ranks + 2)))
    most = []
    for actions in stream.rank_actions:
        stashed, counts = set(), [1]
        for action in actions:
            if action.kind is ActionKind.STASH:
                stashed.add(action.index)
            elif action.kind is ActionKind.DROP_STASHED:
                stashed.remove(action.index)
            elif action.kind is ActionKind.UPDATE:
                counts.append(len(stashed | {action.index}))
        most.append(max(counts))
    return most


@pytest.mark.parametrize("schedule", ASYNC_SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 16])
def test_a_family_counts_the_weight_versions_of_its_actions(schedule, ranks):
    """Eight stages and one microbatch per step hold 8 versions of pipedream; the count once ended too early, at 4."""
    for microbatches in (1, 2, 3, ranks, 2 * ranks):
        layout = Layout.parse(f"pp={ranks},accumulate={microbatches},schedule={schedule}")
        assert list(weight_versions(layout)) == most_versions(schedule, ranks, microbatches)
    assert weight_versions(Layout.parse(f"pp={ranks},accumulate=4")) == (1,) * ranks


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))
def test_short_batches_of_2bw(ranks, batch, batches):
    """Fewer microbatches per batch than ranks - 1: stages hold back until the weights of the rule are there."""
    run = two_bw.build(ranks, 1, batch * batches, microbatches_per_update=batch)
    assert fault_messages(run) == fault_messages(lower(run)) == []
    assert simulate(run).in_flight == two_bw.in_flight(ranks, 1, batch * batches, microbatches_per_update=batch)
    assert bool(run.note) == (batch < ranks - 1)
    expected = two_bw.bubble(ranks, 1, batch * batches, microbatches_per_update=batch)
    assert (expected is None) == (batch < ranks - 1 and batches > 1)
    assert expected is None or bubble_of(run) == expected


def test_2bw_ends_with_a_batch():
    with pytest.raises(
        ValueError, match=r"ends inside a batch \(microbatch 7, batches of 4\); end it at a multiple of 4"
    ):
        two_bw.build(2, 1, 7, microbatches_per_update=4)


def test_slices_go_forward_in_order_and_backward_in_reverse():
    schedule = make_schedule("terapipe", 1, 2, slices=2)
    assert str(schedule) == "rank 0, stages 0: 0F0 0F0.1 0F1 0F1.1 0B0.1 0B0 0B1.1 0B1 0U1\n"
    assert schedule.slices == 2
    assert make_schedule("terapipe", 3, 4).rank_actions == make_schedule("gpipe", 3, 4).rank_actions


DRAWINGS = [
    *[("naive", "naive", 3, 2, {}), ("gpipe", "gpipe", 3, 4, {}), ("one_f_one_b", "1f1b", 3, 4, {})],
    *[("interleaved", "interleaved", 2, 4, {}), ("zb_h1", "zb-h1", 3, 4, {}), ("zb_v", "zb-v", 2, 4, {})],
    *[("dualpipe_v", "dualpipe-v", 2, 5, {}), ("pipedream", "pipedream", 3, 4, {})],
    ("terapipe", "terapipe", 3, 1, {"slices": 4}),
]


@pytest.mark.parametrize(("file", "name", "ranks", "microbatches", "more"), DRAWINGS, ids=[row[0] for row in DRAWINGS])
def test_the_drawings_of_docstrings_are_true(file, name, ranks, microbatches, more):
    schedule = make_schedule(name, ranks, microbatches, **more)
    timeline = simulate(schedule)
    rows = [["."] * round(timeline.duration) for _ in range(schedule.stages)]
    for rank in range(ranks):
        for action, start, end in timeline.spans(rank):
            number = action.index * schedule.slices + action.slice_index
            letter = str(number) if action.kind is ActionKind.FORWARD else "abcdefgh"[number % 8]
            letter = letter.upper() if action.kind is ActionKind.WEIGHT_GRAD else letter
            rows[action.stage][round(start) : round(end)] = letter * round(end - start)
    doc = importlib.import_module(f"echelon.pipeline.schedules.{file}").__doc__
    for stage, row in enumerate(rows):
        label = f"rank {schedule.rank_of_stage[stage]}" + (f", stage {stage}" if schedule.stages > ranks else "")
        assert f"    {label}  {''.join(row)}\n" in doc


@pytest.mark.parametrize("file", ["pipedream", "pipedream_vsync", "two_bw"])
def test_the_actions_in_docstrings_are_true(file):
    module = importlib.import_module(f"echelon.pipeline.schedules.{file}")
    schedule = module.build(3, 1, 4, **({"microbatches_per_update": 2} if file == "two_bw" else {}))
    assert f"    {' '.join(map(str, schedule.rank_actions[1]))}\n" in module.__doc__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpip", 2, 2), r"unknown schedule \('gpip'\); choose one of naive, .*, file:PATH; did you mean \"gpipe\"\?"),
        (("1F1B", 2, 2), 'did you mean "1f1b"'),
        (("xyz", 2, 2), r"file:PATH$"),
        (("1f1b", 0, 2), r"ranks is too small \(ranks=0\); give 1 or more"),
        (("1f1b", 2, 0), r"microbatches is too small \(microbatches=0\); give 1 or more"),
    ],
)
def test_wrong_names_and_sizes(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(*arguments)


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("1f1b", {"chunks": 2}, r"chunks per rank \(chunks=2\); give 1, or choose interleaved"),
        ("zb-v", {"chunks": 1}, r"chunks per rank \(chunks=1\); give 2$"),
        ("interleaved", {"chunks": 1}, r"too few chunks for interleaved \(chunks=1\); give 2 or more, or choose 1f1b"),
        ("1f1b", {"slices": 2}, r"1f1b has no slices \(slices=2\); give 1, or choose terapipe"),
        ("terapipe", {"slices": 0}, r"slices is too small \(slices=0\); give 1 or more"),
        ("pipedream", {"first_microbatch": -1}, r"first is too small \(first=-1\); give 0 or more"),
        ("gpipe", {"chunks": -1}, r"chunks is too small \(chunks=-1\); give 0 or more"),
    ],
)
def test_unsupported_options_are_rejected(name, more, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(name, 2, 2, **more)


def test_all_errors_are_reported_at_once():
    with pytest.raises(ValueError, match=r"ranks") as caught:
        make_schedule("dualpipe", 0, 0, chunks=-1)
    assert len(str(caught.value).splitlines()) == 4
    assert 'did you mean "dualpipe-v"?' in str(caught.value)


def test_a_large_schedule_takes_seconds():
    start = time.process_time()
    assert fault_messages(lower(make_schedule("1f1b", 64, 512))) == []
    assert time.process_time() - start < 10  # about two on an idle machine


def test_the_layout_groups_schedules_as_their_families_do() -> None:
    """The layout's tuples repeat properties of the families, since the layout imports no other package."""
    families = FAMILIES.values()
    assert {family.name for family in families if family.chunks != 1} == set(MULTI_CHUNK_SCHEDULES)
    assert {family.name for family in families if family.splits_backward} == set(SPLIT_BACKWARD_SCHEDULES)
    assert {family.name for family in families if family.asynchronous} == set(ASYNC_SCHEDULES)
