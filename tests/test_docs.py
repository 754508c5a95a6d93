"""The docs are true: commands and Python run, outputs and tables are what the code says, links and pictures exist.

A fence's first word is its language, the others say how to treat it: `sh` is run and must succeed, `sh fails` must exit
non-zero, `sh slow` is only checked to exist. A `text` block right after a block that ran is that block's output.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from echelon.bench.planner_comparison import read_steps
from echelon.layout import Layout
from echelon.layout.rules import find_issues

if TYPE_CHECKING:
    from echelon.launch.rank_pool import RankPool

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OWN_TEST = ROOT / "docs" / "data.md"  # its Python blocks are run by tests/data/test_data_page.py
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    info: tuple[str, ...]
    body: str
    output: str | None
    """what stands in the `text` block right after it"""

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = list(FENCE.finditer(text))
    made = []
    for match, after in zip(found, [*found, None][1:], strict=True):
        follows = after is not None and after["info"] == "text" and not text[match.end() : after.start()].strip()
        output = after["body"] if after is not None and follows else None
        line = text.count("\n", 0, match.start()) + 1
        made.append(Block(page, line, tuple(match["info"].split()), match["body"], output))
    return made


ALL = [block for page in PAGES for block in blocks(page)]


def commands(block: Block) -> list[str]:
    """The block's commands; a here-document belongs to its command."""
    lines, found = iter(block.body.splitlines()), []
    for line in lines:
        if end := re.search(r"<<'(\w+)'$", line):
            line = "\n".join([line, *iter(lines.__next__, end[1]), end[1]])
        if line.strip():
            found.append(line)
    return found


# -- what runs --------------------------------------------------------------------------------------------------------


def in_folder(folder: str, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """On a rank of the pool, whose own folder is the one it was started in."""
    with contextlib.chdir(folder):
        return function(*args)


@dataclass(frozen=True)
class InFolder:
    """The tests' pool, for commands that were typed in another folder."""

    pool: RankPool
    folder: Path

    def run(self, function: Callable[..., Any], world: int, *args: Any, timeout: float = 900.0) -> list[Any]:
        return self.pool.run(in_folder, world, str(self.folder), function, args, timeout=timeout)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: RankPool) -> Path:
    """An empty folder in which `echelon` runs in this process, on the warm ranks of the tests' pool."""

    warm = InFolder(pool, tmp_path)

    def start(function: Callable[..., Any], args: Sequence[Any], procs: int, **_: Any) -> Any:
        config, *others = args
        return warm.run(function, procs, replace(config, device="cpu"), *others)[0]  # the pool's ranks are on the CPU

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("echelon.launch.local_launcher.launch_ranks", start)
    monkeypatch.setattr("echelon.launch.rank_pool.RankPool", lambda **_: contextlib.nullcontext(warm))
    monkeypatch.setattr("echelon.verification.verifier.RankPool", lambda **_: contextlib.nullcontext(warm))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


def run(command: str) -> tuple[int, str]:
    """(exit code, everything it printed)."""
    words = shlex.split(command.splitlines()[0])
    if words[0] == "echelon":
        return run_here(words[1:])
    scripts = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    this_source = f'echelon() {{ "{sys.executable}" -m echelon "$@"; }}\n'  # also where it is not installed
    done = subprocess.run(
        ["bash", "-ec", this_source + command],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "PATH": scripts},
    )
    return done.returncode, done.stdout + done.stderr


def run_here(words: Sequence[str]) -> tuple[int, str]:
    from echelon.cli import app

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            app(list(words), standalone_mode=True)
        except SystemExit as end:
            code = end.code
    return int(code or 0), printed.getvalue()


RUN = [block for block in ALL if block.info[:1] == ("sh",) and "slow" not in block.info]


@pytest.mark.parametrize("block", RUN, ids=str)
def test_commands_run(block: Block, here: Path) -> None:
    printed = ""
    for command in commands(block):
        code, text = run(command)
        printed += text
        assert (code != 0) == ("fails" in block.info), f"{command}\nexit code {code}\n{text}"
    if block.output is not None:
        assert printed == block.output


SLOW = [command for block in ALL if block.info == ("sh", "slow") for command in commands(block)]


@pytest.mark.parametrize("command", sorted(set(SLOW)))
def test_long_commands_exist(command: str) -> None:
    import typer.main

    from echelon.cli import app

    words = shlex.split(command)
    if words[0] == "torchrun":  # tests/cli/test_train.py runs it
        words = words[words.index("echelon") :]
    if words[0] == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert set(words[1:]) <= set(targets)
    elif words[0] == "echelon":
        group: Any = typer.main.get_command(app)
        group.commands[words[1]].make_context(words[1], words[2:])  # parses, without running
    else:
        assert words[0].endswith("python")
        assert (ROOT / words[1]).is_file()


