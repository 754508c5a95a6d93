"""A display that cannot be written does not end the run."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from echelon.training.logging.display import Display
from echelon.training.logging.display_stream import DisplayStream


class FailingStream(io.StringIO):
    """A terminal that is gone."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def test_a_full_disk_ends_the_display_with_one_note(capfd):
    with open("/dev/full", "w") as full:
        stream = DisplayStream(full)
        for _ in range(3):
            stream.write("text\n")
            stream.flush()
        full.flush()  # as the interpreter does when it exits
    assert capfd.readouterr().err.splitlines() == [
        "echelon: the run continues without its display (standard output cannot be written: no space left on device)"
    ]


@pytest.mark.parametrize("stream", [FailingStream(), None])
def test_a_display_continues_without_its_stream(stream):
    display = Display(3, console=Console(file=DisplayStream(stream), force_terminal=True))
    with display:
        display.print_settings("title", [("name", "value", "reason")])
        display.print_note("note")


def test_a_closed_stream():
    closed = io.StringIO()
    closed.close()
    stream = DisplayStream(closed)
    assert not stream.isatty()
    assert stream.write("text") == 4
    stream.flush()
    with pytest.raises(OSError, match="no stream"):
        stream.fileno()


def test_characters_that_the_stream_cannot_encode_become_escapes():
    raw = io.BytesIO()
    stream = DisplayStream(io.TextIOWrapper(raw, encoding="ascii"))
    stream.write("é▁")
    stream.flush()
    assert raw.getvalue() == b"\\xe9\\u2581"
    assert stream.encoding == "ascii"


def test_the_default_display_writes_to_standard_output(capfd):
    Display(1).print_note("hello")
    assert capfd.readouterr().out == "note: hello\n"
