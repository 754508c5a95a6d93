"""Where ranks publish their state, so that it can be read after a rank was killed.

Ranks of the local launcher write files into its scratch directory, which the launcher reads when all ranks are gone.
Ranks of torchrun and of several nodes write into the process group's store, over a connection that a hanging
collective does not hold; no shared disk is needed.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from echelon.faults.rank_state import RankState
from echelon.faults.recorder_entry import read_entries, read_phase


class StateStore(Protocol):
    """Rank states, and named texts, that every rank can read and write."""

    def put(self, state: RankState) -> None: ...

    def state(self, rank: int) -> RankState:
        """Read a rank's last state; for a rank that never published one, its number alone."""
        ...

    def states(self, world: int) -> list[RankState]:
        return [self.state(rank) for rank in range(world)]

    def claim(self, name: str = "diagnosis") -> bool:
        """Claim a name; true on the first rank that does."""
        ...

    def set(self, name: str, text: str) -> None: ...

    def get(self, name: str) -> str:
        """Read a text, "" where no rank set it."""
        ...


class FileStateStore(StateStore):
    """A state store in a directory of this node."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def recorder_path(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.ring"

    def put(self, state: RankState) -> None:
        # Renamed when complete, so that no reader sees half of it. The recorder's file has the operations.
        draft = self.folder / f"rank{state.rank}.draft"
        draft.write_text(state.to_json(entries=False), encoding="utf-8")
        draft.rename(self.folder / f"rank{state.rank}.json")

    def state(self, rank: int) -> RankState:
        state = RankState(rank=rank)
        with contextlib.suppress(OSError, ValueError):
            state = RankState.from_json((self.folder / f"rank{rank}.json").read_text(encoding="utf-8"))
        with contextlib.suppress(OSError):
            # The recorder's file is current, the rest is from the last heartbeat.
            recorded = self.recorder_path(rank).read_bytes()
            step, phase_start, phase = read_phase(recorded)
            state = replace(state, entries=tuple(read_entries(recorded)))
            if phase and not state.exit_kind:
                state = replace(state, step=step, phase_start=phase_start, phase=phase)
        return state

    def claim(self, name: str = "diagnosis") -> bool:
        try:
            (self.folder / f"{name}.claim").open("x").close()
        except FileExistsError:
            return False
        return True

    def set(self, name: str, text: str) -> None:
        draft = self.folder / f"{name}.part"
        draft.write_text(text, encoding="utf-8")
        draft.rename(self.folder / f"{name}.txt")

    def get(self, name: str) -> str:
        path = self.folder / f"{name}.txt"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def age(self, name: str) -> float:
        """Seconds since a text was set; infinite if it was not."""
        path = self.folder / f"{name}.txt"
        return time.time() - path.stat().st_mtime if path.exists() else float("inf")


class C10dStateStore(StateStore):
    """A state store in the process group's store, over a connection of its own."""

    def __init__(self, store: Any):
        self._store = store

    def put(self, state: RankState) -> None:
        self._store.set(f"faults/rank{state.rank}", state.to_json())

    def state(self, rank: int) -> RankState:
        text = self.get(f"rank{rank}")
        return RankState.from_json(text) if text else RankState(rank=rank)

    def claim(self, name: str = "diagnosis") -> bool:
        return bool(self._store.add(f"faults/claim/{name}", 1) == 1)

    def set(self, name: str, text: str) -> None:
        self._store.set(f"faults/{name}", text)

    def get(self, name: str) -> str:
        if not self._store.check([f"faults/{name}"]):  # `get` would block
            return ""
        value: bytes = self._store.get(f"faults/{name}")
        return value.decode("utf-8", "replace")
