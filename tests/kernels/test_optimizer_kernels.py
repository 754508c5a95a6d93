"""Kernels of updates against the plain torch that they replace, bit for bit: weights in every form, any gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from devices import DEVICE
from tiny_engines import tiny
from torch import Tensor, nn

from echelon import models
from echelon.config.sections import OptimizerConfig
from echelon.kernels import dispatch
from echelon.kernels.optim import fused_adamw
from echelon.kernels.optim.split_fp32 import join_halves, split_halves
from echelon.kernels.optim.stochastic_round import ElementIndices
from echelon.optim.blockwise_quantization import BlockQuantizedState, code_boundaries
from echelon.optim.flat_segments import build_flat_segments
from echelon.optim.optimizer_factory import build_optimizer
from echelon.optim.rules import adamw_int8
from echelon.optim.rules.ema import WeightEMA
from echelon.optim.rules.sgd import FusedSGD
from echelon.optim.stochastic_rounding import StochasticRounding
from echelon.parallel.parallel_options import ParallelOptions
from echelon.training.engine import Engine
from tests.optim.same_gradients import feed

triton = pytest.importorskip("triton")
fused_adamw_triton = pytest.importorskip("echelon.kernels.optim.fused_adamw_triton")
tl, _nearest_code = triton.language, fused_adamw_triton._nearest_code

BOX = ElementIndices(start=3, key=0xFEDCBA98, sizes=(4, 5), strides=(77, 11), base=2**32 - 20)
FORMS = ("whole", "split", "rounded")
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning",  # numpy's: a GPU multiplies modulo 2**32
    "ignore:invalid value encountered:RuntimeWarning",
    "ignore:divide by zero encountered:RuntimeWarning",
)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Kernels run in Triton's interpreter from here on, or plain torch does."""

    def chosen(yes: bool) -> None:
        monkeypatch.setattr(
            dispatch, "use_triton_update", lambda device, dtype=torch.float32: yes and dtype == torch.float32
        )

    return chosen


def weights(size: int, form: str) -> tuple[Tensor, Tensor | None]:
    values = torch.randn(size, device=DEVICE)
    if form != "split":
        return (values.bfloat16() if form == "rounded" else values), None
    high, low = (torch.empty(size, dtype=dtype, device=DEVICE) for dtype in (torch.bfloat16, torch.int16))
    split_halves(values, high, low)
    return high, low


def same(one: Tensor, other: Tensor) -> bool:
    """NaN is NaN."""
    return torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)) and torch.equal(one.isnan(), other.isnan())


@dataclass
class State:
    """AdamW's in 8 bits."""

    high: Tensor
    low: Tensor | None
    mean: BlockQuantizedState
    square: BlockQuantizedState
    step: Tensor

    @classmethod
    def first(cls, size: int, form: str) -> State:
        torch.manual_seed(size)
        blocks = [BlockQuantizedState(size, signed=signed, device=DEVICE) for signed in (True, False)]
        return cls(*weights(size, form), *blocks, torch.zeros((), dtype=torch.int64, device=DEVICE))

    def stepped(self, gradient: Tensor, live: bool = True) -> None:
        self.step += live
        rule = torch.tensor([0.9, 0.95, 1e-8], dtype=torch.float64, device=DEVICE)
        scale = torch.tensor(0.3, dtype=torch.float64, device=DEVICE)
        numbers = fused_adamw.step_constants(
            rule, 1e-2, 0.1, self.step, scale, torch.tensor(live, device=DEVICE), torch.float32
        )
        adamw_int8.update(self.high, self.low, self.mean, self.square, gradient, numbers, self.step, BOX)

    def tensors(self) -> list[Tensor]:
        kept = [self.mean.codes, self.mean.block_amax, self.square.codes, self.square.block_amax]
        return [tensor for tensor in (self.high, self.low, *kept) if tensor is not None]


