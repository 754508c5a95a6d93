"""Plans for people: every number is there, nothing is cut off, nothing is fetched, and a real browser agrees."""

import io
import re
import subprocess
import sys
import tomllib
from dataclasses import fields, replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import browser
import pytest
from rich.console import Console

from echelon.draw import number_format
from echelon.layout import Layout
from echelon.models.model_spec import ModelSpec, MoESpec
from echelon.planning.cluster import cluster
from echelon.planning.cost.step_time import StepTimes
from echelon.planning.model.transformer_shape import transformer_shape
from echelon.planning.priced_plan import price
from echelon.planning.scenario import Scenario
from echelon.planning.show import plan_labels, plans_html, plans_text, step_svg
from echelon.planning.show.plan_text import fold_layout, wrap_command

SPEC = ModelSpec(
    name="llama-70b", layers=80, width=8192, heads=64, kv_heads=8, head_dim=128, ffn=28672, gated_mlp=True, vocab=128256
)
LAYOUTS = (
    "tp=8,pp=4,schedule=interleaved,vpp=5,accumulate=32",
    "tp=8,pp=4,accumulate=32",
    "zero=3,recompute=full,accumulate=1",
    "tp=8,pp=2,schedule=interleaved,vpp=20,accumulate=16,recompute=selective,offload=params",
    "tp=4,pp=4,schedule=zb-v,accumulate=16",
    "tp=4,pp=2,cp=2,accumulate=16",
)
REASONS = ("memory binds", "tp=4 would <b>not</b> fit & more")
TITLE = "llama <70b> & 64 devices"


def priced(text, world=64, precision="bf16", **sizes):
    shape = transformer_shape(replace(SPEC, **sizes))
    layout = Layout.parse(text, world=world)
    nodes = cluster.parse_cluster(f"{world}xh100")
    return price(Scenario(shape=shape, cluster=nodes, layout=layout, seq_len=8192, precision=precision))


@pytest.fixture(scope="module")
def plans():
    found = [priced(text, precision="fp4" if "offload" in text else "bf16") for text in LAYOUTS]
    assert not all(plan.fits for plan in found)
    assert not all(plan.runnable for plan in found)
    return [replace(found[0], reasons=REASONS), *found[1:]]


def command(plans):
    return f"echelon train --set model=llama-70b --set layout={plans[0].layout} --set batch=64"


@pytest.fixture(scope="module")
def written(plans):
    return plans_html(plans, title=TITLE, command=command(plans), explanation=["memory binds", "one more GPU would do"])


def printed(plans, width, **options):
    console = Console(file=io.StringIO(), width=width, **options)
    console.print(plans_text(plans, width=width, command=command(plans)))
    return console.file.getvalue()


# Words


def test_every_cause_and_category_has_a_word(plans):
    assert {field.name for field in fields(StepTimes)} <= plan_labels.CAUSES.keys()
    mixture = priced(
        "tp=2,pp=2,schedule=pipedream,accumulate=8",
        moe=MoESpec(experts=8, top_k=2, ffn=28672, gated=True, layers=(True,) * 80),
    )
    for plan in [*plans, mixture, priced("zero=2,microbatch=2")]:
        assert plan.memory.parts.keys() <= plan_labels.CATEGORIES.keys()
    for table in (plan_labels.CAUSES, plan_labels.CATEGORIES):
        assert len({word.name for word in table.values()}) == len(table)
        assert len({word.colour for word in table.values()}) == len(table)
        assert all(word.meaning for word in table.values())


def test_bars_are_the_whole():
    parts = {"rest": 1.0, "products": 8.0, "of_tomorrow": 0.999, "update": 0.0004, "tp": 0.0006, "imbalance": -1e-17}
    found = plan_labels.labelled_bars(parts, plan_labels.CAUSES)
    assert [bar.label.name for bar in found] == ["GEMMs", "per-step overhead", "of tomorrow"]
    more = plan_labels.labelled_bars({**parts, "tp": 0.0049, "dp": 0.0049}, plan_labels.CAUSES)
    assert more[-1].label.name == "smaller parts"
    assert sum(bar.share for bar in more) == pytest.approx(1)


