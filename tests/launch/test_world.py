from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist

from echelon.launch import world
from echelon.launch.local_launcher import launch_ranks
from echelon.launch.rank_pool import RankPool
from echelon.launch.rendezvous import under_agent
from echelon.launch.world import JoinError, World, available_cores, join_process_group, under_launcher
from echelon.layout import ValidationError


def test_without_a_launcher_the_world_is_one_process() -> None:
    assert not under_launcher()
    threads = torch.get_num_threads()
    with join_process_group("cpu") as world:
        assert world == World(device=torch.device("cpu"))
        assert (world.rank, world.world_size, world.local_rank, world.backend) == (0, 1, 0, "")
        assert not dist.is_initialized()
        assert torch.get_num_threads() == threads


def test_auto_chooses_the_available_device() -> None:
    with join_process_group() as world:
        assert world.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="use auto, cpu or cuda"), join_process_group("gpu"):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_a_missing_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ranks=1, devices=0.*device=cpu"), join_process_group("cuda"):
        pass


LEFTOVER = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",  # nothing listens there
}


@pytest.fixture
def leftover(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The variables of a launcher that has ended."""
    for name, value in LEFTOVER.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_leftover_variables_of_a_launcher_are_named(leftover, capfd) -> None:
    leftover.setattr(world, "WAIT_NOTICE_S", 0.0)
    remedy = "if no launcher started this process, unset RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
    with pytest.raises(JoinError) as error, join_process_group("cpu", timeout=0.2):
        pass
    assert str(error.value).startswith("rank 1 of 2 cannot join the others (127.0.0.1:1: ")
    assert str(error.value).endswith(remedy)
    assert "echelon: rank 1 of 2 waits for the other ranks (127.0.0.1:1)" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", "one", "RANK=one is not a number"),
        ("RANK", "2", "RANK=2 is not a rank of WORLD_SIZE=2"),
        ("WORLD_SIZE", "-2", "WORLD_SIZE=-2 is not a number"),
        ("MASTER_PORT", "", "MASTER_PORT is not a number"),
        ("TORCHELASTIC_RESTART_COUNT", "1e9", "TORCHELASTIC_RESTART_COUNT=1e9 is not a number"),
        ("GLOO_SOCKET_IFNAME", "lo,no-such", "GLOO_SOCKET_IFNAME=no-such names no network interface"),
    ],
)
def test_invalid_variables_are_refused(leftover, name, value, words) -> None:
    leftover.setenv(name, value)
    with pytest.raises(ValidationError, match=words):
        world.refuse_bad_environment()


def test_some_variables_alone_mean_nothing(monkeypatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.setenv(name, "seven")
    world.refuse_bad_environment()
    assert not under_launcher()
    assert not under_agent()
    assert world.local_world_size(3) == 3


def test_too_few_open_files_are_refused_before_ranks_start(monkeypatch) -> None:
    limits = [(20, 20), (20, 4096)]
    monkeypatch.setattr(world.resource, "getrlimit", lambda _: limits[0])
    with pytest.raises(ValidationError, match=r"ulimit -n=20 .* too few for 2 rank\(s\), which require 96"):
        launch_ranks(ranks.echo, (), 2)
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(world.resource, "setrlimit", lambda _, given: raised.append(given))
    limits.pop(0)
    world.refuse_bad_environment(2)
    assert raised == [(96, 4096)]


def test_an_existing_group_is_joined_and_left_alone(pool: RankPool) -> None:
    for rank, (joined, total, threads, backend) in enumerate(pool.run(ranks.joined_twice, 2)):
        assert (joined.rank, joined.world_size) == (rank, 2)
        assert (total, threads, backend) == (3.0, 1, "gloo")


SCRIPT = """
import sys
from pathlib import Path
import ranks
from echelon.launch.world import under_launcher
assert under_launcher()
world, total, threads, backend = ranks.joined(0.5)
line = f"{world.rank} {world.world_size} {world.local_rank} {total} {threads} {backend}"
Path(sys.argv[1], f"rank{world.rank}").write_text(line)
"""


@pytest.mark.soak  # in every run, tests/cli and tests/test_examples.py start under torchrun
def test_torchrun_starts_the_same_program(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nsys.path[:0] = {sys.path!r}\n" + SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", script, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]  # one file each: two ranks share stdout
    assert lines == [f"{rank} 2 {rank} 1.5 {max(1, available_cores() // 2)} gloo" for rank in range(2)]
