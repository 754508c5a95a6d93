"""Planted bugs, and the run that shows that the tests catch them: `make mutants`.

    planted_bugs.toml     the list: file, old text, new text, the tests that catch it, why it matters
    run_planted_bugs      copies src/ and the programs of bench/ to a scratch folder, plants one bug after another
                          there, and runs its tests

Each run is a fork of a process that has imported torch and pytest but nothing of the project, so it starts quickly and
imports the planted source. A bug is caught if its tests fail; a test that cannot be collected catches nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_suffix(".toml")
PRELOAD = ("torch", "numpy", "pytest", "torch.distributed", "safetensors.torch", "typer.testing")
OUTCOMES = {0: "SURVIVED", 1: "caught"}
"""by pytest's exit status; all others are faults of the list, or of the run"""
NO_STATUS = 99
"""of a fork in which pytest did not end"""


@dataclass(frozen=True, kw_only=True)
class PlantedBug:
    name: str
    file: str
    """below src/echelon; ../../bench/NAME is a program of bench/"""
    old: str
    """text that occurs once in the file"""
    new: str
    """what takes its place"""
    tests: tuple[str, ...]
    """pytest node ids, below tests/, of which one fails"""
    why: str
    """what the bug would do to a user"""

    def planted(self, source: str) -> str:
        """The file with the bug."""
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"the old text of a planted bug must occur once ({self.name}: {count} times); renew it")
        return source.replace(self.old, self.new)


def read_bugs(path: Path = LIST) -> list[PlantedBug]:
    with open(path, "rb") as file:
        entries = tomllib.load(file)["bug"]
    return [PlantedBug(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    bug: PlantedBug
    word: str
    """`caught`, `SURVIVED`, or what went wrong"""
    seconds: float
    output: str

    @property
    def is_caught(self) -> bool:
        return self.word == OUTCOMES[1]

    @property
    def failed_test(self) -> str:
        """The first test that failed."""
        lines = [line for line in self.output.splitlines() if line.startswith("FAILED ")]
        return lines[0].removeprefix("FAILED ").split(" - ")[0] if lines else ""


class PlantedBugRunner:
    """Runs tests on a copy of the source."""

    def __init__(self, root: Path, scratch: Path, *, timeout: float):
        self.root, self.source, self.timeout = root, scratch / "src", timeout
        self._output = scratch / "output.txt"
        self._child = 0
        shutil.copytree(root / "src", self.source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        (scratch / "bench").mkdir()
        for program in (root / "bench").glob("*.py"):
            shutil.copy(program, scratch / "bench")

    @contextlib.contextmanager
    def planted(self, bug: PlantedBug) -> Iterator[None]:
        path = self.source / "echelon" / bug.file
        before = path.read_text(encoding="utf-8")
        compiled = Path(cache_from_source(str(path)))
        path.write_text(bug.planted(before), encoding="utf-8")
        # A compiled file is recognised by its second and size, which a planted one may share with it.
        compiled.unlink(missing_ok=True)
        try:
            yield
        finally:
            path.write_text(before, encoding="utf-8")
            compiled.unlink(missing_ok=True)

    def run(self, bug: PlantedBug) -> Outcome:
        begin = time.monotonic()
        with self.planted(bug):
            status = self.run_tests(bug.tests)
        word = "timed out" if status is None else OUTCOMES.get(status, f"pytest ended with {status}")
        output = self._output.read_text(encoding="utf-8", errors="replace")
        return Outcome(bug=bug, word=word, seconds=time.monotonic() - begin, output=output)

    def run_tests(self, tests: Sequence[str]) -> int | None:
        """Run tests on the copy in a fork; pytest's exit status, or None if they take too long."""
        self._child = os.fork()
        if self._child == 0:
            # Whatever happens, the fork ends here: it must not run the parent's loop a second time.
            status = NO_STATUS
            try:
                os.setsid()  # with the ranks and launchers that tests start
                status = self._run_in_child(tests)
                sys.stdout.flush()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        try:
            return self._wait(time.monotonic() + self.timeout)
        finally:
            self.kill()

    def _run_in_child(self, tests: Sequence[str]) -> int:
        with open(self._output, "w", encoding="utf-8") as output:
            for descriptor in (1, 2):
                os.dup2(output.fileno(), descriptor)
        os.chdir(self.root)
        os.environ["PYTHONPATH"] = str(self.source)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        sys.dont_write_bytecode = False
        sys.path.insert(0, str(self.source))
        import pytest

        class NoShrinking:
            """One failing example is enough: hypothesis does not look for the smallest."""

            @pytest.hookimpl(trylast=True)
            def pytest_configure(self) -> None:
                with contextlib.suppress(ImportError):
                    from hypothesis import Phase, settings

                    phases = [Phase.explicit, Phase.generate]
                    settings.register_profile("first failure", deadline=None, database=None, phases=phases)
                    settings.load_profile("first failure")

        paths = [f"tests/{test}" for test in tests]
        options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "-rf"]
        return int(pytest.main([*options, *paths], plugins=[NoShrinking()]))

    def _wait(self, deadline: float) -> int | None:
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self._child, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        return None

    def kill(self) -> None:
        """End the child and what it started."""
        child, self._child = self._child, 0
        if child:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def run_planted_bugs(
    bugs: Sequence[PlantedBug], root: Path = ROOT, *, timeout: float = 300.0, preload: Sequence[str] = PRELOAD
) -> list[Outcome]:
    """Run all bugs and print each outcome; raise ValueError if their tests fail without any bug."""
    if not Path("/dev/nvidiactl").exists():
        os.environ["TRITON_INTERPRET"] = "1"  # as tests/conftest.py, before triton is imported
    for module in preload:
        importlib.import_module(module)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="echelon-mutants-") as scratch:
        runner = PlantedBugRunner(root, Path(scratch), timeout=timeout)
        clean = sorted({test for bug in bugs for test in bug.tests})
        if runner.run_tests(clean) != 0:
            raise ValueError(f"tests fail without a planted bug:\n{runner._output.read_text(encoding='utf-8')}")
        for number, bug in enumerate(bugs, start=1):
            outcome = runner.run(bug)
            outcomes.append(outcome)
            print(
                f"{number:3d}/{len(bugs)}  {outcome.word:8s}  {outcome.seconds:5.1f} s  {bug.name:42s} "
                f"{outcome.failed_test or bug.why}",
                flush=True,
            )
    return outcomes


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="planted bugs to run, by parts of their names or files; default: all")
    parser.add_argument("--list", type=Path, default=LIST, help="the list")
    parser.add_argument("--root", type=Path, default=ROOT, help="the project")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that the tests of a bug may take")
    parser.add_argument("--no-preload", action="store_true", help="import nothing before the tests")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes the scratch folder on the way out
    bugs = read_bugs(options.list)
    if options.names:
        bugs = [bug for bug in bugs if any(name in f"{bug.name} {bug.file}" for name in options.names)]
    if not bugs:
        print("no planted bug has this name", file=sys.stderr)
        return 2
    begin = time.monotonic()
    try:
        outcomes = run_planted_bugs(
            bugs, options.root, timeout=options.timeout, preload=() if options.no_preload else PRELOAD
        )
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    survivors = [outcome for outcome in outcomes if not outcome.is_caught]
    caught, seconds = len(outcomes) - len(survivors), time.monotonic() - begin
    print(f"{caught} of {len(outcomes)} planted bugs caught in {seconds:.0f} s")
    for outcome in survivors:
        print(f"{outcome.word}: {outcome.bug.name} ({outcome.bug.file}): {outcome.bug.why}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