@pytest.mark.parametrize("size", [1, 255, 256, 1025, 5003])
@pytest.mark.parametrize("form", FORMS)
def test_triton_adamw_int8_equals_plain_torch(size: int, form: str, kernels: Callable[[bool], None]) -> None:
    plain, kernel = State.first(size, form), State.first(size, form)
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.bfloat16)
    for number, kind in enumerate(kinds):
        gradient = (
            torch.randn(size, device=DEVICE).exp() * torch.randn(size, device=DEVICE).sign() * 10.0**-number
        ).to(kind)
        gradient[256:600] = 0  # a block of zeros
        before = [tensor.clone() for tensor in plain.tensors()]
        for state, ours in ((plain, False), (kernel, True)):
            kernels(ours)
            state.stepped(gradient, live=number != 2)
        kernels(False)
        for one, other in zip(plain.tensors(), kernel.tensors(), strict=True):
            assert torch.equal(one, other), number
        if number == 2:
            assert all(torch.equal(a, b) for a, b in zip(before, kernel.tensors(), strict=True))
    assert not torch.equal(plain.high, before[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_nan_stays_in_its_block(bad: float, kernels: Callable[[bool], None]) -> None:
    plain, kernel = State.first(1000, "split"), State.first(1000, "split")
    for number in range(3):
        gradient = torch.randn(1000, device=DEVICE)
        if number:
            gradient[700] = bad
        for state, ours in ((plain, False), (kernel, True)):
            kernels(ours)
            state.stepped(gradient)
    kernels(False)
    for one, other in zip(plain.tensors(), kernel.tensors(), strict=True):
        assert same(one, other)
    assert join_halves(kernel.high[:512], kernel.low[:512]).isfinite().all()
    assert not kernel.square.block_amax[2].isfinite()


@triton.jit
def _codes(shares_ptr, borders_ptr, codes_ptr, size):
    at = tl.arange(0, 1024)
    code = _nearest_code(tl.load(shares_ptr + at, mask=at < size, other=0.0), borders_ptr)
    tl.store(codes_ptr + at, code.to(tl.uint8), mask=at < size)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_at_boundaries_equal_bucketize(signed: bool) -> None:
    borders = code_boundaries(signed, DEVICE)
    up, down = (borders.nextafter(torch.full_like(borders, to)) for to in (2.0, -2.0))
    ends = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0], device=DEVICE)
    shares = torch.cat([borders, up, down, ends, torch.linspace(-1, 1, 255, device=DEVICE)])
    assert len(shares) == 1024
    codes = torch.zeros(len(shares), dtype=torch.uint8, device=DEVICE)
    _codes[(1,)](shares, borders, codes, len(shares))
    assert torch.equal(codes, torch.bucketize(shares, borders).to(torch.uint8))


