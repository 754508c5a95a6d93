"""AdamW in one pass: the kernel against plain torch bit for bit, and plain torch against `torch.optim.AdamW`."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from devices import DEVICE
from torch import Tensor

from echelon.kernels.optim import fused_adamw
from echelon.kernels.optim.split_fp32 import join_halves, split_halves
from echelon.kernels.optim.stochastic_round import ElementIndices, random_bits, stochastic_round

BETAS, EPS, DECAY, LR = (0.9, 0.95), 1e-8, 0.1, 1e-2
FIRST = ElementIndices()
SIZES = [1, 7, 1024, 1025, 5003]


@dataclass
class State:
    high: Tensor
    low: Tensor | None
    mean: Tensor
    square: Tensor
    step: Tensor

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.high, self.low, self.mean, self.square, self.step) if t is not None]

    def clone(self) -> State:
        low = None if self.low is None else self.low.clone()
        return State(self.high.clone(), low, self.mean.clone(), self.square.clone(), self.step.clone())

    def weights(self) -> Tensor:
        return self.high if self.low is None else join_halves(self.high, self.low)


def first(weights: Tensor, *, split: bool, moments: torch.dtype) -> State:
    high, low = weights.clone(), None
    if split:
        high, low = weights.bfloat16(), torch.zeros(len(weights), dtype=torch.int16, device=DEVICE)
        split_halves(weights, high, low)
    zeros = torch.zeros(len(weights), dtype=moments, device=DEVICE)
    return State(high, low, zeros, zeros.clone(), torch.zeros((), dtype=torch.int64, device=DEVICE))


def stepped(
    state: State,
    gradient: Tensor,
    update=fused_adamw.update,
    *,
    num_decayed=0,
    scale=1.0,
    live=True,
    betas=BETAS,
    indices=FIRST,
) -> None:
    state.step += live
    rule = torch.tensor([*betas, EPS], dtype=torch.float64, device=DEVICE)
    factor = torch.tensor(scale, dtype=torch.float64, device=DEVICE)
    numbers = fused_adamw.step_constants(
        rule, LR, DECAY, state.step, factor, torch.tensor(live, device=DEVICE), torch.float32
    )
    update(
        *(state.high, state.low, state.mean, state.square, gradient, numbers, state.step),
        num_decayed=num_decayed,
        indices=indices,
    )


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's: a GPU multiplies modulo 2**32
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("split", ["whole", "split", "rounded"])
def test_triton_adamw_equals_plain_torch_bit_for_bit(size: int, moments: torch.dtype, split: str) -> None:
    pytest.importorskip("triton")
    from echelon.kernels.optim import fused_adamw_triton

    torch.manual_seed(size)
    plain = first(torch.randn(size, device=DEVICE), split=split == "split", moments=moments)
    if split == "rounded":
        plain.high = plain.high.bfloat16()
    kernel = plain.clone()
    box = ElementIndices(start=3, key=0xFEDCBA98, sizes=(4, 5), strides=(77, 11), base=2**32 - 20)
    for number in range(4):
        kind = (torch.float32, torch.bfloat16, torch.float16, torch.bfloat16)[number]
        gradient = (torch.randn(size, device=DEVICE) * 10.0 ** -(2 * number)).to(kind)
        indices = box if number % 2 else ElementIndices(start=2**32 - 5)
        choices = {"num_decayed": size * number // 3, "scale": 0.3, "live": number != 2, "indices": indices}
        stepped(plain, gradient, **choices)
        stepped(kernel, gradient, fused_adamw_triton.update, **choices)
        for one, other in zip(plain.tensors(), kernel.tensors(), strict=True):
            assert torch.equal(one, other)
    assert int(kernel.step) == 3


@pytest.mark.parametrize("split", [False, True])
def test_fused_adamw_equals_torch_adamw(split: bool) -> None:
    torch.manual_seed(0)
    weights = torch.randn(1000, device=DEVICE)
    state = first(weights, split=split, moments=torch.float32)
    decayed, other = (weights[part].clone().requires_grad_() for part in (slice(0, 600), slice(600, None)))
    groups = [{"params": [decayed], "weight_decay": DECAY}, {"params": [other], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    for _ in range(10):
        gradient = torch.randn(1000, device=DEVICE)
        stepped(state, gradient, num_decayed=600, scale=0.5)
        decayed.grad, other.grad = gradient[:600] * 0.5, gradient[600:] * 0.5
        optimizer.step()
    wanted = torch.cat([decayed, other]).detach()
    torch.testing.assert_close(state.weights(), wanted, rtol=1e-5, atol=1e-6)
    if split:
        assert torch.equal(state.high.float(), state.weights().bfloat16().float())


def test_chunk_size_does_not_change_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    whole = first(torch.randn(1000, device=DEVICE), split=True, moments=torch.bfloat16)
    parts, gradient = whole.clone(), torch.randn(1000, device=DEVICE)
    stepped(whole, gradient, num_decayed=333)
    monkeypatch.setattr(fused_adamw, "CHUNK", 64)
    stepped(parts, gradient, num_decayed=333)
    assert all(torch.equal(a, b) for a, b in zip(whole.tensors(), parts.tensors(), strict=True))


def test_a_skipped_step_writes_nothing() -> None:
    """Not even in the first step, whose corrections would divide by zero; nor with gradients that are not numbers."""
    state = first(torch.randn(100, device=DEVICE), split=True, moments=torch.bfloat16)
    for gradient in (torch.full((100,), float("nan"), device=DEVICE), torch.randn(100, device=DEVICE)):
        before = state.clone()
        stepped(state, gradient, live=False)
        assert all(torch.equal(a, b) for a, b in zip(before.tensors(), state.tensors(), strict=True))
        stepped(state, torch.randn(100, device=DEVICE))


def test_stochastic_rounding_has_the_right_mean() -> None:
    x = torch.full((200_000,), 1.0 + 0.3 / 128, device=DEVICE)  # between two neighbours, nearer to the lower
    bits = random_bits(len(x), ElementIndices(), torch.tensor(7, device=DEVICE))
    found = stochastic_round(-x, bits & 0xFFFF)
    assert found.unique().tolist() == [-1.0078125, -1.0]
    assert float((found != -1.0).double().mean()) == pytest.approx(0.3, abs=0.005)
    other = stochastic_round(-x, bits >> 16)
    both = ((found != -1.0) & (other != -1.0)).double().mean()
    assert float(both) == pytest.approx(0.09, abs=0.005), "the two halves of the bits know nothing of each other"
    again = stochastic_round(-x, random_bits(len(x), ElementIndices(), torch.tensor(8, device=DEVICE)) & 0xFFFF)
    assert float((again == found).double().mean()) == pytest.approx(0.58, abs=0.01), "nor do two steps"


def test_stochastic_rounding_keeps_infinities_and_nan() -> None:
    x = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0], device=DEVICE)
    found = stochastic_round(x, torch.full((5,), 0xFFFF, device=DEVICE))
    assert found[:2].tolist() == [float("inf"), float("-inf")]
    assert found[2].isnan()
    assert found[3:].tolist() == [0.0, 0.0]


def test_bfloat16_moments_decay_as_float32_ones_do() -> None:
    """With beta2 = 0.999 and no gradient, v in bfloat16 falls to e^-1 in 1000 steps; to the nearest, it never would."""
    state = first(torch.zeros(4096, device=DEVICE), split=False, moments=torch.bfloat16)
    state.square.fill_(1.0)
    for _ in range(1000):
        stepped(state, torch.zeros(4096, device=DEVICE), betas=(0.9, 0.999))
    assert float(state.square.float().mean()) == pytest.approx(0.3677, rel=0.01)
    assert torch.tensor(0.999, device=DEVICE).bfloat16() == 1.0
