"""`verify --as-configured`: a precision, rule or compression passes, and fails where its code is broken on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import ON_GPU
from torch import Tensor
from torch.nn import functional as F

from echelon.config.run_config import Config
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout, ValidationError
from echelon.models import model_config
from echelon.models.model_config import ModelConfig
from echelon.verification.compare import RankReport, run_and_compare
from echelon.verification.low_precision_reference import RoundedGemms
from echelon.verification.reference_optimizer import _newton_schulz_in_bfloat16, _orthogonalize_by_svd
from echelon.verification.verifier import PRELOAD, LayoutVerdict, Verifier
from echelon.verification.verify_case import VerifyCase
from echelon.verification.verify_request import VerifyRequest, configure_case

LLAMA = replace(
    model_config.find_model("llama-tiny"), layers=2, width=64, heads=4, kv_heads=2, ffn=96, vocab=256, max_seq_len=300
)
MOE = replace(model_config.find_model("moe-tiny"), layers=1)


@dataclass(frozen=True)
class BrokenFunction:
    """A function of the project that multiplies its first tensor by 1.1: a result, or the argument `place`."""

    name: str
    """module:function, or module:class.method"""
    place: int | str | None = None
    factor: float = 1.1

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        module, _, path = self.name.partition(":")
        *classes, name = path.split(".")
        owner: Any = import_module(f"echelon.{module}")
        for each in classes:
            owner = getattr(owner, each)
        right: Callable[..., Any] = getattr(owner, name)

        def wrong(*args: Any, **kwargs: Any) -> Any:
            if self.place is None:
                return self._scaled(right(*args, **kwargs))
            if isinstance(self.place, str):
                kwargs[self.place] = self._scaled(kwargs[self.place])
            else:
                args = (*args[: self.place], self._scaled(args[self.place]), *args[self.place + 1 :])
            return right(*args, **kwargs)

        patch.setattr(owner, name, wrong)

    def _scaled(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return (self._scaled(value[0]), *value[1:])
        return (value * self.factor).to(value.dtype) if hasattr(value, "dtype") else value * self.factor


class BrokenPool:
    """The pool, whose engines run with a broken function; the truth and the reference do not."""

    def __init__(self, pool: RankPool, broken: BrokenFunction):
        self._pool, self._broken = pool, broken

    def run(self, function: Callable[..., Any], world: int, *args: Any, **kwargs: Any) -> list[Any]:
        if function is run_and_compare:
            return self._pool.run(run_broken, world, self._broken, *args, **kwargs)
        return self._pool.run(function, world, *args, **kwargs)


def run_broken(broken: BrokenFunction, case: VerifyCase, layout: str, leave_out: str, truth: Path) -> RankReport:
    with pytest.MonkeyPatch.context() as patch:
        broken.plant(patch)
        return run_and_compare(case, layout, leave_out, truth)


def verdict_of(
    pool: RankPool | BrokenPool, settings: str, layout: str, *, model: ModelConfig = LLAMA, leave_out: str = ""
) -> LayoutVerdict:
    config = Config.load(None, settings.split())
    case, replaced = configure_case(VerifyCase(model=model), config, as_configured=True)
    assert replaced == ()
    return Verifier(pool, case, leave_out).verify_layout(Layout.parse(layout))  # type: ignore[arg-type]


def check_right_and_broken(pool: RankPool, settings: str, layout: str, broken: BrokenFunction) -> None:
    right = verdict_of(pool, settings, layout)
    assert right.passed, right
    assert 0 < right.max_relative <= right.tolerance
    wrong = verdict_of(BrokenPool(pool, broken), settings, layout)
    assert not wrong.passed, wrong
    assert wrong.first_difference is not None, wrong.trouble


NORM = BrokenFunction("models.layers:RMSNorm.forward")
ADAMW, TORCH_ADAMW = (
    BrokenFunction(f"optim.{optimizer}.step", 1)
    for optimizer in ("rules.adamw:FusedAdamW", "torch_optimizer:TorchOptimizer")
)
"""with a wrong learning rate: Adam's update does not depend on the scale of gradients"""
MUON = BrokenFunction("optim.rules.muon:orthogonalize")
ON_CPU: tuple[tuple[str, str, BrokenFunction], ...] = (
    ("dtype=float32", "dp=2,zero=1", TORCH_ADAMW),
    ("dtype=bfloat16", "tp=2", NORM),
    ("dtype=bfloat16 precision.keep_fp32=*norm*", "dp=2,zero=3", NORM),
    ("dtype=bfloat16 precision.reduce=bfloat16", "dp=2,zero=2,accumulate=2", NORM),
    ("dtype=float16", "pp=2,accumulate=2", NORM),
    ("dtype=bfloat16 precision.master=none", "dp=2,zero=1", replace(ADAMW, factor=1.3)),
    ("dtype=bfloat16 optimizer.states=bfloat16", "dp=2,zero=1", ADAMW),
    (
        "dtype=bfloat16 optimizer.states=int8",
        "dp=2,zero=1",
        BrokenFunction("optim.blockwise_quantization:BlockQuantizedState.read"),
    ),
    ("dtype=bfloat16 optimizer.name=muon", "dp=2,zero=1", MUON),
    (
        "dtype=bfloat16 optimizer.name=adafactor",
        "dp=2,zero=1",
        BrokenFunction("optim.rules.adafactor:Adafactor._update_direction"),
    ),
    (
        "dtype=bfloat16 compress=lossless+int8",
        "dp=2",
        BrokenFunction("kernels.activations.blockwise_cast:decode_plain"),
    ),
    ("dtype=bfloat16 optimizer.ema=0.9", "dp=2,zero=1,offload=optimizer", TORCH_ADAMW),
)