@pytest.mark.parametrize(
    ("value", "text"), [(7.697, "7.70 s"), (0.9997, "1.00 s"), (0.0124, "12.4 ms"), (12345.0, "12,345 s"), (0.0, "0 s")]
)
def test_seconds(value, text):
    assert number_format.format_seconds(value) == text


def test_numbers_under_each_other():
    assert number_format.format_seconds_aligned([5.3241, 0.05]) == ["5.324 s", "0.050 s"]
    assert number_format.format_seconds_aligned([39.351, 0.05]) == ["39.35 s", "0.05 s"]
    assert number_format.format_seconds_aligned([0.0774, 0.0056]) == ["77.4 ms", "5.6 ms"]


# The terminal


@pytest.mark.parametrize("width", [40, 60, 80, 100, 130, 200])
def test_lines_fit_the_terminal(plans, width):
    text = printed(plans, width)
    assert "\x1b" not in text
    assert all(len(line) <= width for line in text.splitlines())
    flat = re.sub(r"\s+", "", text)
    for plan in plans:
        assert number_format.format_seconds(plan.seconds) in text
        if width >= 80:
            assert plan_labels.format_interval(plan).replace(" ", "") in flat
            values = (
                number_format.format_bytes(plan.memory.total),
                number_format.percent(plan.mfu),
                number_format.percent(plan.bubble),
            )
            assert all(value in text for value in (*values, number_format.format_count(plan.tokens_per_s)))
    assert flat.count("planonly") == sum(not plan.runnable for plan in plans)
    assert flat.count("doesnotfit") == sum(not plan.fits for plan in plans)


def test_the_best_plan_is_shown(plans):
    text = printed(plans, 100)
    for bar in plan_labels.labelled_bars(plans[0].times, plan_labels.CAUSES):
        assert re.search(rf"{bar.label.name} +[\d.]+ m?s +{100 * bar.share:.1f} % +[█▏▎▍▌▋▊▉]", text)
    for bar in plan_labels.labelled_bars(plans[0].memory.parts, plan_labels.CATEGORIES):
        assert re.search(rf"{bar.label.name} +{number_format.format_bytes(bar.value)} +{100 * bar.share:.1f} %", text)
    assert all(f"• {reason}" in text for reason in REASONS)


def test_colours_are_for_terminals(plans):
    assert "\x1b[" in printed(plans, 80, force_terminal=True, color_system="truecolor")


def test_plain_ascii_where_nothing_else_can_be_shown(plans):
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii"), width=80)
    console.print(plans_text(plans, width=80, explanation=["6 – 8 s"]))
    console.file.flush()
    assert b"####" in raw.getvalue()
    assert b"* 6 - 8 s" in raw.getvalue()


def test_what_cannot_be_run_says_so(plans):
    console = Console(file=io.StringIO(), width=80)
    console.print(plans_text([plan for plan in plans if not plan.runnable], width=80, command="echelon train"))
    assert "this plan cannot be run yet" in console.file.getvalue()
    assert "run it" not in console.file.getvalue()


def test_without_a_plan():
    console = Console(file=io.StringIO(), width=80)
    console.print(plans_text([], width=80, explanation=["parameters alone take 90 GiB"]))
    assert "parameters alone take 90 GiB" in console.file.getvalue()
    assert "parameters alone take 90 GiB" in plans_html([], title="none", explanation=["parameters alone take 90 GiB"])


@pytest.mark.parametrize("width", [1, 8, 21, 200])
def test_a_folded_layout_is_whole(width):
    layout = "dp=4,tp=8,pp=2,schedule=interleaved,vpp=20,recompute=selective"
    lines = fold_layout(layout, width)
    assert "".join(lines) == layout
    assert all(0 < len(line) <= width for line in lines)


@pytest.mark.parametrize("width", [40, 60, 200])
def test_a_shell_reads_the_command_as_it_is(width):
    layout = "dp=4,tp=8,pp=2,schedule=interleaved,vpp=20,accumulate=16,recompute=selective"
    words_of = ["echelon", "train", "--set", f"layout={layout}", "--set", "model=llama-70b", "--set", "data.path=a b"]
    text = "\n".join(wrap_command(" ".join(words_of[:-1]) + " 'data.path=a b'", width))
    read = subprocess.run(["bash", "-c", f"printf '%s\\n' {text}"], capture_output=True, text=True, check=True)
    assert read.stdout.splitlines() == words_of


