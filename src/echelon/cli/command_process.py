"""The process of a command: interrupts, standard streams that are closed or full, threads that outlive the command.

[Note: Ctrl-C]

    while imports run           exit at once
    during the command          the first raises KeyboardInterrupt; more of them are ignored while the command ends its
                                ranks, until IGNORED_S have passed: then the process exits, and its ranks with it
    after the command           exit at once, with the command's status
"""

from __future__ import annotations

import os
import signal
import sys
import time

EXIT_INTERRUPTED = 128 + signal.SIGINT
OUTPUT_MODULES = ("rich.", "typer.", "echelon.cli.")
"""modules whose functions print"""
IGNORED_S = 3.0
"""seconds for which further interrupts are taken for the same one"""


def run() -> None:
    """Run the command of `sys.argv`, and exit with its status."""
    handles_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else ignored: in background
    if handles_interrupts:
        signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    _open_standard_streams()
    from echelon.cli.commands import app
    from echelon.launch.process_end import end_despite_threads

    if handles_interrupts:
        signal.signal(signal.SIGINT, _Interrupt())
    status = 0
    try:
        app()
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except OSError as error:
        if not _is_output_error(error):
            raise
        status = _report_output_error(error)
    status = _flush_output(status)
    if handles_interrupts:
        signal.signal(signal.SIGINT, lambda *_: os._exit(status))
    end_despite_threads(status)
    sys.exit(status)


class _Interrupt:
    """The handler of SIGINT during the command: see the note."""

    def __init__(self) -> None:
        self._first: float | None = None

    def __call__(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now
            raise KeyboardInterrupt
        if now - self._first > IGNORED_S:
            os._exit(EXIT_INTERRUPTED)


def _open_standard_streams() -> None:
    """Open closed streams to nowhere, before a file of the run gets their descriptors."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115 (for the whole process)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a terminal may be ASCII only


def _is_output_error(error: OSError) -> bool:
    """Whether a function that prints raised it."""
    from echelon.launch.rank_failure import traceback_modules

    return traceback_modules(error)[-1].startswith(OUTPUT_MODULES)


def _flush_output(status: int) -> int:
    """Write what standard output buffers; return a status that is not 0 where that fails."""
    try:
        sys.stdout.flush()
        return status
    except OSError as error:
        return status or _report_output_error(error)


def _report_output_error(error: OSError) -> int:
    with open(os.devnull, "wb") as nowhere:  # the interpreter's own flush at exit must not fail
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    if not isinstance(error, BrokenPipeError):  # else the reader of a pipe has enough
        reason = (error.strerror or str(error)).lower()
        print(f"echelon: standard output cannot be written ({reason}); give it another file", file=sys.stderr)
    return 1
