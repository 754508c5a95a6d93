"""Write the outputs of failing runs into the docs: run every `sh slow` command of a page and insert its output below.

python docs/failures.py failures bad-numbers
"""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent
SOURCE = Path(__file__).parents[1]
FENCE = re.compile(
    r"(?P<head>^```sh slow\n(?P<command>[^\n]+)\n```\n```text\n)(?P<output>.*?)(?P<end>^```$)", re.M | re.S
)
SHOWN_LINE = re.compile(r"^(echelon: |note: |  time: )")
"""the lines of a run that a page shows: the diagnosis, notes, and the summary of the time"""


def output_of(command: str) -> str:
    words = shlex.split(command)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "numbers.txt").write_text("".join(f"{number}\n" for number in range(1, 30001)))
        done = subprocess.run(
            [sys.executable, "-m", *words, "--set", "device=cpu"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
        )
    shown = [line for line in done.stdout.splitlines() if SHOWN_LINE.match(line)]
    text = "\n".join([*shown, done.stderr.strip()]).strip()
    print(f"{command}\n{text}\n", file=sys.stderr)
    text = text.replace(f"{SOURCE}/", "").replace(f"{Path(sys.prefix)}/", "")
    return text.replace(f" of {socket.gethostname()},", " of node-1,") + "\n"


def main() -> None:
    for name in sys.argv[1:] or ("failures", "bad-numbers"):
        page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
        written = FENCE.sub(lambda m: m["head"] + output_of(m["command"]) + m["end"], page)
        (DOCS / f"{name}.md").write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
