"""Pictures: nothing is cut off, nothing overlaps, nothing is fetched, and all eyes can tell the colours apart."""

import itertools
import json
import math
import re
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import schedules

from echelon.pipeline.actions import SENDS, ActionKind
from echelon.pipeline.draw import action_colours, as_html, as_svg, as_text, timeline_labels
from echelon.pipeline.lower import lower
from echelon.pipeline.schedules import make_schedule
from echelon.pipeline.simulate import Durations, simulate
from echelon.pipeline.timeline import Timeline

SVG = "{http://www.w3.org/2000/svg}"


def measured(schedule, durations):
    found = simulate(schedule, durations)
    return Timeline.from_spans(
        found.name, found.rank_of_stage, [list(found.spans(rank)) for rank in range(found.ranks)]
    )


@pytest.fixture(scope="module")
def both():
    schedule = make_schedule("zb-v", 4, 8)
    plan = Durations(forward=0.01, input_grad=0.011, weight_grad=0.009, update=0.02)
    real = Durations(forward=0.012, input_grad=0.012, weight_grad=0.009, update=0.02, send_forward=0.001)
    return simulate(schedule, plan), measured(lower(schedule), real)


# Colours


def linear(colour):
    shares = [part / 255 for part in action_colours.rgb(colour)]
    return [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]


EYES = {
    "usual": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "without green": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "without red": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "without blue": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
"""what is seen of linear red, green and blue"""


def seen(colour, eyes):
    """Lightness and hue on the scale where 1 is the smallest difference that people see (CIELAB)."""
    red, green, blue = (
        min(1, max(0, sum(one * other for one, other in zip(row, linear(colour), strict=True)))) for row in EYES[eyes]
    )
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    x, y, z = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("eyes", EYES)
def test_kinds_are_distinguishable_for_colour_blind_readers(eyes):
    shown = [*(look.colour for look in action_colours.ACTION_STYLES.values()), action_colours.IDLE_COLOUR]
    for one, other in itertools.combinations(shown, 2):
        assert math.dist(seen(one, eyes), seen(other, eyes)) > 18, (one, other)
    for kind in set(action_colours.ACTION_STYLES) - {ActionKind.UPDATE}:
        first, second = action_colours.cell_colour(kind, 0, 2), action_colours.cell_colour(kind, 1, 2)
        assert math.dist(seen(first, eyes), seen(second, eyes)) > 15
        assert math.dist(seen(second, eyes), seen(action_colours.IDLE_COLOUR, eyes)) > 10


def test_numbers_can_be_read_on_every_cell():
    def light(colour):
        return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True)) + 0.05

    for kind, chunk in itertools.product(action_colours.ACTION_STYLES, range(4)):
        back = action_colours.cell_colour(kind, chunk, 4)
        low, high = sorted((light(back), light(action_colours.text_colour(back))))
        assert high / low > 4, (kind, chunk)


# Text


def test_text_without_colour():
    found = as_text(simulate(make_schedule("1f1b", 4, 8)), width=80, colour=False)
    assert found.plain == (
        "1f1b: 4 ranks, 8 microbatches\n"
        "rank 0 F0F1F2F3............B0--F4B1--F5B2--F6B3--F7B4--..B5--..B6--..B7--\n"
        "rank 1 ..F0F1F2........B0--F3B1--F4B2--F5B3--F6B4--F7B5--..B6--..B7--....\n"
        "rank 2 ....F0F1....B0--F2B1--F3B2--F4B3--F5B4--F6B5--F7B6--..B7--........\n"
        "rank 3 ......F0B0--F1B1--F2B2--F3B3--F4B4--F5B5--F6B6--F7B7--............\n"
        "F forward  B backward  . idle\n"
        "bubble 27.3 %, in flight 4 3 2 1, duration 33\n"
    )
    assert not found.spans


def test_letters_show_kinds_and_chunks():
    lines = as_text(
        simulate(make_schedule("zb-v", 2, 3), Durations(update=2.0)), width=80, colour=False
    ).plain.splitlines()
    assert {letter for line in lines[1:3] for letter in line[7:] if letter.isalpha()} == set("FfIiWwUu")
    assert lines[3] == ("F forward  I input gradient  W weight gradient  U update  . idle  small letters: chunk 1")


def test_colours_and_numbers():
    found = as_text(simulate(make_schedule("interleaved", 2, 4)), width=100)
    row = found.plain.splitlines()[1].removeprefix("rank 0 ")
    assert row.split()[:6] == ["0", "1", "0", "1", "2", "0"]
    backgrounds = {str(span.style).rpartition("on ")[2] for span in found.spans}
    assert {action_colours.cell_colour(ActionKind.FORWARD, chunk, 2) for chunk in (0, 1)} <= backgrounds


@settings(max_examples=40, deadline=None)
@given(schedules(), st.integers(20, 200), st.booleans(), st.sampled_from([0.0, 0.3]))
def test_rows_fit_the_width(schedule, width, colour, link):
    found = simulate(lower(schedule), Durations(send_forward=link))
    rows = as_text(found, width=width, colour=colour).plain.splitlines()[1 : 1 + schedule.ranks]
    assert all(len(row) <= width and row.startswith(f"rank {rank}") for rank, row in enumerate(rows))
    assert len({len(row) for row in rows}) == 1
    assert colour or "".join(rows).isascii()


def test_a_squeezed_row_keeps_the_shares():
    found = simulate(make_schedule("1f1b", 2, 500))
    row = as_text(found, width=107, colour=False).plain.splitlines()[1].removeprefix("rank 0 ")
    assert len(row) == 100
    assert set(row) <= set("FB.")
    assert (row.count("F"), row.count("B")) == (33, 67)


