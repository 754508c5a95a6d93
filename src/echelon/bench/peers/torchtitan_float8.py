"""torchtitan's Llama with products in 8 bits: torchao's tensorwise recipe, on all layers but the last."""

from __future__ import annotations

import importlib
from typing import Any

from echelon.bench.measurement import Measurement
from echelon.bench.peers import torchtitan
from echelon.bench.step_timing import StepFunction


def prepare(request: Measurement) -> StepFunction:
    return torchtitan.prepare(request, convert=_to_float8)


def _to_float8(model: Any) -> None:
    float8 = importlib.import_module("torchao.float8")
    recipe = float8.Float8LinearConfig.from_recipe_name("tensorwise")
    float8.convert_to_float8_training(model, config=recipe, module_filter_fn=lambda _, name: "output" not in name)
