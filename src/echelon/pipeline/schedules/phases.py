"""`PhaseBuilder`: a rank's actions, phase by phase as in the papers."""

from __future__ import annotations

from collections import Counter

from echelon.pipeline.actions import Action, ActionKind


class PhaseBuilder:
    """Appends actions by patterns such as `F0 I1 W1`: the kind, then the rank's chunk.

    Each action takes the next microbatch of its chunk. `W1` is the oldest pending weight gradient of chunk 1, `W` the
    oldest of all chunks.
    """

    def __init__(self, *stages: int):
        self.stages = stages
        self.actions: list[Action] = []
        self._next_microbatch: Counter[tuple[int, bool]] = Counter()
        """by chunk and by whether it is backward"""
        self._pending_weight_grads: list[Action] = []
        """the oldest first"""

    def repeat(self, times: int, pattern: str) -> None:
        for word in pattern.split() * times:
            kind = ActionKind(word[0])
            if kind is ActionKind.WEIGHT_GRAD:
                self._append_weight_grad(word[1:])
            else:
                self._append(kind, int(word[1:]))

    def _append(self, kind: ActionKind, chunk: int) -> None:
        stage, key = self.stages[chunk], (chunk, kind is not ActionKind.FORWARD)
        index = self._next_microbatch[key]
        self._next_microbatch[key] += 1
        self.actions.append(Action(stage, kind, index))
        if kind is ActionKind.INPUT_GRAD:
            self._pending_weight_grads.append(Action(stage, ActionKind.WEIGHT_GRAD, index))

    def _append_weight_grad(self, chunk: str) -> None:
        stages = (self.stages[int(chunk)],) if chunk else self.stages
        oldest = next(place for place, action in enumerate(self._pending_weight_grads) if action.stage in stages)
        self.actions.append(self._pending_weight_grads.pop(oldest))
