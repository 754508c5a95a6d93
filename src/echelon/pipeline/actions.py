"""`Action`: one step of one stage on one microbatch, and its text.

[Note: the text of an action]

    2F0      stage 2 runs forward on microbatch 0
    2B0      ... backward
    2I0 2W0  ... backward in two halves: the gradient of the stage's input, then the gradients of its weights
    2F0.1    ... on the second slice of its tokens (TeraPipe)
    2F5@3    ... with version 3 of the stage's weights (asynchronous schedules); without @, the latest
    2SF0     sends the output of forward to stage 3        2RF0     receives the output of stage 1
    2SB0     sends the gradient of its input to stage 1    2RB0     receives the gradient of its output from stage 3
    2U4      the update that makes version 4 of the stage's weights (a synchronous step has one, 2U1)
    2K3 2D3  stashes version 3 of the weights; drops it

Stages are numbered in the order of the model. A rank may hold several of them.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple


class ActionKind(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECEIVE_BACKWARD = "RB"
    UPDATE = "U"
    STASH = "K"
    DROP_STASHED = "D"


FORWARD, BACKWARD = ActionKind.FORWARD, ActionKind.BACKWARD
INPUT_GRAD, WEIGHT_GRAD = ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD
"""for inner loops: attributes of an enum are slow"""

COMPUTE = frozenset({FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD})
SENDS = frozenset({ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD})
RECEIVES = frozenset({ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD})
VERSIONS = frozenset({ActionKind.UPDATE, ActionKind.STASH, ActionKind.DROP_STASHED})
"""kinds whose index is a weight version; that of all others is a microbatch"""

LATEST = -1
"""the version of an action that uses the latest weights"""

_ACTION_PATTERN = re.compile(r"(\d+)(SF|RF|SB|RB|[FBIWUKD])(\d+)(?:\.(\d+))?(?:@(\d+))?")


class Action(NamedTuple):
    stage: int
    kind: ActionKind
    index: int  # type: ignore[assignment]  # hides a method of tuples
    """the microbatch, counted from the start of the step (of the run, where the schedule is asynchronous)"""
    slice_index: int = 0
    """the slice of the microbatch's tokens"""
    version: int = LATEST
    """the weights that F, B, I and W use"""

    def __str__(self) -> str:
        part = f".{self.slice_index}" if self.slice_index else ""
        version = f"@{self.version}" if self.version != LATEST else ""
        return f"{self.stage}{self.kind}{self.index}{part}{version}"

    @classmethod
    def parse(cls, text: str) -> Action:
        match = _ACTION_PATTERN.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"{text.strip()!r} is not an action; write stage, kind and microbatch as in 2F0, with a kind of "
                f"{', '.join(ActionKind)}"
            )
        stage, kind, index, part, version = match.groups(default="")
        return cls(int(stage), ActionKind(kind), int(index), int(part or 0), int(version or LATEST))
