"""Checkpoints beside torch's own: how long training waits for a save, and how fast bytes reach the disk.

    python bench/checkpoint.py [--model gpt2-124m] [--rounds 5] [--folder /tmp]
    python bench/checkpoint.py --device cuda --dtype bfloat16 --batch 16 --tokens 1024

One process, one state (float32 weights and AdamW's two moments), interleaved rounds, medians of ratios:

    blocked    seconds in which the loop stands still, in the call and before the next step's update: ours / torch.save,
               and ours / torch's async_save. On a GPU, all that a save and a step take more than a step
    bandwidth  from the call until the checkpoint exists, flushed to the disk, beside a plain write of as many bytes,
               with nothing else at work
    a step     that runs beside a save, beside one that does not: cores and memory are shared
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import async_save

from echelon import models
from echelon.parallel.parallel_options import ParallelOptions
from echelon.training.engine import Engine
from echelon.training.engine_state import EngineCheckpointer, training_state


def timed(job: Callable[[], object]) -> float:
    begun = time.perf_counter()
    job()
    return time.perf_counter() - begun


class Settled:
    """How long an update waits for the copy."""

    def __init__(self, settle: Callable[[], None]):
        self._settle, self.seconds = settle, 0.0

    def __call__(self) -> None:
        self.seconds += timed(self._settle)


def plain(path: Path, view: memoryview) -> None:
    """A write of the same bytes, and nothing else."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    done = 0
    while done < len(view):
        done += os.write(file, view[done : done + (1 << 24)])
    os.fsync(file)
    os.close(file)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--model", default="gpt2-124m")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--tokens", type=int, default=256, help="of a sequence")
    arguments.add_argument("--batch", type=int, default=1, help="sequences of a step")
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--dtype", default="float32", help="of compute; the state is float32")
    arguments.add_argument("--folder", default=None)
    given = arguments.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=given.folder))
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    device = torch.device(given.device)
    options = ParallelOptions(device=device, compute_dtype=getattr(torch, given.dtype))
    engine = Engine(models.build(models.find_model(given.model), "meta"), "dp=1", options=options)
    with torch.no_grad():
        for state in engine.optimizer.named_states():
            if state.form == "elements":
                state.write(torch.randn(state.piece.stop - state.piece.start, device=device))
    state = {
        item.name: item.read().view(item.shape).clone()
        for item in training_state(engine).items()
        if item.local_slice.stop == item.size
    }
    nbytes = sum(tensor.nbytes for tensor in state.values())
    flat = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    view = memoryview(flat.numpy().data)
    saving = EngineCheckpointer(engine, str(folder / "ours"))
    tokens = torch.randint(0, 1000, (given.batch, given.tokens + 1), device=device)
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}

    def step() -> None:
        engine.step(batch, lr=0.0).wait()
        if device.type == "cuda":
            torch.cuda.synchronize()

    rounds = []
    for number in range(given.rounds + 1):
        step()
        found: dict[str, float] = {"step": timed(step)}
        begun = time.perf_counter()
        saving.save({})
        found["ours"] = time.perf_counter() - begun
        settled = Settled(engine.before_update)
        engine.before_update = settled
        found["step beside it"] = timed(step)
        found["ours"] += settled.seconds
        if device.type == "cuda":  # the host waits for nothing, and the stream may
            found["ours"] = time.perf_counter() - begun - found["step"]
        saving.wait()
        begun = time.perf_counter()
        saving.save({})
        saving.wait()
        found["ours, on disk"] = time.perf_counter() - begun
        found["plain write"] = timed(lambda: plain(folder / "plain", view))
        found["torch.save"] = timed(lambda: torch.save(state, folder / "torch.pt"))
        os.sync()
        begun = time.perf_counter()
        saved = async_save(state, checkpoint_id=folder / "dcp")
        found["async_save"] = time.perf_counter() - begun
        saved.result()  # type: ignore[union-attr]
        found["async_save, written"] = time.perf_counter() - begun
        os.sync()
        for name in ("dcp", "plain", "torch.pt"):
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if number:  # the first makes room
            rounds.append(found)
            print("  ".join(f"{name} {value:.3f} s" for name, value in found.items()), flush=True)
    saving.close()
    shutil.rmtree(folder)

    def ratio(a: str, b: str) -> float:
        return statistics.median(found[a] / found[b] for found in rounds)

    print(f"state: {nbytes / 1e9:.2f} GB, {len(state)} tensors, {len(rounds)} rounds")
    print(f"blocked: {ratio('ours', 'torch.save'):.3f} x torch.save (bar 0.10)")
    print(f"blocked: {ratio('ours', 'async_save'):.3f} x async_save (bar 1.0)")
    print(f"a step beside a save: {ratio('step beside it', 'step'):.3f} x one without")
    print(f"bandwidth: {ratio('plain write', 'ours, on disk'):.3f} x a plain write (bar 0.8)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
