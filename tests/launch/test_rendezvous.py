"""Rendezvous over a store with keys of earlier attempts."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from cpu_clock import ALWAYS
from torch.distributed import TCPStore

from echelon.launch import rendezvous


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=ALWAYS), wait_for_workers=False)


def met(store, size, word):
    """The decision that every rank receives."""
    clients = [TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=ALWAYS)) for _ in range(size)]
    found: dict[int, tuple[str, str]] = {}

    def ask(rank):
        found[rank] = rendezvous._receive_decision(clients[rank], rank)

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    found[0] = rendezvous._publish_decision(clients[0], size, lambda: word, timeout=ALWAYS)
    for thread in threads:
        thread.join()
    return found


def test_all_ranks_get_the_decision_despite_stale_keys(store):
    first = met(store, 3, "first")
    assert {reported for _, reported in first.values()} == {"first"}
    again = met(store, 2, "again")
    assert {reported for _, reported in again.values()} == {"again"}
    tokens = {token for token, _ in [*first.values(), *again.values()]}
    assert len(tokens) == 2


def test_a_missing_rank_is_counted(store):
    with pytest.raises(TimeoutError, match="2 of 3 ranks did not join the rendezvous"):
        rendezvous._publish_decision(store, 3, lambda: "word", timeout=0.2)
