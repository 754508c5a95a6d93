"""Goodput from a run's log, over all attempts."""

from __future__ import annotations

from echelon.faults.goodput import measure_goodput


def step(number, seconds=2.0, *, skipped=False, waiting=0.5, data=0.1):
    return {"kind": "step", "step": number, "seconds": seconds, "skipped": skipped, "waiting": waiting, "data": data}


def test_one_attempt():
    records = [{"kind": "start", "time": 100.0, "after": 0}, step(1), step(2), {"kind": "evaluation"}, step(3)]
    found = measure_goodput(records, end_time=110.0)
    assert (found.share, found.useful_s, found.wall_s) == (0.6, 6.0, 10.0)
    assert (found.lost_steps, found.restarts) == (0, 0)
    assert (found.waiting_s, round(found.data_s, 6)) == (1.5, 0.3)
    assert found.summary() == "60.0 % goodput, 25 % of it waiting for other ranks"


def test_a_skipped_step_is_lost():
    found = measure_goodput([{"kind": "start", "time": 0.0, "after": 0}, step(1), step(2, skipped=True)], end_time=10.0)
    assert (found.useful_s, found.lost_s, found.lost_steps) == (2.0, 2.0, 1)


def test_steps_after_the_last_checkpoint_are_lost_with_a_restart():
    first = [{"kind": "start", "time": 0.0, "after": 0}, *(step(n) for n in (1, 2, 3, 4))]
    second = [{"kind": "start", "time": 20.0, "after": 2}, *(step(n) for n in (3, 4, 5))]
    found = measure_goodput([*first, *second], end_time=40.0)
    assert (found.useful_s, found.lost_s, found.lost_steps, found.restarts) == (10.0, 4.0, 2, 1)
    assert (found.share, found.wall_s) == (0.25, 40.0)
    assert "2 steps lost (4.0 s), 1 restart" in found.summary()


def test_steps_before_a_rollback_are_lost():
    back = {"kind": "rollback", "after": 2, "skipped_batches": [4]}
    records = [{"kind": "start", "time": 0.0, "after": 0}, *(step(n) for n in (1, 2, 3, 4)), back, step(3), step(4)]
    found = measure_goodput(records, end_time=20.0)
    assert (found.useful_s, found.lost_s, found.lost_steps, found.restarts) == (8.0, 4.0, 2, 0)


def test_no_step_at_all():
    assert measure_goodput([], end_time=5.0).share == 0.0
