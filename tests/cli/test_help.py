from __future__ import annotations

import json
import subprocess
import sys

import pytest
from cpu_clock import cpu_seconds
from typer.testing import CliRunner

from echelon.cli import app

SEEN = """
import sys
from echelon.cli import main
try:
    main()
finally:
    heavy = [name for name in ("torch", "numpy", "safetensors") if name in sys.modules]
    print("loaded:", *heavy, file=sys.stderr)
"""


@pytest.mark.parametrize("args", [["--help"], ["train", "--help"], ["verify", "--help"], ["train", "--keys"]])
def test_help_loads_nothing_heavy(args):
    done = subprocess.run([sys.executable, "-c", SEEN, *args], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "loaded:"


def test_help_is_there_in_half_a_second():
    best = 9.9
    for _ in range(3):
        begun = cpu_seconds()
        done = subprocess.run([sys.executable, "-m", "echelon", "--help"], capture_output=True, text=True, timeout=300)
        best = min(best, cpu_seconds() - begun)
        if best < 0.5:
            break
    assert best < 0.5
    assert done.returncode == 0
    for word in ("train", "verify"):
        assert word in done.stdout


def test_no_command_shows_the_help():
    shown = CliRunner().invoke(app, [])
    assert "Usage:" in shown.output


def test_keys_are_those_of_the_configuration():
    from echelon.config.run_config import Config

    shown = json.loads(CliRunner().invoke(app, ["train", "--keys", "--json"]).stdout)
    assert list(shown) == [key.name for key in Config.keys()]  # noqa: SIM118
    assert shown["optimizer.lr"]["meaning"] == "Peak learning rate."
    text = CliRunner().invoke(app, ["train", "--keys"]).stdout
    assert all(name in text for name in shown)


def test_an_unknown_option_is_refused():
    shown = CliRunner().invoke(app, ["train", "--proc", "2"])
    assert shown.exit_code == 2
    assert "--proc" in shown.stderr
