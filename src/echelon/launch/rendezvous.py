"""Ranks of one attempt meet before they form a group, and the first one tells what they are up to.

[Note: a store that remembers]

Under torch's elastic agent the store outlives the ranks: what those of an earlier attempt left is still there, and the
agents of several machines count restarts each for itself. So nothing that was left may be taken for an answer:

      first rank                                           another rank
       |                                                     | sets  join/RANK = a name that nobody had before
       | reads join/RANK of every rank, old or new           |
       | sets  told/NAME = what it has to tell  -----------> | waits for told/ its own NAME
       | waits until ok/TOKEN counts every rank  <---------- | adds one to ok/TOKEN

The first rank answers whoever is written down, again and again, until as many have understood as there are. What they
are told has a token that is new; all that follows goes by keys that begin with it.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

from echelon.launch.serialize import deserialize, serialize

T = TypeVar("T")

AGENT_VARIABLE = "TORCHELASTIC_RUN_ID"
"""the variable that torch's elastic agent sets"""
IDLE_TIMEOUT = timedelta(days=365)
"""a rank that idles does so until the others are through"""
POLL_S = 0.02
END_KEY = "over"


@dataclass(frozen=True)
class Rendezvous(Generic[T]):
    store: Any
    """of this attempt alone"""
    rank: int
    decision: T
    """what the first rank decided"""

    def announce_end(self) -> None:
        """The first rank says so; who idles may go."""
        if self.rank == 0:
            self.store.set(END_KEY, "")

    def idle_until_end(self) -> None:
        """Until the others are through. A machine whose ranks have all gone would leave the run."""
        self.store.wait([END_KEY], IDLE_TIMEOUT)


def under_agent() -> bool:
    """Whether torch's elastic agent started this process."""
    return AGENT_VARIABLE in os.environ


def join_rendezvous(decide: Callable[[], T], *, timeout: float) -> Rendezvous[T]:
    """All ranks that the agent started call this; `decide` is called on the first."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and not by_agent,
        timeout=timedelta(seconds=timeout),
        multi_tenant=not by_agent,
        wait_for_workers=False,
    )
    token, told = _publish_decision(store, size, decide, timeout) if rank == 0 else _receive_decision(store, rank)
    return Rendezvous(PrefixStore(token, store), rank, told)


def _publish_decision(store: Any, size: int, decide: Callable[[], T], timeout: float) -> tuple[str, T]:
    token, told = uuid.uuid4().hex, decide()
    parcel, answered = serialize((token, told)), set()
    deadline = time.monotonic() + timeout
    while store.add(f"ok/{token}", 0) < size - 1:
        for other in range(1, size):
            name = store.get(f"join/{other}").decode() if store.check([f"join/{other}"]) else ""
            if name and name not in answered:
                answered.add(name)
                store.set(f"told/{name}", parcel)
        if time.monotonic() > deadline:
            missing = size - 1 - store.add(f"ok/{token}", 0)
            raise TimeoutError(
                f"{missing} of {size} ranks did not come to the start ({timeout:g} s); look at their logs"
            )
        time.sleep(POLL_S)
    return token, told


def _receive_decision(store: Any, rank: int) -> tuple[str, Any]:
    name = uuid.uuid4().hex
    store.set(f"join/{rank}", name)
    token, told = deserialize(store.get(f"told/{name}"))  # waits for it
    store.add(f"ok/{token}", 1)
    return str(token), told
