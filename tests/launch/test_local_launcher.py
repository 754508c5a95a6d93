from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks
from cpu_clock import ALWAYS

from echelon.launch.local_launcher import MAX_OUTPUT_LINES, _last_lines, launch_ranks
from echelon.launch.rank_failure import RankError
from echelon.launch.world import available_cores


def test_returns_what_rank_0_returns(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    world, total, threads, backend = launch_ranks(ranks.joined, (0.5,), 2, log_dir=tmp_path / "logs")
    assert (world.rank, world.world_size, world.local_rank) == (0, 2, 0)
    assert (total, backend, world.device.type) == (1.5, "gloo", "cpu")
    assert threads == max(1, available_cores() // 2)
    assert (tmp_path / "logs" / "rank1.log").read_text() == "rank 1 prints\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_restart_keeps_the_log_of_the_failed_attempt(tmp_path: Path) -> None:
    launch_ranks(ranks.fails_at_first, (str(tmp_path / "marker"),), 2, log_dir=tmp_path / "logs", max_restarts=1)
    log = (tmp_path / "logs" / "rank1.log").read_text()
    assert [line for line in log.splitlines() if line.startswith("attempt")] == [
        "attempt after 0 failures",
        "attempt after 1 failures",
    ]


def test_only_rank_0_prints(tmp_path: Path) -> None:
    # In a new process: ranks inherit the output of the fork server, which was started long before this test.
    program = (
        "import ranks; from echelon.launch.local_launcher import launch_ranks; launch_ranks(ranks.joined, (0.5,), 2)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(ranks.__file__).parent, capture_output=True, text=True, timeout=300
    )
    assert (done.stdout, done.stderr) == ("rank 0 prints\n", "")


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"procs=0"):
        launch_ranks(ranks.joined, (0.5,), 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failing_rank_is_reported_once(rank: int, capfd: pytest.CaptureFixture[str]) -> None:
    start_time = time.monotonic()
    with pytest.raises(RankError) as caught:
        launch_ranks(ranks.joined_and, ("fail", rank, "luck"), 2)
    assert time.monotonic() - start_time < ALWAYS  # ranks wait twice as long for each other
    message = str(caught.value)
    assert caught.value.rank == rank
    assert message.startswith(f"rank {rank} of 2 failed in ranks.joined_and (ValueError: no luck on rank {rank})")
    assert message.count("Traceback") == 1
    assert message.endswith(f"ValueError: no luck on rank {rank}")
    # Only the caller that catches the error prints it.
    assert capfd.readouterr() == ("", "")


def test_the_first_of_several_failures_is_reported() -> None:
    with pytest.raises(RankError, match="raised on rank 1") as caught:
        launch_ranks(ranks.joined_and, ("fail_late_elsewhere", 1), 2)
    assert caught.value.rank == 1


def test_a_killed_rank_is_named_with_its_signal() -> None:
    with pytest.raises(RankError, match="SIGKILL") as caught:
        launch_ranks(ranks.joined_and, ("die", 1), 3)
    assert caught.value.rank == 1


def test_the_last_output_of_an_aborted_rank_is_reported(tmp_path: Path) -> None:
    log = tmp_path / "rank1.log"
    stack = [f'  File "f{number}.py", line 1 in g' for number in range(60)]
    log.write_text(
        "\n".join(["old", "what(): sizes differ", "Fatal Python error: Aborted", "", *stack, "Extension modules: x"])
    )
    reported = _last_lines(log)
    assert "what(): sizes differ" in reported
    assert "f0.py" in reported
    assert "Extension modules" not in reported
    assert len(reported.splitlines()) <= 1 + MAX_OUTPUT_LINES
