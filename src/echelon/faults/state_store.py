"""Where ranks leave what others may need: who was killed cannot be asked.

Ranks that our launcher started write files into its folder: the launcher is there when all of them are gone, and reads
them. Ranks of torchrun and of several machines write into the process group's store, over a connection of their own:
one that hangs in a collective does not hold it, and no shared disk is needed.
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
    def put(self, state: RankState) -> None: ...

    def states(self, world: int) -> list[RankState]:
        """What is known of every rank; of one that never said anything, its number."""
        ...

    def claim(self, what: str = "diagnosis") -> bool:
        """True for the first rank that asks."""
        ...

    def set(self, name: str, text: str) -> None: ...

    def get(self, name: str) -> str:
        """What somebody set, or ""."""
        ...


class FileStateStore:
    """In a folder of this machine."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def recorder_path(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.ring"

    def put(self, state: RankState) -> None:
        # Renamed when complete: a reader never sees half of it. The ring has the operations.
        draft = self.folder / f"rank{state.rank}.draft"
        draft.write_text(state.to_json(entries=False), encoding="utf-8")
        draft.rename(self.folder / f"rank{state.rank}.json")

    def states(self, world: int) -> list[RankState]:
        return [self._state(rank) for rank in range(world)]

    def _state(self, rank: int) -> RankState:
        state = RankState(rank=rank)
        with contextlib.suppress(OSError, ValueError):
            state = RankState.from_json((self.folder / f"rank{rank}.json").read_text(encoding="utf-8"))
        with contextlib.suppress(OSError):
            # The ring is of this moment, the rest of the last heartbeat.
            ring = self.recorder_path(rank).read_bytes()
            step, since, phase = read_phase(ring)
            state = replace(state, entries=tuple(read_entries(ring)))
            if phase and not state.exit_kind:
                state = replace(state, step=step, phase_start=since, phase=phase)
        return state

    def claim(self, what: str = "diagnosis") -> bool:
        try:
            (self.folder / f"{what}.claim").open("x").close()
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
        """Seconds since it was set; endless if it was not."""
        path = self.folder / f"{name}.txt"
        return time.time() - path.stat().st_mtime if path.exists() else float("inf")


class C10dStateStore:
    """In the store of the process group, over a connection of its own. `get` of a key that is not there would block."""

    def __init__(self, store: Any):
        self._store = store

    def put(self, state: RankState) -> None:
        self._store.set(f"faults/rank{state.rank}", state.to_json())

    def states(self, world: int) -> list[RankState]:
        return [self._state(rank) for rank in range(world)]

    def _state(self, rank: int) -> RankState:
        text = self._get(f"faults/rank{rank}")
        return RankState.from_json(text) if text else RankState(rank=rank)

    def claim(self, what: str = "diagnosis") -> bool:
        return bool(self._store.add(f"faults/claim/{what}", 1) == 1)

    def set(self, name: str, text: str) -> None:
        self._store.set(f"faults/{name}", text)

    def get(self, name: str) -> str:
        return self._get(f"faults/{name}")

    def _get(self, key: str) -> str:
        if not self._store.check([key]):
            return ""
        found: bytes = self._store.get(key)
        return found.decode("utf-8", "replace")
