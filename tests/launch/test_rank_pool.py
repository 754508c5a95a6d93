from __future__ import annotations

import math
import os
import signal
import time

import pytest
import ranks
import torch
import torch.distributed as dist
from cpu_clock import ALWAYS, patient

from echelon.launch.rank_failure import RankError
from echelon.launch.rank_pool import RankPool


def own_rank() -> int:
    return dist.get_rank()


def test_calls_the_function_on_every_rank(pool: RankPool) -> None:
    assert pool.run(ranks.echo, 3, "a", key={"b": 1}) == [(rank, ("a",), {"key": {"b": 1}}) for rank in range(3)]


def test_takes_functions_of_the_test_file(pool: RankPool) -> None:
    assert pool.run(own_rank, 2) == [0, 1]


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_ranks_form_one_group(pool: RankPool, world: int) -> None:
    assert pool.run(ranks.total, world, 0.5) == [0.5 * world * (world + 1) / 2] * world


def test_a_world_without_ranks_is_refused(pool: RankPool) -> None:
    with pytest.raises(ValueError, match=r"world=0"):
        pool.run(ranks.total, 0, 1.0)


def test_a_hundred_tasks_leak_nothing(pool: RankPool) -> None:
    def case(index: int) -> None:
        world = (1, 2, 3, 4)[index % 4]
        if index % 2:
            assert pool.run(ranks.total, world, 1.0)[0] == world * (world + 1) / 2
        else:
            left = torch.arange(16, dtype=torch.float64).reshape(4, 4)
            assert all(torch.equal(product, left @ left) for product in pool.run(ranks.sharded_product, world, 4))

    for index in range(8):
        case(index)
    before = pool.run(ranks.holdings, 4)
    start = sum(pool.run(ranks.cpu_time, 4))
    for index in range(100):
        case(index)
    seconds = sum(pool.run(ranks.cpu_time, 4)) - start
    after = pool.run(ranks.holdings, 4)
    assert [pid for pid, _, _ in before] == [pid for pid, _, _ in after]
    # torch 2.11 caches DTensor's strategies on the last 128 meshes, which hold the sockets and threads of their groups.
    kept = 0 if torch.__version__ >= "2.12" else 3 * 128
    for (_, files, threads), (_, files_after, threads_after) in zip(before, after, strict=True):
        assert files_after <= files + kept
        # gloo and autograd start a few threads when they are first used.
        assert threads_after <= threads + 4 + kept
    assert seconds < 60  # of the CPU, for 250 ranks: they are not started anew


def test_a_task_sees_nothing_of_the_previous_one(pool: RankPool) -> None:
    seen = [pool.run(ranks.settings, 2) for _ in range(2)]
    assert seen[0] == seen[1]
    threads, dtype, _ = seen[0][0]
    assert (threads, dtype) == (1, torch.float32)


def test_large_tensors_come_back_by_value(pool: RankPool) -> None:
    size = 5_000_000
    results = pool.run(ranks.tensors, 2, size)
    for rank, result in enumerate(results):
        whole = torch.arange(size, dtype=torch.float32) + rank
        assert torch.equal(result["whole"], whole)
        assert torch.equal(result["view"], whole[:3])
        assert result["half"].dtype == torch.bfloat16
        assert result["none"].shape == (0,)
        result["whole"] += 1  # a copy, not a rank's memory


def test_an_exception_comes_with_rank_and_traceback_once(pool: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(ranks.fail, 3, 1, "luck", timeout=2 * ALWAYS)
    assert time.monotonic() - start < ALWAYS
    message = str(caught.value)
    assert caught.value.rank == 1
    assert caught.value.reason == "ValueError: no luck on rank 1"
    assert message.startswith("rank 1 of 3 failed in ranks.fail (ValueError: no luck on rank 1)")
    assert message.count("Traceback") == 1
    assert 'raise ValueError(f"no {word} on rank {rank}")' in message
    assert message.endswith("ValueError: no luck on rank 1")
    assert pool.run(ranks.total, 3, 1.0) == [6.0] * 3


def test_the_first_of_several_failures_is_reported(pool: RankPool) -> None:
    with pytest.raises(RankError, match="raised on rank 2") as caught:
        pool.run(ranks.fail_late_elsewhere, 3, 2)
    assert caught.value.rank == 2


def test_a_function_that_a_rank_cannot_import_is_reported(pool: RankPool) -> None:
    with pytest.raises(RankError, match="TypeError"):
        pool.run(ranks.total, 2, 1.0, 2.0)
    with pytest.raises(RankError, match="full_tensor"):
        pool.run(ranks.dtensor, 2)


def test_a_killed_rank_is_named_with_its_signal(pool: RankPool) -> None:
    pids = [pid for pid, _, _ in pool.run(ranks.holdings, 3)]
    start = time.monotonic()
    with pytest.raises(RankError, match="SIGKILL") as caught:
        pool.run(ranks.die, 3, 1, timeout=2 * ALWAYS)
    assert time.monotonic() - start < ALWAYS
    assert caught.value.rank == 1
    again = [pid for pid, _, _ in pool.run(ranks.holdings, 3)]
    assert not set(pids) & set(again)


def test_a_rank_killed_between_tasks_is_replaced(pool: RankPool) -> None:
    pid = pool.run(ranks.holdings, 2)[1][0]
    os.kill(pid, signal.SIGKILL)
    killed = next(rank for rank in pool._ranks if rank.process.pid == pid)
    while killed.alive:  # until the fork server has read its exit code
        time.sleep(0.01)
    assert pool.run(ranks.total, 2, 1.0) == [3.0, 3.0]


def test_a_timeout_names_unfinished_ranks_with_their_stacks(pool: RankPool) -> None:
    start, seconds = time.monotonic(), math.ceil(patient(2.0))
    with pytest.raises(RankError, match=rf"timed out on 2 ranks .* after {seconds} s: 0, 1") as caught:
        pool.run(ranks.sleep_apart, 2, 2 * ALWAYS, timeout=float(seconds))
    assert seconds <= time.monotonic() - start < ALWAYS
    sleeper = str(caught.value).split("rank 1 was in")[1]
    assert "ranks.py" in sleeper
    assert "in sleep" in sleeper
    assert pool.run(ranks.total, 2, 1.0) == [3.0, 3.0]


def test_an_abort_in_gloo_is_reported(pool: RankPool, capfd: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="SIGABRT") as caught:
        pool.run(ranks.mismatch, 2, timeout=2 * ALWAYS)
    assert time.monotonic() - start < ALWAYS
    assert "in mismatch" in str(caught.value)
    assert pool.run(ranks.total, 2, 1.0) == [3.0, 3.0]