PYTHON = [page for page in PAGES if page != OWN_TEST and any(b.info == ("python",) for b in blocks(page))]


@pytest.mark.parametrize("page", PYTHON, ids=lambda page: page.name)
def test_python_runs(page: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {"__name__": "docs"}
    for block in blocks(page):
        if block.info == ("python",):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(block.body, str(block), "exec"), names)
            if block.output is not None:
                assert printed.getvalue() == block.output


def test_every_block_is_known() -> None:
    known = {"sh", "sh fails", "sh slow", "python", "text", "toml", ""}
    assert {" ".join(block.info) for block in ALL} <= known


def test_toml_is_a_configuration() -> None:
    from echelon.config.run_config import Config

    found = [block for block in ALL if block.info == ("toml",)]
    assert found
    for block in found:
        Config.from_toml(block.body)


# -- what is written --------------------------------------------------------------------------------------------------


def load(name: str, folder: Path) -> ModuleType:
    """A tool of the docs, which are no package."""
    sys.path.insert(0, str(folder))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(folder))


def test_tables_are_the_codes() -> None:
    tables = load("tables", ROOT / "docs")
    used = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert tables.written(text) == text, f"{page.name}: run python docs/tables.py"
        used |= {found["name"] for found in tables.MARK.finditer(text)}
    assert used == set(tables.TABLES)


def test_no_page_has_a_path_of_a_machine() -> None:
    """A table of measured steps named a model by the folder of the checkout that had written it."""
    machine = re.compile(r"(?<![\w.~$}/-])/(tmp|home|root|work|Users|mnt)/\S+")
    pages = [*PAGES, *(ROOT / "docs" / "pictures").glob("*.svg"), *(ROOT / "bench").glob("*/*.json")]
    found = {page.name: match[0] for page in pages if (match := machine.search(page.read_text(encoding="utf-8")))}
    assert found == {}
    steps = read_steps(ROOT / "bench" / "measured" / "h200-small.json")
    assert "bench/plain_models.py:gpt_124m" in {step.scenario.shape.name for step in steps}
    assert not any(step.scenario.shape.name.startswith("/") for step in steps)


def test_drawn_pictures_are_the_codes() -> None:
    make = load("make", ROOT / "docs" / "pictures")
    stored = {path.stem for path in (ROOT / "docs" / "pictures").glob("*.svg")}
    assert stored == {*make.DRAWN, *make.REAL}
    for name in make.DRAWN:
        stale = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text(encoding="utf-8") != make.make(name)
        assert not stale, f"{name}.svg: run python docs/pictures/make.py"


def links(page: Path) -> Iterator[str]:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"https?:", target):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    assert [link for link in links(page) if not (page.parent / link.partition("#")[0]).exists()] == []


def test_every_page_is_linked_and_has_a_picture() -> None:
    index = set(links(ROOT / "docs" / "README.md"))
    used = set()
    for page in sorted((ROOT / "docs").glob("*.md")):
        pictures = {link for link in links(page) if link.endswith(".svg")}
        used |= pictures
        drawn = any(block.info == () for block in blocks(page))
        assert pictures or drawn, f"{page.name} has no picture"
        assert page.name in index or page.name == "README.md"
    assert used == {f"pictures/{path.name}" for path in (ROOT / "docs" / "pictures").glob("*.svg")}


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "pictures").glob("*.svg")), ids=lambda path: path.stem)
def test_pictures_stand_alone(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<svg")
    assert not re.search(r"url\(.?https?:|href=", text)


def techniques() -> list[tuple[str, str]]:
    """(layout, state) of each row of the README's table; tests/test_claims.py checks those that do not run."""
    table = PAGES[0].read_text(encoding="utf-8").partition("## What is built")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    return [(layout.strip("`"), state) for _, layout, state, _ in rows]


def test_states_of_the_techniques() -> None:
    assert len(techniques()) > 10
    assert {state for _, state in techniques()} <= {"runs", "plan only", "priced as a baseline"}
    assert all(find_issues(Layout.parse(layout)) == [] for layout, state in techniques() if state == "runs")


@pytest.mark.soak
@pytest.mark.parametrize("layout", [layout for layout, state in techniques() if state == "runs"])
def test_techniques_that_run_are_verified(layout: str, here: Path, pool: RankPool) -> None:
    import echelon as ec
    from echelon.pipeline.schedules import make_schedule

    (here / "mine.txt").write_text(str(make_schedule("1f1b", 2, 4)), encoding="utf-8")
    report = ec.verify("moe-tiny" if "ep=" in layout else "llama-tiny", layout, pool=InFolder(pool, here))
    assert report.passed, report