def test_planned_stands_over_measured(both):
    lines = as_text(*both, width=150, colour=False).plain.splitlines()
    planned, real = (line for line in lines if "bubble" in line)
    assert re.fullmatch(r"planned: bubble 13\.2 %, in flight 8 8 8 8, duration 553 ms", planned)
    assert re.fullmatch(r"measured: bubble 1\d\.\d %, in flight 8 8 8 8, duration 612 ms", real)
    assert lines.index(planned) + 5 == lines.index(real)
    # On one scale of time: the plan ends first.
    assert len(lines[2].rstrip(".")) < len(lines[7].rstrip("."))
    assert len(lines[2]) == len(lines[7])


def test_a_note_is_shown():
    found = as_text(simulate(make_schedule("zb-v", 4, 2)), colour=False).plain
    assert found.splitlines()[-1].startswith("note: 2 microbatches")


@pytest.mark.parametrize("draw", [as_text, as_svg, as_html])
def test_a_timeline_without_time_is_drawn(draw):
    nothing = Durations(forward=0.0, input_grad=0.0, weight_grad=0.0)
    assert "bubble 0.0 %" in str(draw(simulate(make_schedule("1f1b", 2, 2), nothing)))


# SVG


def boxes(root, tag):
    return [
        {key: element.get(key, "") for key in element.keys()} | {"text": element.text or ""}  # noqa: SIM118
        for element in root.iter(SVG + tag)
    ]


def extent(text):
    """From where to where a text goes, with letters as wide as a wide font has them."""
    x, size = float(text["x"]), float(text["font-size"])
    length = 0.6 * size * len(text["text"])
    anchor = "middle" if text.get("class", "").startswith("n ") else text.get("text-anchor", "start")
    left = x - {"start": 0.0, "middle": length / 2, "end": length}[anchor]
    return left, left + length


@settings(max_examples=25, deadline=None)
@given(schedules(), st.sampled_from([0.0, 0.3]), st.booleans())
def test_svg_texts_stay_in_their_cells(schedule, link, two):
    durations = Durations(send_forward=link, update=link)
    root = ElementTree.fromstring(
        as_svg(simulate(lower(schedule), durations), measured(schedule, Durations(forward=1.3)) if two else None)
    )
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    texts = boxes(root, "text")
    lines = {}
    for text in texts:
        left, right = extent(text)
        assert left >= 0, text
        assert right <= width, text
        assert 10 < float(text["y"]) < height
        lines.setdefault(text["y"], []).append((left, right))
    for line in lines.values():
        for (_, end), (start, _) in itertools.pairwise(sorted(line)):
            assert end <= start + 0.5
    cells = {(box["y"], box["x"]): box for box in boxes(root, "rect") if re.match("[FBIWU]", box.get("class", ""))}
    for text in texts:
        if text.get("class", "").startswith("n "):
            middle = float(text["x"])
            inside = [
                box
                for box in cells.values()
                if float(box["x"]) < middle < float(box["x"]) + float(box["width"])
                and float(box["y"]) < float(text["y"]) < float(box["y"]) + float(box["height"])
            ]
            assert len(inside) == 1


def test_an_svg_shows_every_action_once(both):
    root = ElementTree.fromstring(as_svg(*both))
    cells = [box["class"] for box in boxes(root, "rect") if box.get("rx") and re.match("[FBIWU]", box.get("class", ""))]
    legend = 4 + 2
    count = sum(
        action.kind in action_colours.ACTION_STYLES
        for timeline in both
        for rank in timeline.rank_actions
        for action in rank
    )
    assert len(cells) == count + legend
    messages = [box for box in boxes(root, "rect") if box.get("fill") == action_colours.TRANSFER_COLOUR]
    sends = sum(
        span.action.kind in SENDS and span.end > span.start for rank in range(4) for span in both[1].spans(rank)
    )
    assert len(messages) == sends + 1
    words_ = " ".join(text["text"] for text in boxes(root, "text"))
    for word in ("zb-v", "planned · bubble", "measured · bubble", "input gradient", "idle", "message", "500 ms"):
        assert word in words_


def test_a_large_svg_is_bounded():
    assert len(as_svg(simulate(make_schedule("1f1b", 2, 20_000)))) < 600_000


def test_names_are_escaped():
    found = Timeline.from_spans('a<b>&"c"</script>', (0,), [[("0F0", 0, 1), ("0B0", 1, 2)]], note="</script><b>")
    assert ElementTree.fromstring(as_svg(found)).findtext(f"{SVG}text") == found.name
    page = as_html(found)
    assert page.count("</script>") == 1
    assert data_of(page)["name"] == found.name


# HTML


def data_of(page):
    line = next(line for line in page.splitlines() if line.startswith("const data = "))
    return json.loads(line.removeprefix("const data = ").removesuffix(";").replace("<\\/", "</"))


def test_a_page_holds_all_data(both):
    page = as_html(*both)
    assert "http" not in page
    assert not re.search(r"<(link|img|iframe)|src=|@import|url\(", page)
    data = data_of(page)
    assert [panel["caption"] for panel in data["panels"]] == ["planned", "measured"]
    for panel, timeline in zip(data["panels"], both, strict=True):
        assert panel["figures"] == timeline_labels.summary_figures(timeline, seconds=True)
        assert panel["inFlight"] == list(timeline.in_flight)
        for rank, row in enumerate(panel["ranks"]):
            assert row["actions"].split() == [str(action) for action in timeline.rank_actions[rank]]
            assert row["starts"] == pytest.approx(timeline.starts[rank], abs=1e-6 * timeline.duration)
            assert row["ends"] == pytest.approx(timeline.ends[rank], abs=1e-6 * timeline.duration)


def test_the_page_is_in_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert "pipeline/draw/timeline.html" in project["tool"]["setuptools"]["package-data"]["echelon"]
