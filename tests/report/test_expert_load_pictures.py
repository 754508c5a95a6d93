"""Pictures of loads: all eyes can read them, nothing is cut off, nothing is fetched, a real browser agrees."""

from __future__ import annotations

import base64
import itertools
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import browser
import pytest
from expert_log_records import record, records
from rich.text import Text

from echelon.pipeline.schedules import make_schedule
from echelon.pipeline.simulate import simulate
from echelon.report import expert_load_history, expert_load_html, expert_load_svg, load_colours
from echelon.report.expert_load_history import ExpertLoadHistory
from echelon.report.expert_load_text import as_text
from echelon.report.run_picture import RunPicture

SVG = "{http://www.w3.org/2000/svg}"
SIZES = [(1, 4, 1), (2, 8, 30), (9, 5, 300), (60, 256, 20)]
"""layers, experts, steps"""


@pytest.fixture(scope="module", params=SIZES, ids=str)
def history(request: pytest.FixtureRequest) -> ExpertLoadHistory:
    layers, experts, steps = request.param
    return ExpertLoadHistory.from_records(records(layers=layers, experts=experts, steps=steps), name="a-run")


# The scale


def test_colour_indices() -> None:
    assert [load_colours.colour_index(load) for load in (0, 0.1, 0.25, 0.6, 1, 1.3, 3, 7, 8, 200)] == [
        None,
        0,
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        7,
    ]
    assert (
        len(load_colours.LOAD_LABELS)
        == len(load_colours.ON_LIGHT)
        == len(load_colours.ON_DARK)
        == len(load_colours.LOAD_EDGES) + 1
    )