# The page


class Reader(HTMLParser):
    """Texts of the page by the id of the section around them; every tag must be closed where it should be."""

    VOID = frozenset({"meta", "wbr", "br"})

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.ids, self.attributes = [], {}, [], []

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append((tag, dict(attrs).get("id")))

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for _, name in self.open:
            if name:
                self.texts[name] = self.texts.get(name, "") + data


@pytest.fixture(scope="module")
def read(written):
    reader = Reader()
    reader.feed(written)
    reader.close()
    assert reader.open == []
    return reader


def test_every_number_is_on_the_page(plans, read):
    for number, plan in enumerate(plans, 1):
        section = read.texts[f"plan-{number}"]
        values = [value for _, value in plan_labels.key_figures(plan)]
        for parts, table in ((plan.times, plan_labels.CAUSES), (plan.memory.parts, plan_labels.CATEGORIES)):
            bars = plan_labels.labelled_bars(parts, table)
            values += [bar.label.name for bar in bars] + [f"{100 * bar.share:.1f} %" for bar in bars]
            values += (
                number_format.format_seconds_aligned([bar.value for bar in bars]) if table is plan_labels.CAUSES else []
            )
        for value in [*values, str(plan.layout), *plan.reasons]:
            assert value in section, value
        for value in (
            number_format.format_seconds(plan.seconds),
            plan_labels.format_interval(plan),
            number_format.format_bytes(plan.memory.total),
        ):
            assert value in read.texts["plans"]
        assert ("cannot be run" in section) == (not plan.runnable)
        assert ("plan only" in section) == (not plan.runnable)
        assert (f"layout={plan.layout} " in section) == plan.runnable
        assert (f"pipeline-{number}" in read.ids) == (plan.layout.pp > 1)


def test_text_is_escaped(written, read):
    assert TITLE not in written
    assert TITLE in unescape(written)
    assert "<b>not</b>" not in written
    assert REASONS[1] in read.texts["plan-1"]
    assert written.count("memory binds") == 1
    assert "one more GPU would do" in read.texts["plan-1"]
    assert "{{" not in written


def test_markers_in_a_text_stay_text(plans):
    assert "<h1>{{TABLE}}</h1>" in plans_html(plans[:1], title="{{TABLE}}")


def test_the_page_asks_for_nothing(written, read):
    assert "default-src 'none'" in written
    assert not {name for name, _ in read.attributes} & {"src", "srcset", "action", "onclick", "onload"}
    addresses = {value for name, value in read.attributes if name == "href"}
    assert addresses
    assert all(address.startswith("#plan-") for address in addresses)
    assert "@import" not in written
    assert "url(" not in written
    assert len(set(read.ids)) == len(read.ids)


def test_a_long_step_is_drawn_in_part(plans, read):
    assert step_svg.num_drawn_microbatches(plans[0]) == 16
    assert "Drawn with 16 of the step's 32 microbatches" in read.texts["plan-1"]
    assert "Drawn with" not in read.texts["plan-4"]
    assert step_svg.num_drawn_microbatches(priced("pp=3,accumulate=64", world=3)) == 15
    assert step_svg.num_drawn_microbatches(priced("pp=32,accumulate=64")) == 32


@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_memory_over_time_reaches_the_peak(plans, number):
    corners, _ = step_svg.memory_curve(plans[number])
    levels = [level for _, level in corners]
    assert max(levels) == pytest.approx(plans[number].memory.total)
    assert min(levels) < max(levels)
    assert [second for second, _ in corners] == sorted(second for second, _ in corners)


def test_many_plans_stay_a_small_file(plans):
    many = plans_html([plans[0]] * 100, title="many")
    assert len(many) < 3_000_000
    assert "The steps of the first 12 plans are drawn" in many


