"""Failures of ranks, and which of several caused the others.

When a rank dies, its peers fail a moment later because their connections break. The user needs the first failure, with
its traceback, once.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from echelon.layout.validation_error import ValidationError

# Messages of gloo, NCCL and the store about a peer that is gone or did not answer.
_LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "connection was likely closed",
    "broken pipe",
    "application timeout caused pair closure",
    "timed out waiting",
    "wait timeout",
    "socket timeout",
    "remote process exited",
    "failed to recv, got 0 bytes",
)


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """The failure of one rank."""

    rank: int
    time_ns: int
    """`time.monotonic_ns()`, one clock for all processes of a node."""
    reason: str
    """One line: `ValueError: message`, or how the process ended."""
    traceback: str = ""
    """The rank's traceback; empty if the process ended without an exception."""
    lost_peer: bool = False
    """Whether the error looks like the consequence of another rank's failure."""
    user_errors: tuple[str, ...] = ()
    """The messages of a ValueError, or of each issue of a ValidationError. Empty for other errors."""
    died: bool = False
    """The process ended without an exception."""
    modules: tuple[str, ...] = ()
    """The modules of the traceback, the one that raised last."""

    @classmethod
    def from_exception(cls, error: BaseException, rank: int) -> RankFailure:
        """The failure of the rank that has just caught `error`, without the frame that caught it."""
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            error = error.with_traceback(error.__traceback__.tb_next)
        return cls(
            rank=rank,
            time_ns=time.monotonic_ns(),
            reason="".join(traceback.format_exception_only(error)).strip(),
            traceback="".join(traceback.format_exception(error)).rstrip(),
            lost_peer=is_lost_peer(error),
            user_errors=user_error_messages(error),
            modules=traceback_modules(error),
        )

    @classmethod
    def from_exit_code(cls, exitcode: int | None, rank: int, output: str = "") -> RankFailure:
        """The failure of a rank whose process ended. `output` is its last output."""
        now, reason = time.monotonic_ns(), _describe_exit(exitcode)
        return cls(rank=rank, time_ns=now, reason=reason, traceback=output.rstrip(), died=True)


@dataclass(frozen=True)
class FailureExplanation:
    """The diagnosis of a failed run."""

    text: str
    """one paragraph"""
    rank: int | None
    """the culprit, if there is one"""


class RankError(RuntimeError):
    """A rank failed, died or timed out. The message ends with that rank's traceback."""

    def __init__(self, message: str, *, rank: int, reason: str, failure: RankFailure | None = None) -> None:
        super().__init__(message)
        self.rank, self.reason, self.failure = rank, reason, failure

    @classmethod
    def from_failure(cls, failure: RankFailure, *, world_size: int, function: str, remark: str = "") -> RankError:
        """The error for a failure of `function`, by name, on `world_size` ranks."""
        head = f"rank {failure.rank} of {world_size} failed in {function} ({failure.reason.splitlines()[0]})"
        parts = [head, *filter(None, [remark, failure.traceback])]
        return cls("\n\n".join(parts), rank=failure.rank, reason=failure.reason, failure=failure)

    @classmethod
    def from_explanation(cls, explanation: FailureExplanation, failures: Sequence[RankFailure]) -> RankError:
        """The error with a diagnosis and the culprit's traceback, without those of ranks that lost a peer."""
        cause = first_failure(failures)
        shown = cause.traceback if explanation.rank == cause.rank and not cause.lost_peer else ""
        text = "\n\n".join(filter(None, [explanation.text, shown]))
        rank = cause.rank if explanation.rank is None else explanation.rank
        return cls(text, rank=rank, reason=cause.reason, failure=cause)

    @property
    def is_refusal(self) -> bool:
        """Whether the ranks refused what the user asked for: a restart would end in the same way."""
        return self.failure is not None and bool(self.failure.user_errors)

    def __reduce__(self) -> tuple[object, ...]:
        return partial(RankError, rank=self.rank, reason=self.reason, failure=self.failure), (str(self),)


def first_failure(failures: Iterable[RankFailure]) -> RankFailure:
    """The failure that caused the others: the earliest that is not a lost peer, else the earliest."""
    return min(failures, key=lambda failure: (failure.lost_peer, failure.time_ns))


def is_lost_peer(error: BaseException | None) -> bool:
    """Whether an error looks like the consequence of another rank's failure."""
    # An error that was raised while handling another one is a consequence of it.
    while error is not None:
        message = str(error).lower()
        if any(words in message for words in _LOST_PEER):
            return True
        error = error.__cause__ or error.__context__
    return False


def user_error_messages(error: BaseException) -> tuple[str, ...]:
    """The messages of an error that the user's input may have caused; empty for any other."""
    if isinstance(error, ValidationError):
        return tuple(str(fault) for fault in error.issues)
    return (str(error),) if isinstance(error, ValueError) else ()


def traceback_modules(error: BaseException) -> tuple[str, ...]:
    frames = traceback.walk_tb(error.__traceback__)
    return tuple(str(frame.f_globals.get("__name__", "")) for frame, _ in frames)


def _describe_exit(exitcode: int | None) -> str:
    if exitcode is None:
        return "the process ended with an unknown exit code"
    if exitcode >= 0:
        return f"the process ended with exit code {exitcode} and without an exception"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    return f"the process was ended by {name}"