EYES = {
    "usual": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "without green": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "without red": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "without blue": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
"""what is seen of linear red, green and blue"""


def lightness(colour: str, eyes: str) -> float:
    """CIE L*, from 0 to 100."""
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    red, green, blue = (min(1, max(0, sum(a * b for a, b in zip(row, linear, strict=True)))) for row in EYES[eyes])
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return 116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y


@pytest.mark.parametrize("eyes", EYES)
def test_scales_are_monotonic_for_colour_blind_readers(eyes: str) -> None:
    for colours, sign in ((load_colours.ON_LIGHT, -1), (load_colours.ON_DARK, 1)):
        seen = [lightness(colour, eyes) for colour in colours]
        assert min(sign * (b - a) for a, b in itertools.pairwise(seen)) > 2.5, seen


# Text


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("colour", [True, False])
def test_text_fits_the_terminal(history: ExpertLoadHistory, width: int, colour: bool) -> None:
    text = as_text(history, width=width, colour=colour)
    lines = text.plain.splitlines()
    worst = [layer.name.removesuffix(".mlp") for layer in history.worst_layers(3)]
    assert [line.split(":")[0] for line in lines if ", to the mean" in line and ":" in line] == worst
    assert max(len(line.rstrip()) for line in lines[1:]) <= width
    assert len(lines) < 120
    assert colour or text.plain.isascii()


def test_text_shows_figures_and_unused_experts() -> None:
    reported = [record(step, [[7, 0, 31, 2]], [4]) for step in (1, 2)]
    lines = as_text(ExpertLoadHistory.from_records(reported), width=80, colour=False).plain.splitlines()
    rows = [line.split() for line in lines if re.match(r" +\d ", line)]
    assert rows == [["0", "33333333"], ["1", "........"], ["2", "66666666"], ["3", "11111111"]]
    assert "no token in the run: expert 1" in lines
    assert next(line for line in lines if line.startswith("dropped %")).endswith("10.0, 10.0 to 10.0")


# SVG


def test_svg_is_well_formed(history: ExpertLoadHistory) -> None:
    text = expert_load_svg.as_svg(history)
    root = ElementTree.fromstring(text)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert not re.search(r"<(script|image|link)|@import|url\(", text)
    for one in root.iter(f"{SVG}text"):
        x, y, size = (float(one.attrib[key]) for key in ("x", "y", "font-size"))
        room = 0.6 * size * len(one.text or "")
        start = {"end": x - room, "middle": x - room / 2}.get(one.attrib.get("text-anchor", ""), x)
        assert start > -20, one.text
        assert start + room < width + 20, one.text
        assert 0 < y < height
    shown = (
        min(len(history.layers), expert_load_history.MAX_ALL_SHOWN)
        if len(history.layers) <= expert_load_history.MAX_ALL_SHOWN
        else expert_load_history.WORST_SHOWN
    )
    assert text.count(">entropy<") == shown
    assert len(text) < 600_000


def test_cells_of_svg_are_the_loads() -> None:
    reported = [record(1, [[7, 0, 31, 2]], [0]), record(2, [[10, 10, 10, 10]], [0])]
    root = ElementTree.fromstring(expert_load_svg.as_svg(ExpertLoadHistory.from_records(reported)))
    paths = {path.attrib["class"]: path.attrib["d"] for path in root.iter(f"{SVG}path")}
    half = expert_load_svg.MAP_WIDTH / 2
    for name, cells in {"s2": 1, "s5": 1, "s0": 1, "s3": 4, "empty": 1}.items():
        assert paths[name].count("M") == paths[name].count(f"h{half:.1f}") == cells, name


# The page


def data_of(page: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(page.split("const data = ", 1)[1].split(";\n", 1)[0])
    return found


def test_the_page_has_every_load(history: ExpertLoadHistory) -> None:
    page = expert_load_html.as_html(history)
    assert not re.search(r"<(link|img|iframe)|src=|@import|url\(|MODE|LIGHT|DARK;", page)
    data = data_of(page)
    assert len(data["layers"]) == len(history.layers)
    for found, layer in zip(data["layers"], history.layers, strict=True):
        loads = [load for column in layer.columns for load in column.relative_loads]
        read = [2 ** ((byte - 1) / 16 - 7) if byte else 0.0 for byte in base64.b64decode(found["loads"])]
        assert all(abs(a - b) <= 0.025 * b for a, b in zip(read, loads, strict=True))
        assert found["lines"][0] == pytest.approx(
            [column.mean_figures["max/mean"] for column in layer.columns], abs=1e-4
        )
    assert sum(layer["shown"] for layer in data["layers"]) == (4 if len(history.layers) > 8 else len(history.layers))


def test_the_page_is_in_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert "report/expert_load.html" in project["tool"]["setuptools"]["package-data"]["echelon"]


@pytest.fixture(scope="module")
def opened() -> Iterator[browser.Browser]:
    if browser.program() is None:
        pytest.skip("no browser on this machine")
    with browser.Browser() as found:
        yield found


def test_in_a_browser(opened: browser.Browser, tmp_path: Path) -> None:
    """A page of its own in the dark, and below a timeline: drawn without a complaint; a click shows a layer more."""
    history = ExpertLoadHistory.from_records(records(layers=12, experts=8, steps=40), name="a-run")
    plain, both = tmp_path / "plain.html", tmp_path / "both.html"
    plain.write_text(RunPicture(expert_load=history).as_html(), encoding="utf-8")
    both.write_text(RunPicture(simulate(make_schedule("1f1b", 2, 3)), expert_load=history).as_html(), encoding="utf-8")
    for path, dark in ((plain, True), (both, False)):
        opened.open(path, dark=dark)
        count = "document.querySelectorAll('#experts canvas').length"
        assert opened.value(count) == 5
        assert opened.value("document.documentElement.scrollWidth <= window.innerWidth")
        opened.click("#experts canvas.rows")
        assert opened.value(count) in (4, 6)
        paper = opened.value("getComputedStyle(document.querySelector('#experts')).backgroundColor")
        assert paper == ("rgb(17, 21, 28)" if dark else "rgb(255, 255, 255)")
        assert "blocks." in opened.value("document.querySelector('#experts .tip').textContent")
    assert opened.errors == []


# With a pipeline


def test_timeline_and_expert_load_are_stacked(history: ExpertLoadHistory) -> None:
    picture = RunPicture(simulate(make_schedule("1f1b", 2, 3)), expert_load=history)
    root = ElementTree.fromstring(picture.as_svg())
    upper, lower = root.findall(f"{SVG}svg")
    assert float(lower.attrib["y"]) == float(upper.attrib["height"])
    assert float(root.attrib["height"]) == float(upper.attrib["height"]) + float(lower.attrib["height"])
    # The upper picture has one look: so has the lower beside it, though not alone.
    assert "prefers-color-scheme" not in picture.as_svg()
    assert "prefers-color-scheme" in RunPicture(expert_load=history).as_svg()
    shown = picture.as_text(width=80, colour=False)
    assert isinstance(shown, Text)
    assert shown.plain.index("bubble") < shown.plain.index("loads of experts")
