import io
import math
import re

import pytest
from rich.console import Console

from echelon.training.logging.display import (
    Display,
    LossHistory,
    Progress,
    format_bytes,
    format_count,
    format_duration,
    format_percent,
    sparkline,
)
from echelon.training.logging.expert_load import ExpertLoad, LoadBalance

DERIVED = [("microbatch", "12", "batch 24 over 2 ranks"), ("padding", "none", "")]


UNEVEN = LoadBalance.from_loads(
    [ExpertLoad.from_counts("blocks.0.mlp", [8, 8, 0, 0], 0), ExpertLoad.from_counts("blocks.11.mlp", [9, 3, 2, 2], 5)]
)


def progress(step, loss=2.0, experts=None):
    numbers = {"tokens_per_s": 41_234.0, "mfu": 0.123, "hfu": 0.164, "memory": 3 * 2**28}
    return Progress(step=step, loss=loss, experts=experts, **numbers)


def plain(total=10, **options):
    out = io.StringIO()
    return out, Display(total, console=Console(file=out, width=80), **options)


def terminal(total=10, width=110, **options):
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None, _environ={"TERM": "xterm"})
    return out, Display(total, console=console, **options)


def without_controls(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_file_gets_one_line_every_few_seconds():
    now = iter(range(100))
    out, display = plain(10, print_every_s=4.0, clock=lambda: float(next(now)))
    with display:
        for step in range(1, 11):
            display.show_step(progress(step))
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/10", "5/10", "9/10", "10/10"]
    assert lines[1] == ("step 5/10  loss 2.000  tokens/s 41.2k  MFU 12.3 %  HFU 16.4 %  memory 768 MiB  left 0:05")


def test_lines_of_a_file_are_not_wrapped():
    out, display = plain()
    display.print_note("a long story " * 20)
    assert len(out.getvalue().splitlines()) == 1


@pytest.mark.parametrize("make", [plain, terminal])
def test_every_setting_and_its_reason_is_printed(make):
    out, display = make()
    display.print_settings("gpt-tiny, dp=2", DERIVED)
    for word in ("gpt-tiny, dp=2", "microbatch", "12", "batch 24 over 2 ranks", "padding", "none"):
        assert word in out.getvalue()


def test_a_terminal_gets_a_bar_a_sparkline_and_the_time_left():
    now = iter(range(100))
    out, display = terminal(10, clock=lambda: float(next(now)))
    with display:
        for step in range(1, 6):
            display.show_step(progress(step, loss=6.0 - step))
        display.print_evaluation(5, 1.5)
    text = without_controls(out.getvalue())
    for words in (
        "step 5/10",
        "━",
        "50%",
        "loss 1.000 █▆▅▃▁",
        "MFU 12.3 %",
        "HFU 16.4 %",
        "left 0:05",
        "perplexity 4.482",
    ):
        assert words in text


def test_a_narrow_terminal_breaks_between_figures():
    out, display = terminal(1000, width=80)
    with display:
        for step in range(1, 41):
            display.show_step(progress(step))
    lines = [line.rstrip() for line in without_controls(out.getvalue()).splitlines()]
    assert any(line.startswith("tokens/s") and "left" in line for line in lines)


def test_expert_load_is_shown_for_moe_models():
    out, display = plain()
    display.show_step(progress(1, experts=UNEVEN))
    figures = "max/mean 2.25 (blocks.11)  entropy 0.50 (blocks.0)  dead 2 of 8 (blocks.0)  dropped 15.6 % (blocks.11)"
    assert out.getvalue().rstrip().endswith(f"left -  {figures}")
    for width in (60, 80, 140):
        out, display = terminal(width=width)
        with display:
            display.show_step(progress(1, experts=UNEVEN))
        lines = [line.rstrip() for line in without_controls(out.getvalue()).splitlines()]
        rows = lines[next(place for place, line in enumerate(lines) if line.startswith("experts")) :]
        assert re.sub(" +", " ", " ".join(rows)) == f"experts {figures}".replace("  ", " ")
        assert max(map(len, rows)) <= width
    assert "experts" not in progress(1, experts=UNEVEN).record()
    for make in (plain, terminal):
        out, display = make()
        with display:
            display.show_step(progress(1))
        assert "max/mean" not in out.getvalue()


def test_a_terminal_shows_something_before_the_first_step():
    out, display = terminal()
    with display:
        pass
    assert "waiting for the first step" in out.getvalue()


@pytest.mark.parametrize("make", [plain, terminal])
def test_the_summary_shows_results_and_the_text_without_control_characters(make):
    out, display = make()
    display.print_summary("done", [("loss", "1.234")], prompt="def ", sample="f(x):\n\treturn [bold]x\x1b[2J\x00")
    text = out.getvalue()
    for words in ("done", "loss", "1.234", "def f(x):", "return [bold]x·[2J·"):
        assert words in text
    assert "\x1b[2J" not in text


def test_a_console_without_unicode_gets_ascii():
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    console = Console(file=file, width=110, force_terminal=True, color_system=None, _environ={"TERM": "xterm"})
    display = Display(2, console=console)
    with display:
        display.print_settings("t", DERIVED)
        display.show_step(progress(1, loss=3.0))
        display.show_step(progress(2, loss=1.0))
    display.print_summary("done", [], sample="snow ☃ \x00")
    file.flush()
    assert b"loss 1.000 #_" in raw.getvalue()
    assert b"snow ? ?" in raw.getvalue()


def test_quiet_prints_nothing(capsys):
    display = Display(3, quiet=True)
    with display:
        display.print_settings("t", DERIVED)
        display.show_step(progress(3))
        display.print_evaluation(3, 1.0)
        display.print_note("n")
    display.print_summary("done", [("a", "b")], sample="x")
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_a_loss_that_is_not_finite_is_shown_as_such():
    out, display = plain(1)
    display.show_step(progress(1, loss=math.nan))
    assert "loss nan" in out.getvalue()


def test_the_cursor_comes_back_after_an_error_in_the_loop():
    out, display = terminal()
    display.__enter__()
    display.show_step(progress(1))
    display.__exit__(RuntimeError, RuntimeError(), None)
    assert out.getvalue().endswith("\x1b[?25h")


def test_sparkline():
    assert sparkline([3, 2, 1], 10) == "█▅▁"
    assert sparkline([1, 1], 10) == "▁▁"
    assert sparkline([], 10) == ""
    assert sparkline([math.nan, 2, 1], 10) == "!█▁"
    assert len(sparkline(range(1000), 24)) == 24


def test_loss_history_has_bounded_memory():
    history = LossHistory(capacity=8)
    for value in range(1000):
        history.add(float(value))
    assert len(history.means) < 8
    assert history.means == sorted(history.means)
    assert history.means[0] < 130


def test_number_formats():
    assert [format_count(v) for v in (999, 12_345, 1.5e6, math.nan)] == ["999", "12.3k", "1.5M", "-"]
    assert [format_bytes(v) for v in (2**20, 3 * 2**30)] == ["1 MiB", "3.00 GiB"]
    assert [format_duration(v) for v in (59.6, 3725, math.nan)] == ["1:00", "1:02:05", "-"]
    assert format_percent(math.nan) == "-"
