"""No optimizer asks the device for a number: the host only queues work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_engines import tiny
from torch.utils._python_dispatch import TorchDispatchMode

from echelon import models
from echelon.config.sections import OptimizerConfig
from echelon.optim.flat_segments import build_flat_segments
from echelon.optim.optimizer_factory import build_optimizer
from echelon.optim.rules.ema import WeightEMA
from echelon.parallel.parallel_options import ParallelOptions
from echelon.training.engine import Engine
from tests.optim.same_gradients import feed

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero")


class Asked(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func._schema.name.removeprefix("aten::") not in WAITS, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["adamw", "int8", "sgd", "lion", "lamb", "adafactor", "sm3", "muon"])
def test_an_update_does_not_synchronise_with_the_host(name: str) -> None:
    rule = OptimizerConfig(states="int8") if name == "int8" else OptimizerConfig(name=name)  # type: ignore[arg-type]
    shape = tiny("llama", vocab=67, width=64, layers=1)
    options = ParallelOptions(compute_dtype=torch.bfloat16)  # in two halves, as on a GPU
    parallel = Engine(models.build(shape, "meta"), "accumulate=2", rule, options=options).parallel
    optimizer, average = build_optimizer(parallel, rule), WeightEMA(build_flat_segments(parallel, rule), 0.9)
    feed(parallel, optimizer, rule.lr, 0)
    scale, live = torch.ones((), dtype=torch.float64), torch.tensor(True)
    with Asked():
        optimizer.step(1e-3, scale, live)
        average.step(live)
        average.swap()
    with pytest.raises(AssertionError, match="_local_scalar_dense"), Asked():
        scale.item()
