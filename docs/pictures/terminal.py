"""A command's real output in a terminal, as an SVG picture: run in a pseudo-terminal, drawn by rich.

A live display redraws its lines with a few control sequences (erase a line, go one line up). `Screen` obeys those, so
the picture shows what stays on the screen at the end.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

COLUMNS = 108
LIGHT = TerminalTheme(
    (251, 252, 253),
    (36, 41, 47),
    [
        (36, 41, 47),
        (190, 50, 46),
        (26, 127, 55),
        (154, 103, 0),
        (9, 105, 218),
        (130, 80, 223),
        (27, 124, 131),
        (110, 119, 129),
    ],
)
CONTROL = re.compile(r"\x1b\[(?P<digits>[?0-9;]*)(?P<kind>[A-Za-z])|\r|\n")


class Screen:
    """Lines with their colours, as a terminal would be left."""

    def __init__(self) -> None:
        self.lines = [""]
        self.row = 0

    def feed(self, text: str) -> None:
        position = 0
        for found in CONTROL.finditer(text):
            self.lines[self.row] += text[position : found.start()]
            position = found.end()
            if found[0] == "\n":
                self._go(self.row + 1)
            elif found["kind"] == "m":
                self.lines[self.row] += found[0]
            elif found["kind"] == "K":
                self.lines[self.row] = ""
            elif found["kind"] == "A":
                self._go(self.row - int(found["digits"] or 1))
        self.lines[self.row] += text[position:]

    def _go(self, row: int) -> None:
        self.row = max(row, 0)
        self.lines += [""] * (self.row + 1 - len(self.lines))


def run(command: str, folder: Path) -> list[str]:
    """Runs `echelon ...` in a pseudo-terminal and returns the lines that stay on the screen."""
    words = shlex.split(command)
    assert words[0] == "echelon"
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": "50"}
    process = subprocess.Popen(
        [sys.executable, "-m", "echelon", *words[1:]],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        cwd=folder,
    )
    os.close(theirs)
    raw = bytearray()
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # how Linux says that the other side is closed
            break
        if not part:
            break
        raw += part
    process.wait()
    os.close(ours)
    screen = Screen()
    screen.feed(raw.decode("utf-8", "replace"))
    return [line.rstrip() for line in screen.lines]


def picture(command: str, folder: Path) -> str:
    """The SVG of a command and what it printed."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(Text.assemble(("$ ", "bright_black"), (command, "bold")))
        for line in run(command, folder):
            text = Text.from_ansi(line)
            for row in text.divide(range(COLUMNS, len(text), COLUMNS)):  # as a terminal folds a long line
                console.print(row, no_wrap=True, overflow="ignore", crop=False)
    name = "terminal-" + re.sub(r"\W+", "-", command)
    drawn = console.export_svg(title="", theme=LIGHT, unique_id=name)
    # The picture must not ask another machine for its font.
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
