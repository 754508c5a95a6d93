"""On a GPU, where the next steps run during the copy of a save: a loaded state equals the saved one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_engines import batch_of, tiny
from torch import Tensor

from echelon import models
from echelon.config.sections import OptimizerConfig
from echelon.parallel.parallel_options import ParallelOptions
from echelon.precision.loss_scale import LossScale
from echelon.training.engine import Engine
from echelon.training.engine_state import EngineCheckpointer, training_state
from echelon.training.guard.deterministic import deterministic_kernels, set_cublas_workspace

SHAPE = tiny(layers=6, width=1024, heads=8, kv_heads=4, ffn=2816, vocab=16001, max_seq_len=512)
"""0.1B parameters: copies take longer than a step does"""
HALF, SCALED = ParallelOptions(compute_dtype=torch.bfloat16), ParallelOptions(compute_dtype=torch.float16)
ALONE = ParallelOptions(compute_dtype=torch.bfloat16, master_dtype=torch.bfloat16)
CASES: dict[str, tuple[str, OptimizerConfig, ParallelOptions]] = {
    "float32": ("dp=1", OptimizerConfig(), ParallelOptions()),
    "master in two halves": ("dp=1", OptimizerConfig(), HALF),
    "no master": ("dp=1", OptimizerConfig(), ALONE),
    "moments in 8 bits": ("dp=1", OptimizerConfig(states="int8"), HALF),
    "moments in 8 bits, no master": ("dp=1", OptimizerConfig(states="int8"), ALONE),
    "moments in bfloat16": ("dp=1", OptimizerConfig(states="bfloat16"), HALF),
    "float16": ("dp=1", OptimizerConfig(), SCALED),
    "average": ("dp=1", OptimizerConfig(ema=0.9), HALF),
    "in backward": ("dp=1", OptimizerConfig(in_backward=True), HALF),
    "lion": ("dp=1", OptimizerConfig(name="lion", lr=1e-4), HALF),
    "sgd": ("dp=1", OptimizerConfig(name="sgd", lr=1e-2, momentum=0.9), HALF),
    "lamb": ("dp=1", OptimizerConfig(name="lamb"), HALF),
    "adafactor": ("dp=1", OptimizerConfig(name="adafactor", momentum=0.9), HALF),
    "sm3": ("dp=1", OptimizerConfig(name="sm3", momentum=0.9), HALF),
    "muon": ("dp=1", OptimizerConfig(name="muon"), HALF),
    "states on the host": (
        "offload=optimizer",
        OptimizerConfig(),
        ParallelOptions(compute_dtype=torch.bfloat16, host_share=1.0),
    ),
    "half of them": (
        "offload=optimizer",
        OptimizerConfig(),
        ParallelOptions(compute_dtype=torch.bfloat16, host_share=0.5),
    ),
    "all on the host": (
        "offload=params",
        OptimizerConfig(),
        ParallelOptions(compute_dtype=torch.bfloat16, host_share=1.0),
    ),
    "on disk": (
        "offload=params+disk",
        OptimizerConfig(),
        ParallelOptions(compute_dtype=torch.bfloat16, host_share=1.0),
    ),
}
set_cublas_workspace()
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.fixture(autouse=True)
def repeated() -> Iterator[None]:
    with deterministic_kernels():
        yield


def built(name: str) -> Engine:
    layout, rule, options = CASES[name]
    on_gpu = ParallelOptions(**{**vars(options), "device": torch.device("cuda")})
    scale = LossScale.dynamic(start=2.0**10, every=1) if options is SCALED else None
    clip = 0.0 if rule.in_backward else 1.0
    engine = Engine(models.build(SHAPE, "meta"), layout, rule, clip=clip, options=on_gpu, loss_scale=scale)
    engine.model.train()
    return engine


def values_of(engine: Engine) -> dict[str, Tensor]:
    """The full state, with no operation in flight."""
    engine.drain()
    torch.cuda.synchronize()
    return {item.name: item.read().cpu().clone() for item in training_state(engine).items()}


def trained(engine: Engine, steps: range) -> list[float]:
    """The losses, without host synchronisation between steps."""
    results = [engine.step(batch_of(SHAPE, 4, 512, seed=step), lr=1e-3) for step in steps]
    return [result.loss for result in results]


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(value, other[name])]


@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_a_loaded_state_equals_the_saved_state(tmp_path: Path, name: str) -> None:
    """Twice: the second save reuses the buffer of the first, and later steps change everything that it copies."""
    engine = built(name)
    saving = EngineCheckpointer(engine, str(tmp_path))
    kept: dict[int, dict[str, Tensor]] = {}
    for first in (0, 2):
        trained(engine, range(first, first + 2))
        kept[engine.num_steps] = values_of(engine)
        saving.save({})
    losses = trained(engine, range(4, 6))
    saving.wait()
    end = values_of(engine)
    saving.close()
    engine.close()
    assert differing(kept[4], end)  # all of this can fail
    other = built(name)
    again = EngineCheckpointer(other, str(tmp_path))
    for step in (2, 4):
        again.load(step)
        assert not differing(kept[step], values_of(other))
    resumed = trained(other, range(4, 6))
    again.wait()
    found = values_of(other)
    again.close()
    other.close()
    assert losses == resumed
    assert not differing(found, end)