@pytest.mark.parametrize(("settings", "layout", "broken"), ON_CPU, ids=[f"{row[0]} {row[1]}" for row in ON_CPU])
def test_a_configuration_passes_and_fails_with_broken_code(
    pool: RankPool, settings: str, layout: str, broken: BrokenFunction
) -> None:
    check_right_and_broken(pool, f"device=cpu {settings}", layout, broken)


def test_a_missing_collective_fails_and_is_named(pool: RankPool) -> None:
    verdict = verdict_of(pool, "device=cpu dtype=bfloat16", "dp=2,tp=2", leave_out="tp:reduce_scatter")
    assert (verdict.passed, verdict.axis) == (False, "tp")


@pytest.mark.parametrize("settings", ["dtype=bfloat16", "dtype=bfloat16 precision.master=none optimizer.name=lion"])
def test_experts_are_compared_although_a_token_may_go_to_another_one(pool: RankPool, settings: str) -> None:
    verdict = verdict_of(pool, f"device=cpu {settings}", "dp=2,ep=2", model=MOE)
    assert verdict.passed, verdict


def test_one_element_rounded_the_other_way_is_within_stochastic_rounding(pool: RankPool) -> None:
    """SGD moves norm weights by less than the roundoff of one of them: whether one is rounded up decides all."""
    verdict = verdict_of(pool, "device=cpu dtype=bfloat16 precision.master=none optimizer.name=sgd", "dp=2,tp=2,zero=1")
    assert verdict.passed, verdict


def test_a_layout_that_contradicts_the_configuration_is_refused_before_ranks_start() -> None:
    settings = ("dtype=bfloat16", "precision.master=none")
    with pytest.raises(ValidationError, match=r"precision.master=none has no effect with offload=optimizer"):
        VerifyRequest(settings=settings, layouts="dp=2; dp=2,offload=optimizer", as_configured=True).resolve()


def test_a_missing_gpu_and_asynchronous_schedules_are_refused() -> None:
    if not ON_GPU:
        with pytest.raises(ValidationError, match="device=cuda requires a GPU"):
            VerifyRequest(settings=["device=cuda"], as_configured=True).resolve()
    with pytest.raises(ValidationError, match="schedule=2bw is compared in float64 only"):
        VerifyRequest(layouts="pp=2,schedule=2bw,accumulate=4", as_configured=True).resolve()


def test_averages_of_rounded_weights_pass(pool: RankPool) -> None:
    verdict = verdict_of(pool, "device=cpu dtype=bfloat16 precision.master=none optimizer.ema=0.99", "dp=2,zero=1")
    assert verdict.passed, verdict


def test_updates_below_their_rounding_are_named_as_not_tested(pool: RankPool) -> None:
    verdict = verdict_of(pool, "device=cpu dtype=bfloat16 precision.master=none", "dp=2,zero=1")
    assert len(verdict.untested) == 5
    assert all("norm" in name for name in verdict.untested)
    assert verdict_of(pool, "device=cpu dtype=bfloat16", "dp=2,zero=1").untested == ()


