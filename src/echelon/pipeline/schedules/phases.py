"""`Phases`: a rank's list written as its paper draws it, phase by phase."""

from __future__ import annotations

from collections import Counter

from echelon.pipeline.actions import Action, Kind


class Phases:
    """Writes a list from patterns such as `F0 I1 W1`: the kind, then which of the rank's chunks.

    Each action takes the next microbatch of its chunk. `W1` is the oldest weight gradient that an `I1` has left to do,
    `W` the oldest of all chunks.
    """

    def __init__(self, *stages: int):
        self.stages = stages
        self.actions: list[Action] = []
        self._count: Counter[tuple[int, bool]] = Counter()
        """microbatches by chunk and by whether it is backward"""
        self._owed: list[Action] = []
        """weight gradients that are left to do, the oldest first"""

    def repeat(self, times: int, pattern: str) -> None:
        for word in pattern.split() * times:
            kind = Kind(word[0])
            if kind is Kind.WEIGHT:
                self._pay(word[1:])
            else:
                self._next(kind, int(word[1:]))

    def _next(self, kind: Kind, chunk: int) -> None:
        stage, key = self.stages[chunk], (chunk, kind is not Kind.FORWARD)
        index = self._count[key]
        self._count[key] += 1
        self.actions.append(Action(stage, kind, index))
        if kind is Kind.INPUT:
            self._owed.append(Action(stage, Kind.WEIGHT, index))

    def _pay(self, chunk: str) -> None:
        stages = (self.stages[int(chunk)],) if chunk else self.stages
        oldest = next(place for place, action in enumerate(self._owed) if action.stage in stages)
        self.actions.append(self._owed.pop(oldest))
