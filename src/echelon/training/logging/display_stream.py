"""Standard output as the display of a run uses it: when it fails, the run continues without its display."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import IO


class DisplayStream:
    """Writes to a stream until that fails: the disk of its file is full, its terminal is gone, or it is closed.

    Characters that the stream cannot encode are written as escapes.
    """

    def __init__(self, stream: IO[str] | None):
        self._stream = stream

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return self._stream is not None and not self._stream.closed and self._stream.isatty()

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("the display has no stream")
        return self._stream.fileno()

    def write(self, text: str) -> int:
        if self._stream is None:
            return len(text)
        try:
            self._stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self._give_up(error)
        return len(text)

    def flush(self) -> None:
        if self._stream is None:
            return
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        stream, self._stream = self._stream, None
        if stream is not None and not stream.closed:
            # What the stream still buffers goes nowhere: the interpreter's own flush at exit must not fail.
            with suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        with suppress(OSError, ValueError):
            note = f"echelon: the run continues without its display (standard output cannot be written: {reason})"
            print(note, file=sys.stderr, flush=True)