def test_float64_is_what_verify_runs_anyway() -> None:
    with pytest.raises(ValidationError, match="dtype=float64 is what verify runs without --as-configured"):
        VerifyRequest(settings=["dtype=float64"], as_configured=True).resolve()


@pytest.mark.parametrize("recipe", ["fp8", "fp8-row"])
def test_the_reference_of_fp8_rounds_every_linear_layer(recipe: str) -> None:
    """It once saw none of them: layers that read one input are multiplied together, in a function of their own."""
    case = VerifyCase(model=LLAMA)
    model = case.build("cpu", double=False)
    rounded_weights = []
    batch = case.batch(0, 2)

    class CountedGemms(RoundedGemms):
        def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            y = super()._linear(x, weight, bias)
            if not torch.equal(y, F.linear(x, weight, bias)):
                rounded_weights.append(weight)
            return y

    with CountedGemms(model, recipe):
        model(**batch)
    assert len(rounded_weights) == 7 * LLAMA.layers


def test_newton_schulz_in_bfloat16_is_the_quintic_but_for_rounding() -> None:
    u = torch.randn(48, 32, generator=torch.Generator().manual_seed(0))
    exact, rounded = _orthogonalize_by_svd(u), _newton_schulz_in_bfloat16(u)
    assert 1e-3 < float((rounded - exact).norm() / exact.norm()) < 3e-2


# -- on a GPU ---------------------------------------------------------------------------------------------------------

GEMM = BrokenFunction("precision.fp8_linear:_scaled_gemm")
TRITON_ADAMW = BrokenFunction("optim.rules.adamw:FusedAdamW.step", 1)
ON_A_GPU: tuple[tuple[str, str, BrokenFunction], ...] = (
    ("dtype=bfloat16", "dp=1,accumulate=2", BrokenFunction("kernels.layers.residual_norm_triton:forward")),
    ("dtype=bfloat16", "dp=1", BrokenFunction("kernels.layers.residual_norm_triton:backward")),
    ("dtype=bfloat16", "dp=1,recompute=full", BrokenFunction("kernels.layers.swiglu_triton:forward")),
    ("dtype=bfloat16", "dp=1,recompute=ops", BrokenFunction("kernels.layers.swiglu_triton:backward")),
    ("dtype=bfloat16", "dp=1", BrokenFunction("kernels.layers.cross_entropy_triton:cross_entropy_rows")),
    ("dtype=bfloat16 precision.compute=fp8", "dp=1", GEMM),
    ("dtype=bfloat16 precision.compute=fp8-row", "dp=1", GEMM),
    ("dtype=bfloat16 optimizer.name=muon", "dp=1", MUON),
    (
        "dtype=bfloat16 optimizer.name=adafactor",
        "dp=1",
        BrokenFunction("optim.rules.adafactor:Adafactor.step", 1),
    ),
    ("dtype=bfloat16 optimizer.states=int8", "dp=1", BrokenFunction("optim.rules.adamw_int8:AdamWInt8.step", 1)),
    ("dtype=bfloat16 optimizer.states=bfloat16", "dp=1", TRITON_ADAMW),
    ("dtype=bfloat16 precision.master=none", "dp=1", replace(TRITON_ADAMW, factor=1.3)),
    ("dtype=bfloat16", "dp=1,offload=optimizer", BrokenFunction("optim.host_optimizer:HostOptimizer.step", 1)),
)


@pytest.fixture(scope="module")
def gpu_pool() -> Iterator[RankPool]:
    with RankPool(preload=["pytest", *PRELOAD], device="cuda") as pool:
        yield pool


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize(("settings", "layout", "broken"), ON_A_GPU, ids=lambda value: getattr(value, "name", value))
def test_kernels_of_a_gpu_pass_and_fail_when_they_are_broken(
    gpu_pool: RankPool, settings: str, layout: str, broken: BrokenFunction
) -> None:
    check_right_and_broken(gpu_pool, settings, layout, broken)


def test_sequences_on_a_gpu_fit_the_model(monkeypatch):
    """Each default layout of ec.verify("llama-tiny") failed on a GPU: 257 tokens, and the model takes 256."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    config = Config.load(None, ["dtype=bfloat16", "device=cuda"])
    for name, reduce, seq_len in (("llama-tiny", False, 255), ("llama-1b", False, 257), ("llama-tiny", True, 257)):
        case = VerifyCase(model=model_config.find_model(name), reduce=reduce)
        assert configure_case(case, config, as_configured=True)[0].seq_len == seq_len
