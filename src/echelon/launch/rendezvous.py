"""Rendezvous of the ranks of one attempt, before they form a process group: rank 0 publishes a decision to all.

[Note: stale keys in the store]

Under torch's elastic agent the store outlives the ranks. Keys of an earlier attempt are still there, and the agents of
several nodes count restarts independently. So no rank may mistake a stale key for an answer:

      rank 0                                               another rank
       |                                                     | sets  join/RANK = a new unique name
       | reads join/RANK of every rank, old or new           |
       | sets  decision/NAME = the decision  --------------> | waits for decision/ its own NAME
       | waits until ok/TOKEN counts every rank  <---------- | adds one to ok/TOKEN

Rank 0 answers every name that it finds, until all ranks have confirmed. The decision contains a new token, and all
later keys of the attempt start with it.
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
from echelon.launch.world import under_launcher, waiting_for_ranks

T = TypeVar("T")

AGENT_VARIABLE = "TORCHELASTIC_RUN_ID"
"""an environment variable that torch's elastic agent sets"""
IDLE_TIMEOUT = timedelta(days=365)
"""an idle rank waits until the others have finished"""
POLL_S = 0.02
END_KEY = "over"


@dataclass(frozen=True)
class Rendezvous(Generic[T]):
    store: Any
    """of this attempt only"""
    rank: int
    decision: T
    """what rank 0 decided"""

    def announce_end(self) -> None:
        """Release the idle ranks, on rank 0."""
        if self.rank == 0:
            self.store.set(END_KEY, "")

    def idle_until_end(self) -> None:
        """Wait until the others have finished, because a node whose ranks have all exited leaves the run."""
        self.store.wait([END_KEY], IDLE_TIMEOUT)


def under_agent() -> bool:
    """Whether torch's elastic agent started this process."""
    return AGENT_VARIABLE in os.environ and under_launcher()


def join_rendezvous(decide: Callable[[], T], *, timeout: float) -> Rendezvous[T]:
    """Join the rendezvous, on all ranks that the agent started; rank 0 calls `decide`."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    with waiting_for_ranks():
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=rank == 0 and not by_agent,
            timeout=timedelta(seconds=timeout),
            multi_tenant=not by_agent,
            wait_for_workers=False,
        )
        answer = _publish_decision(store, size, decide, timeout) if rank == 0 else _receive_decision(store, rank)
    token, decision = answer
    return Rendezvous(PrefixStore(token, store), rank, decision)


def _publish_decision(store: Any, size: int, decide: Callable[[], T], timeout: float) -> tuple[str, T]:
    token, decision = uuid.uuid4().hex, decide()
    data, answered = serialize((token, decision)), set()
    deadline = time.monotonic() + timeout
    while store.add(f"ok/{token}", 0) < size - 1:
        for other in range(1, size):
            name = store.get(f"join/{other}").decode() if store.check([f"join/{other}"]) else ""
            if name and name not in answered:
                answered.add(name)
                store.set(f"decision/{name}", data)
        if time.monotonic() > deadline:
            missing = size - 1 - store.add(f"ok/{token}", 0)
            raise TimeoutError(f"{missing} of {size} ranks did not join the rendezvous in {timeout:g} s")
        time.sleep(POLL_S)
    return token, decision


def _receive_decision(store: Any, rank: int) -> tuple[str, Any]:
    name = uuid.uuid4().hex
    store.set(f"join/{rank}", name)
    token, decision = deserialize(store.get(f"decision/{name}"))  # waits for it
    store.add(f"ok/{token}", 1)
    return str(token), decision
