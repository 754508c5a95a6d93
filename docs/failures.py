"""Writes the outputs of docs/failures.md: runs every `sh slow` command of the page and puts what it said below it.

python docs/failures.py
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).with_name("failures.md")
SOURCE = Path(__file__).parents[1]
FENCE = re.compile(
    r"(?P<head>^```sh slow\n(?P<command>[^\n]+)\n```\n```text\n)(?P<output>.*?)(?P<end>^```$)", re.M | re.S
)
TOLD = re.compile(r"^(echelon: |note: |  time: )")
"""what a page shows of a run: from the diagnosis on, notes, and where the time went"""


def said(command: str) -> str:
    words = shlex.split(command)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", *words, "--set", "device=cpu"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
        )
    shown = [line for line in done.stdout.splitlines() if TOLD.match(line)]
    text = "\n".join([*shown, done.stderr.strip()]).strip()
    print(f"{command}\n{text}\n", file=sys.stderr)
    return text.replace(f"{SOURCE}/", "").replace(f"{Path(sys.prefix)}/", "") + "\n"


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(FENCE.sub(lambda m: m["head"] + said(m["command"]) + m["end"], page), encoding="utf-8")


if __name__ == "__main__":
    main()
