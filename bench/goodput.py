"""What failures cost 16,384 devices: parts measured here, bytes and bandwidths from the plan, a run simulated.

    python bench/goodput.py [--quick]

It measures the constants of src/echelon/planning/explain/failure_cost.py: how long training waits for a save beside its
bytes, how long a small checkpoint takes to exist, the time to write and read an index of all ranks' boxes, and the time
of new processes to their first step. Then it runs `echelon plan llama-405b --goodput`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from echelon import models
from echelon.checkpoint.checkpoint_index import FileRegion, digest_line, parse_index
from echelon.checkpoint.save import WrittenFile, build_index
from echelon.planning.explain import failure_cost
from echelon.training.engine import Engine
from echelon.training.engine_state import EngineCheckpointer

WRITERS, GROUPS = 16_384, 256
"""ranks, in groups that share a part of the model"""
BOXES = 36
"""of a rank: three kinds of numbers, four layers, three boxes"""


def save_and_commit(folder: Path) -> tuple[float, float]:
    """Seconds of the call, and until the checkpoint exists, of a state that is small."""
    engine = Engine(models.build(models.find_model("gpt-tiny"), "meta"), "dp=1")
    tokens = torch.randint(0, 200, (4, 33))
    saving, calls, there = EngineCheckpointer(engine, str(folder)), [], []
    for _ in range(8):
        engine.step({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}).wait()
        begun = time.perf_counter()
        saving.save({})
        calls.append(time.perf_counter() - begun)
        saving.wait()
        there.append(time.perf_counter() - begun)
    saving.close()
    return statistics.median(calls), statistics.median(there)


def index(writers: int) -> tuple[float, float, int]:
    """Seconds to put an index together and write it as text, and to read it; its bytes."""
    shards = writers // GROUPS
    written = []
    for rank in range(writers):
        group, shard = divmod(rank, shards)
        row = 4 * shard + (4 * shards if group >= GROUPS // 2 else 0)
        regions = [
            FileRegion(
                f"model.{group % (GROUPS // 2)}.{n}", "F32", (8 * shards, 1024), ((row, row + 4), (0, 1024)), n << 14
            )
            for n in range(BOXES)
        ]
        sums = [(rank, rank)] * BOXES
        written.append(WrittenFile(f"part-{rank:05d}.safetensors", 4096 + (BOXES << 14), "0" * 64, 4096, regions, sums))
    begun = time.perf_counter()
    found = build_index(100, {}, written)
    found.check_complete()
    text = found.to_json()
    made = time.perf_counter() - begun
    begun = time.perf_counter()
    parse_index(text.encode(), digest_line(text).encode(), "here")
    return made, time.perf_counter() - begun, len(text)


def start(folder: Path) -> float:
    """Seconds from the start of a resumed run with two ranks to its first step."""
    common = [sys.executable, "-m", "echelon", "train", "--procs", "2", "--json"]
    settings = {"run": folder / "run", "steps": 4, "batch": 4, "checkpoint.every": 2, "eval.every": 0}
    given = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    subprocess.run([*common, *given, "--set", "sample.tokens=0"], check=True, capture_output=True)
    begun = time.time()
    more = [*common, "--resume", str(folder / "run"), "--set", "steps=5"]
    process = subprocess.Popen(more, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = folder / "run" / "log.jsonl"
    while '"step": 5' not in log.read_text():
        time.sleep(0.02)
        assert process.poll() in (None, 0)
    seconds = time.time() - begun
    process.wait()
    return seconds


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--quick", action="store_true", help="an index of 1,024 ranks, scaled")
    given = arguments.parse_args()
    writers = 1024 if given.quick else WRITERS
    with tempfile.TemporaryDirectory() as folder:
        call, there = save_and_commit(Path(folder) / "small")
        started = start(Path(folder))
    made, read, nbytes = index(writers)
    boxes = writers * BOXES
    print(f"training waits for a small save   {call:.3f} s   (used: {failure_cost.SAVE_S} s)")
    print(f"until it exists                   {there:.3f} s   (used: {failure_cost.COMMIT_S} s)")
    print(f"two ranks start and do a step     {started:.1f} s    (used: {failure_cost.START_S} s)")
    print(
        f"index of {boxes:,} boxes            {made:.1f} s written, {read:.1f} s read, {nbytes / 1e6:.0f} MB: "
        f"{made / boxes:.1e} and {read / boxes:.1e} s a box "
        f"(used: {failure_cost.WRITE_BOX_S} and {failure_cost.READ_BOX_S})"
    )
    command = ["plan", "llama-405b", "--cluster", "16384xh100", "--batch", "2048", "--seq-len", "8192", "--goodput"]
    fixed = ["--layout", "dp=32,tp=8,cp=2,pp=32,schedule=zb-v,accumulate=64", "--json"]
    text = subprocess.run([sys.executable, "-m", "echelon", *command, *fixed], capture_output=True, text=True).stdout
    found = json.loads(text)["goodput"]
    print(json.dumps(found, indent=2))
    print(f"goodput {found['goodput']:.1%} (bar 95 %), worst of the simulated runs {found['goodput_low']:.1%}")


if __name__ == "__main__":
    main()
