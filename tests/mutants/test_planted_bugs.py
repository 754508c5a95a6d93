"""The list of planted bugs does not rot, its runner tells caught from surviving ones, and the soak runs all of it."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from tests.mutants.planted_bugs import ROOT, read_bugs

BUGS = read_bugs()
RUNNER = Path(__file__).with_name("planted_bugs.py")
PACKAGES = (
    *("layout", "config", "data", "models", "moe", "kernels", "precision", "memory", "parallel", "optim", "pipeline"),
    *("training", "checkpoint", "faults", "launch", "planning", "verification", "draw"),
)


@cache
def defined_tests(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_the_list_covers_every_package() -> None:
    assert len(BUGS) >= 80
    assert len({bug.name for bug in BUGS}) == len(BUGS)
    assert {bug.file.partition("/")[0] for bug in BUGS} >= set(PACKAGES)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_still_fits_its_file_and_its_tests(bug) -> None:
    planted = bug.planted((ROOT / "src" / "echelon" / bug.file).read_text(encoding="utf-8"))
    ast.parse(planted)
    assert bug.new != bug.old
    assert bug.why
    assert bug.tests
    for test in bug.tests:
        file, _, name = test.partition("::")
        assert not name or name.partition("[")[0] in defined_tests(file), test


# -- the runner -------------------------------------------------------------------------------------------------------

SMALL_LIST = """
[[bug]]
name = "seen"
file = "adding.py"
old = "a + b"
new = "a - b"
tests = ["test_adding.py::test_sum"]
why = "sums are differences"

[[bug]]
name = "unseen"
file = "adding.py"
old = "return 2"
new = "return 3"
tests = ["test_adding.py::test_sum"]
why = "no test calls it"
"""
SMALL_TEST = """
import time
from echelon.adding import add

def test_sum():
    assert add(1, 2) == 3

def test_long():
    time.sleep(600)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of one function, a test, and two planted bugs."""
    for folder in ("src/echelon", "tests", "scratch"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "src/echelon/__init__.py").write_text("")
    source = "def add(a, b):\n    return a + b\n\n\ndef two():\n    return 2\n"
    (tmp_path / "src/echelon/adding.py").write_text(source)
    (tmp_path / "tests/test_adding.py").write_text(SMALL_TEST)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (tmp_path / "list.toml").write_text(SMALL_LIST)
    return tmp_path


def start(project: Path, *names: str) -> subprocess.Popen[str]:
    where = ["--root", str(project), "--list", str(project / "list.toml"), "--no-preload"]
    environment = {**os.environ, "TMPDIR": str(project / "scratch")}
    return subprocess.Popen(
        [sys.executable, str(RUNNER), *where, *names], env=environment, stdout=subprocess.PIPE, text=True
    )


def test_survivors_are_printed_and_fail_the_run(project: Path) -> None:
    before = (project / "src/echelon/adding.py").read_text()
    run = start(project)
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 1
    assert "1 of 2 planted bugs caught" in output
    assert "SURVIVED: unseen (adding.py): no test calls it" in output
    assert "tests/test_adding.py::test_sum" in output
    assert (project / "src/echelon/adding.py").read_text() == before
    assert not any((project / "scratch").iterdir())


def test_a_run_without_survivors_succeeds(project: Path) -> None:
    (project / "list.toml").write_text(SMALL_LIST.rpartition("[[bug]]")[0])
    run = start(project)
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 0
    assert "1 of 1 planted bugs caught" in output


def test_tests_that_fail_without_a_bug_are_no_proof(project: Path) -> None:
    (project / "tests/test_adding.py").write_text(SMALL_TEST.replace("== 3", "== 4"))
    run = start(project)
    run.communicate(timeout=120)
    assert run.returncode == 2


def test_a_killed_run_leaves_nothing_behind(project: Path) -> None:
    (project / "list.toml").write_text(SMALL_LIST.replace("::test_sum", "::test_long"))
    run = start(project)
    deadline = time.monotonic() + 60
    while not any((project / "scratch").glob("*/output.txt")) and time.monotonic() < deadline:
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=60)
    assert run.returncode == 143
    assert not any((project / "scratch").iterdir())


@pytest.mark.soak
def test_every_planted_bug_is_caught() -> None:
    done = subprocess.run([sys.executable, str(RUNNER)], stdout=subprocess.PIPE, text=True, timeout=7200)
    assert done.returncode == 0, done.stdout