def test_the_template_is_shipped():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert "planning/show/plan.html" in project["tool"]["setuptools"]["package-data"]["echelon"]


def test_no_torch():
    code = "import sys, echelon.planning.show; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


# The page in a browser: see also tests/browser.py


@pytest.fixture(scope="module")
def chromium():
    if browser.program() is None:
        pytest.skip("no Chromium on this machine; `apt-get install chromium` gives one")
    with browser.Browser() as found:
        yield found


@pytest.fixture
def opened(chromium, written, tmp_path):
    path = tmp_path / "plan.html"
    path.write_text(written, encoding="utf-8")
    chromium.errors.clear()
    chromium.requests.clear()
    yield chromium, path
    assert chromium.errors == []
    assert {address.partition("#")[0] for address in chromium.requests} == {path.resolve().as_uri()}


SHOWN = "[...document.querySelectorAll('.plan')].filter((plan) => plan.offsetHeight).map((plan) => plan.id).join()"
WIDE = """[...document.querySelectorAll('body *:not(svg *)')].filter((e) => !e.closest('.picture svg')
    && getComputedStyle(e).position !== 'absolute' && e.getBoundingClientRect().right > innerWidth + 1)
    .map((e) => e.outerHTML.slice(0, 90)).join()"""
LIGHT = """['color', 'backgroundColor'].map((what) => getComputedStyle(document.documentElement)[what]
    .match(/\\d+/g).slice(0, 3).reduce((sum, part) => sum + +part, 0))"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, 480])
def test_it_loads(opened, width, dark):
    chromium, path = opened
    chromium.open(path, width=width, dark=dark)
    assert chromium.value("document.title") == TITLE
    assert chromium.value(SHOWN) == "plan-1"
    assert chromium.value("document.documentElement.scrollWidth") <= width
    assert chromium.value(WIDE) == ""
    ink, paper = chromium.value(LIGHT)
    assert (ink > paper + 500) if dark else (paper > ink + 500)


@pytest.mark.parametrize("width", [1200, 480])
def test_a_click_shows_another_plan(opened, plans, width):
    chromium, path = opened
    chromium.open(path, width=width)
    chromium.click("tr[data-plan='2'] td:nth-child(4)")
    assert chromium.value(SHOWN) == "plan-2"
    assert chromium.value("document.querySelector('#plan-2 code').textContent").count(str(plans[1].layout)) == 1
    assert chromium.value("document.querySelector('tr.chosen').dataset.plan") == "2"
    chromium.click("tr[data-plan='4'] a")
    assert chromium.value(SHOWN) == "plan-4"
    assert chromium.value("location.hash") == "#plan-4"
    top = chromium.value("document.querySelector('#plan-4').getBoundingClientRect().top")
    assert top < chromium.value("innerHeight")
    chromium.click(".compare[data-plan='3'] .stack")
    assert chromium.value(SHOWN) == "plan-3"


def test_the_command_is_copied_or_marked(opened, plans):
    chromium, path = opened
    chromium.open(path)
    chromium.click("#plan-1 .copy")
    found = chromium.value(
        "new Promise((done) => setTimeout(() => done(document.querySelector('#plan-1 .copy').textContent === 'copied'"
        " ? 'copied' : String(getSelection())), 200))"
    )
    assert found in ("copied", command(plans))


def test_without_a_script(opened):
    chromium, path = opened
    chromium.open(path, script=False)
    assert chromium.value(SHOWN) == "plan-1"
    assert chromium.value("document.querySelector('#plan-1 .copy').offsetHeight") == 0
    assert chromium.value("document.querySelector('#plan-1 .picture svg rect').getBBox().width") > 0
    chromium.click("tr[data-plan='3'] a")
    assert chromium.value(SHOWN) == "plan-3"


def test_errors_would_be_seen(chromium, tmp_path):
    path = tmp_path / "bad.html"
    path.write_text("<!doctype html><script>console.error('one'); nothing.there;</script><img src='missing.png'>")
    chromium.errors.clear()
    chromium.open(path)
    assert len(chromium.errors) == 3
    assert any(address.endswith("missing.png") for address in chromium.requests)
    chromium.errors.clear()
