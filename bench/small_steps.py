"""Steps of small and odd models on one GPU, one after the other without waiting, as training runs them:

    python bench/small_steps.py > bench/measured/h200-small.json

GPT-2 with its vocabulary of 50,257, steps of few tokens that the host launches more slowly than the device computes,
and models of torch's own modules (bench/plain_models.py). Their rows are compared with what the planner predicts
(tests/planning/test_small_steps.py).
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import plain_models
import torch
from torch import nn

from echelon import models
from echelon.bench.reference_shapes import reference_model
from echelon.config.sections import OptimizerConfig
from echelon.parallel.parallel_options import ParallelOptions
from echelon.training.engine import Engine

WARM_UP, STEPS = 4, 10
NAMED = (
    *(("gpt2-124m", 1024, 64), ("gpt2-350m", 1024, 32), ("gpt2-774m", 1024, 16), ("gpt2-1.5b", 1024, 16)),
    *(("gpt2-124m", 1024, 16), ("gpt2-124m", 1024, 8), ("gpt2-350m", 512, 4), ("gpt2-1.5b", 1024, 4)),
    *(("llama-1b", 1024, 1), ("llama-1b", 1024, 2), ("llama-tiny", 128, 8), ("moe-tiny", 1024, 8)),
)
PLAIN = (("gpt_124m", 1024, 32), ("gpt_124m", 1024, 4), ("gpt_350m", 1024, 16), ("gated_800m", 2048, 8))
PLAIN_VOCAB = 32_000
"""tokens are drawn from as many"""


def measure(name: str, build: Callable[[], nn.Module], vocab: int, seq_len: int, batch: int) -> dict[str, object]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    options = ParallelOptions(
        device=torch.device("cuda"),
        compute_dtype=torch.bfloat16,
        master_dtype=torch.float32,
        matmul_precision="same",
    )
    rule = OptimizerConfig(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    engine = Engine(build(), f"dp=1,microbatch={batch},recompute=none", rule, clip=1.0, options=options)
    engine.model.train()
    tokens = torch.randint(0, vocab, (batch, seq_len), device="cuda")
    inputs = {"tokens": tokens, "targets": tokens}
    for _ in range(WARM_UP):
        engine.step(inputs)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(STEPS):
        engine.step(inputs)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / STEPS
    row = {
        "model": name,
        "seq": seq_len,
        "batch": batch,
        "step_s": seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }
    print(json.dumps(row), file=sys.stderr, flush=True)
    engine.close()
    return row


def main() -> None:
    rows = []
    for name, seq_len, batch in NAMED:
        config = reference_model(name, seq_len)
        rows.append(measure(name, lambda config=config: models.build(config, "meta"), config.vocab, seq_len, batch))
    for name, seq_len, batch in PLAIN:
        model = f"{Path(plain_models.__file__).name}:{name}"
        rows.append(measure(model, getattr(plain_models, name), PLAIN_VOCAB, seq_len, batch))
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