RULES = {
    "adamw": OptimizerConfig(),
    "bfloat16": OptimizerConfig(states="bfloat16"),
    "int8": OptimizerConfig(states="int8", lr=1e-2),
    "lion": OptimizerConfig(name="lion", lr=1e-2, groups=("embed*:lr=0.5,weight_decay=0.3",)),
    "sgd": OptimizerConfig(name="sgd", lr=1e-2),
    "momentum": OptimizerConfig(name="sgd", lr=1e-2, momentum=0.9),
    "muon": OptimizerConfig(name="muon", lr=1e-2),
}
OPTIONS = {
    "whole": ParallelOptions(device=DEVICE),
    "split": ParallelOptions(device=DEVICE, compute_dtype=torch.bfloat16),
    "rounded": ParallelOptions(device=DEVICE, compute_dtype=torch.bfloat16, master_dtype=torch.bfloat16),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", RULES)
def test_every_rule_with_triton_equals_plain_torch(name: str, form: str, kernels: Callable[[bool], None]) -> None:
    """Four steps of a model, of which the third has no target, with an average of its weights."""
    found = []
    for ours in (False, True):
        kernels(False)
        shape = tiny("llama", vocab=67, width=64, layers=1)
        parallel = Engine(models.build(shape, "meta"), "", RULES[name], options=OPTIONS[form]).parallel
        kernels(ours)
        runs = build_flat_segments(parallel, RULES[name])
        # On a CPU, torch's own optimizer has float32; on a GPU it has not.
        own = form == "whole" and RULES[name].name == "sgd"
        optimizer = FusedSGD(runs, RULES[name]) if own else build_optimizer(parallel, RULES[name])
        average = WeightEMA(runs, 0.9)
        for step in range(4):
            average.step(feed(parallel, optimizer, RULES[name].lr, step))
        masters = [tensor for unit in parallel.sharded_model.param_groups for tensor in unit.master.tensors()]
        found.append([tensor.clone() for tensor in (*masters, *optimizer.states(), *average.states())])
        average.swap()
        found[-1] += [tensor.clone() for tensor in masters]
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


SUMMED = {
    "lamb": OptimizerConfig(name="lamb", lr=1e-2),
    "adafactor": OptimizerConfig(name="adafactor", lr=1e-2),
    "adafactor with momentum": OptimizerConfig(name="adafactor", lr=1e-2, momentum=0.9, weight_decay=0.1),
    "sm3": OptimizerConfig(name="sm3", lr=1e-2),
    "sm3 with momentum": OptimizerConfig(name="sm3", lr=1e-2, momentum=0.9, weight_decay=0.1),
}
"""rules that add up over a matrix: kernels do so in another order"""


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large, self.small, self.vector = (
            nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in ((40, 130), (3, 5), 70)
        )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SUMMED)
def test_matrix_rules_with_triton_are_close_to_plain_torch(
    name: str, form: str, kernels: Callable[[bool], None]
) -> None:
    """Four steps, of which the third has no target; a matrix of several tiles, which none divides."""
    found = []
    for ours in (False, True):
        kernels(False)
        parallel = Engine(Matrices(), "", SUMMED[name], options=OPTIONS[form]).parallel
        first = [unit.master.values().float().clone() for unit in parallel.sharded_model.param_groups]
        kernels(ours)
        optimizer = build_optimizer(parallel, SUMMED[name])
        for step in range(4):
            feed(parallel, optimizer, SUMMED[name].lr, step)
        kernels(False)
        masters = [unit.master.values().float().clone() for unit in parallel.sharded_model.param_groups]
        found.append([*masters, *(state.float().clone() for state in optimizer.states())])
    assert len(found[0]) == len(found[1])
    assert all(float((a - b).abs().max()) > 1e-3 for a, b in zip(first, found[1], strict=False))
    # Stochastic rounding may flip if a sum differs in its last bit: one step of bfloat16.
    close = {"rtol": 2**-7, "atol": 1e-6} if form == "rounded" else {"rtol": 1e-4, "atol": 1e-7}
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, **close)


@pytest.mark.parametrize("place", [ElementIndices(), BOX, ElementIndices(start=2**32 - 5, key=7)])
def test_triton_stochastic_rounding(place: ElementIndices, kernels: Callable[[bool], None]) -> None:
    values = torch.cat(
        [
            torch.randn(2000, device=DEVICE),
            torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")], device=DEVICE),
        ]
    )
    chance = StochasticRounding(place, torch.tensor(11, device=DEVICE))
    kernels(False)
    plain = chance.round_values(values, 77)
    kernels(True)
    assert same(plain, chance.round_values(values, 77))


def test_triton_split_fp32(kernels: Callable[[bool], None]) -> None:
    values = torch.cat(
        [torch.randn(1030, device=DEVICE), torch.tensor([0.0, -0.0, 3.4e38, float("inf"), float("nan")], device=DEVICE)]
    )
    halves = []
    for ours in (False, True):
        kernels(ours)
        high, low = (torch.empty(len(values), dtype=dtype, device=DEVICE) for dtype in (torch.bfloat16, torch.int16))
        split_halves(values, high, low)
        assert same(join_halves(high, low), values)
        halves.append((high.view(torch.int16), low))
    assert all(torch.equal(one, other) for one, other in zip(*halves, strict=True))
