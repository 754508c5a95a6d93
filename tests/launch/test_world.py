from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist

from echelon.launch.rank_pool import RankPool
from echelon.launch.world import World, available_cores, join_process_group, under_launcher


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


def test_an_existing_group_is_joined_and_left_alone(pool: RankPool) -> None:
    for rank, (world, total, threads, backend) in enumerate(pool.run(ranks.joined_twice, 2)):
        assert (world.rank, world.world_size) == (rank, 2)
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
