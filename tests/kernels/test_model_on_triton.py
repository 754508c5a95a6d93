"""A whole model through our kernels, in Triton's interpreter, equals the same model in plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from devices import DEVICE, ON_GPU
from torch import Tensor

from echelon import models
from echelon.config.sections import OptimizerConfig
from echelon.kernels import dispatch
from echelon.kernels.gemm import fused_linear
from echelon.models import model_config
from echelon.models.model_config import ModelConfig
from echelon.parallel.parallel_options import ParallelOptions
from echelon.training.engine import Engine

pytest.importorskip("triton")
MODEL = replace(model_config.find_model("llama-tiny"), layers=2, vocab=67)
TIED = replace(model_config.find_model("gpt-tiny"), layers=2, vocab=67, tied=True, dropout=0.0)
PRODUCTS = {"llama": 4, "gpt": 4}
"""of a layer: q, k and v are one product, as are gate and up"""
BOUND = 2e-4 if ON_GPU else 2e-5
"""of float32 after two updates"""


def trained(
    model: ModelConfig, layout: str, batches: list[dict[str, Tensor]], kernels: str = "auto"
) -> tuple[list[float], list[Tensor]]:
    """Losses and norms of every step, and the weights at the end."""
    options = ParallelOptions(device=DEVICE, kernels=kernels)
    engine = Engine(models.build(model, "meta"), layout, OptimizerConfig(lr=1e-3), clip=1.0, options=options)
    engine.model.train()
    results = [engine.step(batch) for batch in batches]
    return [value for r in results for value in (r.loss, r.norm)], [
        p.detach().clone() for p in engine.model.parameters()
    ]


CASES = [(MODEL, ""), (MODEL, "recompute=ops"), (MODEL, "recompute=full"), (MODEL, "accumulate=2,recompute=ops")]
CASES += [(TIED, "recompute=ops")]


@pytest.mark.parametrize(("model", "layout"), CASES, ids=lambda v: v if isinstance(v, str) else v.family)
def test_training_with_triton_equals_plain_torch(
    model: ModelConfig, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, MODEL.vocab, (2, 2, 6), device=DEVICE)
    batches = [{"tokens": step[:, :-1], "targets": step[:, 1:].clone()} for step in tokens]
    batches[1]["targets"][0, 2:] = -100
    numbers, weights = trained(model, layout, batches, "plain")
    used: list[int] = []
    real = fused_linear._FusedLinear.forward

    def counted(ctx: object, x: Tensor, *rest: object) -> Tensor:
        used.append(1)
        return real(ctx, x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(fused_linear._FusedLinear, "forward", staticmethod(counted))
    monkeypatch.setattr(dispatch, "use_triton", lambda x: dispatch._enabled and x.dtype in dispatch.DTYPES)
    by_kernels, their_weights = trained(model, layout, batches)
    repeats = 2 if "full" in layout else 1
    assert len(used) == 2 * PRODUCTS[model.family] * model.layers * repeats * (2 if "accumulate" in layout else 1)
    assert by_kernels == pytest.approx(numbers, rel=BOUND)
    for found, wanted in zip(their_weights, weights, strict=True):
        assert float((found - wanted).abs().max()) <= BOUND * max(1.0, float(wanted.abs().max()))


def test_kernels_plain_runs_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "use_triton", lambda x: dispatch._enabled and x.dtype in dispatch.DTYPES)
    monkeypatch.setattr(fused_linear._FusedLinear, "forward", staticmethod(lambda *_: pytest.fail("a kernel ran")))
    engine = Engine(models.build(MODEL, "meta"), "", options=ParallelOptions(device=DEVICE, kernels="plain"))
    tokens = torch.randint(0, MODEL.vocab, (2, 9), device=DEVICE)
    assert engine.step({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}).loss > 0
    with pytest.raises(ValueError, match="kernels=fast"):
        ParallelOptions(kernels="fast")
