"""An arena for checkpointed inputs on a GPU: memory of tensors, of the allocator, and the fragmentation between.

    python bench/fragments.py [--model llama-1b] [--layers N] [--batch 4] [--seq-len 4096] [--recompute full] [--json]

Each variant runs in a process of its own: without and with the arena, by torch's allocator as it is and with segments
that grow (expandable_segments), which mend most fragmentation by themselves. The length of sequences changes from step
to step, as it does where samples are not packed: that is what leaves holes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

GIB = 1 << 30
VARIANTS = [(arena, expandable) for expandable in (False, True) for arena in (False, True)]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    import time
    from dataclasses import replace

    import torch

    from echelon import models
    from echelon.config.sections import OptimizerConfig
    from echelon.models import model_config
    from echelon.parallel.parallel_options import ParallelOptions
    from echelon.training.engine import Engine

    shape = model_config.override_config(model_config.find_model(options.model), seq_len=options.seq_len)
    shape = replace(shape, layers=options.layers or shape.layers)
    chosen = ParallelOptions(
        device=torch.device("cuda"),
        compute_dtype=torch.bfloat16,
        master_dtype=torch.float32,
        arena=options.arena == "true",
    )
    layout = f"dp=1,microbatch={options.batch},recompute={options.recompute}"
    engine = Engine(models.build(shape, "meta"), layout, OptimizerConfig(lr=1e-4), options=chosen)
    engine.model.train()
    seconds = []
    for step in range(options.steps):
        length = options.seq_len - (step * 7 % 5) * options.seq_len // 16
        ids = torch.randint(0, shape.vocab, (options.batch, length + 1))
        torch.cuda.synchronize()
        begun = time.perf_counter()
        engine.step({"tokens": ids[:, :-1], "targets": ids[:, 1:]}).wait()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    stats = torch.cuda.memory_stats()
    blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
    free = [block["size"] for block in blocks if block["state"] == "inactive"]
    return {
        "step_s": sorted(seconds)[len(seconds) // 2],
        "allocated_peak": stats["allocated_bytes.all.peak"],
        "reserved_peak": stats["reserved_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.current"],
        "allocated": stats["allocated_bytes.all.current"],
        "free_blocks": len(free),
        "largest_free": max(free, default=0),
        "retries": stats["num_alloc_retries"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--recompute", default="full")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--arena", choices=("true", "false"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arena:
        print(json.dumps(measure(options)))
        return
    rows = []
    for arena, expandable in VARIANTS:
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"}
        command = [sys.executable, __file__, *sys.argv[1:], "--arena", str(arena).lower()]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        rows.append({"arena": arena, "expandable": expandable, **json.loads(done.stdout.splitlines()[-1])})
    if options.json:
        print(json.dumps(rows))
        return
    heads = (
        "arena",
        "expandable",
        "step s",
        "allocated GiB",
        "reserved GiB",
        "over",
        "free blocks",
        "largest free GiB",
    )
    print(" | ".join(heads))
    for row in rows:
        over = row["reserved_peak"] / row["allocated_peak"] - 1
        cells = (
            str(row["arena"]),
            str(row["expandable"]),
            f"{row['step_s']:.3f}",
            f"{row['allocated_peak'] / GIB:.2f}",
            f"{row['reserved_peak'] / GIB:.2f}",
            f"{over:.1%}",
            str(row["free_blocks"]),
            f"{row['largest_free'] / GIB:.2f}",
        )
        print(" | ".join(cells))


if __name__ == "__main__":
    main()
