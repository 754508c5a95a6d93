"""Products in 8 bits against the same products in 64, and when things are cast."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from devices import DEVICE
from torch import Tensor, nn

from echelon import compat
from echelon.kernels import dispatch, tensor_metadata
from echelon.kernels.gemm import fp8_cast, fused_linear
from echelon.kernels.tensor_metadata import TensorMetadata
from echelon.precision import fp8_linear

KINDS = [fp8_linear.PerTensorFp8, fp8_linear.RowwiseFp8]
BOUND = {fp8_linear.PerTensorFp8: (0.05, 0.08, 0.08), fp8_linear.RowwiseFp8: (0.05, 0.05, 0.05)}
"""relative errors of y, dx and dW for normal numbers: three digits of mantissa, two where the type has more range"""


@dataclass
class Home:
    version: int = 0


def made(rows: int = 40, inputs: int = 64, outputs: int = 48) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = ((rows, inputs), (outputs, inputs), (rows, outputs))
    x, weight, dy = (torch.randn(shape, device=DEVICE).bfloat16() for shape in shapes)
    return x, weight, dy


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [40, 33, 1])
@pytest.mark.parametrize("remade", [False, True])
def test_three_gemms(kind: type[fp8_linear.PerTensorFp8], rows: int, remade: bool) -> None:
    x, weight, dy = made(rows)
    arithmetic = kind()
    y, kept = arithmetic.forward(x, weight, None, None, recomputed=remade)
    if remade:
        assert sum(tensor.numel() for tensor in kept) <= 1
        kept = arithmetic.save_recomputed(x, kept)
    dx, of_weight = arithmetic.backward(dy, weight, None, True)
    assert dx is not None
    place = torch.full_like(weight, float("nan"))
    assert of_weight(kept)(place) is place
    wide = x.double(), weight.double(), dy.double()
    wanted = (wide[0] @ wide[1].t(), wide[2] @ wide[1], wide[2].t() @ wide[0])
    for found, right, bound in zip((y, dx, place), wanted, BOUND[kind], strict=True):
        assert found.dtype == torch.bfloat16
        assert error(found, right) < bound
    assert torch.equal(of_weight(kept)(None), place)


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize(("kind", "gradient"), [(fp8_linear.PerTensorFp8, E5M2), (fp8_linear.RowwiseFp8, E4M3)])
def test_each_gemm_has_the_dtypes_of_its_recipe(
    kind: type[fp8_linear.PerTensorFp8], gradient: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Normal numbers fit both: a gradient in the other dtype is as near as the right one."""
    real, operands = compat.scaled_mm, []

    def recorded(left: Tensor, right: Tensor, *rest: object) -> Tensor:
        operands.append((left.dtype, right.dtype))
        return real(left, right, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(compat, "scaled_mm", recorded)
    x, weight, dy = made()
    arithmetic = kind()
    _, kept = arithmetic.forward(x, weight, None, None, recomputed=False)
    _, of_weight = arithmetic.backward(dy, weight, None, True)
    of_weight(kept)(None)
    assert operands == [(E4M3, E4M3), (gradient, E4M3), (gradient, E4M3)]


@pytest.mark.parametrize("kind", KINDS)
def test_small_gradients_beside_a_large_one_survive(kind: type[fp8_linear.PerTensorFp8]) -> None:
    """Gradients of tokens differ by millions: one scale for all of them requires the range of e5m2."""
    _, weight, dy = made()
    dy[1:] *= 2.0**-24
    dy[0] *= 2.0**6
    dx, _ = kind().backward(dy, weight, None, True)
    assert dx is not None
    wanted = dy.double() @ weight.double()
    assert error(dx[:1], wanted[:1]) < 0.08
    assert error(dx[1:], wanted[1:]) < 0.25


@pytest.mark.parametrize("kind", KINDS)
def test_backward_saves_fp8(kind: type[fp8_linear.PerTensorFp8]) -> None:
    x, weight, _ = made(rows=64)
    _, kept = kind().forward(x, weight, None, None, recomputed=False)
    assert kept[0].dtype == torch.float8_e4m3fn
    assert kept[0].numel() == x.numel()


def test_an_outlier_affects_only_its_row_with_rowwise_scales() -> None:
    x, weight, _ = made()
    x[3, 5] = 1e6
    wanted = x.double() @ weight.double().t()
    others = [row for row in range(len(x)) if row != 3]
    per_tensor, per_row = (
        error(k().forward(x, weight, None, None, recomputed=False)[0][others], wanted[others]) for k in KINDS
    )
    assert per_row < 0.05
    assert per_tensor > 2 * per_row


@pytest.mark.parametrize(("keeps", "wanted"), [(True, [1, 2, 2, 2, 3, 4]), (False, [1, 2, 3, 4, 5, 6])])
def test_how_often_weights_are_cast(keeps: bool, wanted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three microbatches, an update before the last: forward casts rows, backward casts columns."""
    casts: list[Tensor] = []
    real = fp8_cast.cast_to_fp8

    def counting(x: Tensor, *args: object, **named: object) -> object:
        casts.append(x)
        return real(x, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(fp8_linear, "cast_to_fp8", counting)
    x, weight, dy = made()
    home, arithmetic = Home(), fp8_linear.PerTensorFp8(cache_weights=keeps)
    counts = []
    for version in (0, 0, 1):
        home.version = version
        arithmetic.forward(x, weight, None, home, recomputed=False)
        counts.append(sum(cast is weight for cast in casts))
        arithmetic.backward(dy, weight, home, True)
        counts.append(sum(cast is weight for cast in casts))
    assert counts == wanted


def test_an_updated_weight_is_cast_again() -> None:
    x, weight, _ = made()
    home, arithmetic = Home(), fp8_linear.PerTensorFp8(cache_weights=True)
    before, _ = arithmetic.forward(x, weight, None, home, recomputed=False)
    weight.mul_(4)
    home.version += 1
    after, _ = arithmetic.forward(x, weight, None, home, recomputed=False)
    assert error(after, 4 * before.double()) < 1e-6


def test_unsupported_shapes_are_not_computed_in_fp8() -> None:
    arithmetic = fp8_linear.PerTensorFp8()
    assert arithmetic.supports(torch.zeros(32, 48, dtype=torch.bfloat16, device=DEVICE))
    assert not arithmetic.supports(torch.zeros(32, 40, dtype=torch.bfloat16, device=DEVICE))
    assert not arithmetic.supports(torch.zeros(32, 48, device=DEVICE))


def test_only_the_layers_compute_in_fp8() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(16, 16)]), "head": nn.Linear(16, 16)})
    fp8_linear.apply_fp8(model, ["blocks.0"], "fp8-row", cache_weights=False)
    assert isinstance(model.get_submodule("blocks.0").gemms, fp8_linear.RowwiseFp8)
    assert not hasattr(model.get_submodule("head"), "gemms")


def test_linear_layers_of_a_custom_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "use_triton", lambda x: True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))).to(DEVICE).bfloat16()
    x = torch.randn(24, 32, device=DEVICE).bfloat16()
    wanted = nn.Sequential(*(layer for layer in model[0])).double()(x.double())
    model.bfloat16()
    fp8_linear.apply_fp8(model, ["0"], "fp8", cache_weights=False)
    found = model(x)
    assert 0.005 < error(found.detach(), wanted.detach()) < 0.08, "computed in 8 bits, and right"
    found.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="Sequential has no linear layer"):
        fp8_linear.apply_fp8(nn.Sequential(nn.Conv2d(3, 3, 3)), ["0"], "fp8", cache_weights=False)


def test_an_fp8_layer_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through `project`, as a model calls it: gradients of input, weight and bias."""
    monkeypatch.setattr(dispatch, "use_triton", lambda x: True)
    x, weight, dy = made()
    layer = nn.Linear(64, 48).to(DEVICE)
    layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(torch.randn(48, device=DEVICE).bfloat16())
    layer.gemms = fp8_linear.PerTensorFp8()  # type: ignore[assignment]
    given = x.clone().requires_grad_()
    y = fused_linear.project(tensor_metadata.attach(given.view(5, 8, 64), TensorMetadata()), layer)
    assert error(y.detach().view(40, 48), x.double() @ weight.double().t() + layer.bias.detach().double()) < 0.05
    y.backward(dy.view_as(y))
    assert given.grad is not None
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    assert error(given.grad, dy.double() @ weight.double()) < 0.08
    assert error(layer.weight.grad, dy.double().t() @ x.double()) < 0.08
    assert error(layer.bias.grad, dy.double().sum(0)) < 0.01


def test_casts_of_several_weight_versions_are_not_mixed_up() -> None:
    """As an asynchronous pipeline runs them: the home knows the newest version only."""
    x, old, dy = made()
    new = (old * -2).contiguous()
    home, arithmetic = Home(version=1), fp8_linear.PerTensorFp8(cache_weights=True)
    for weight in (old, new):
        arithmetic.forward(x, weight, None, home, recomputed=False)
    for weight in (old, new, old):
        dx, _ = arithmetic.backward(dy, weight, home, True)
        assert dx is not None
        assert error(dx, dy.double() @ weight.double()) < 0.08


def test_a_copy_uses_its_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "use_triton", lambda x: True)
    model = nn.Sequential(nn.Sequential(nn.Linear(32, 16))).to(DEVICE).bfloat16()
    fp8_linear.apply_fp8(model, ["0"], "fp8", cache_weights=False)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin(torch.ones(16, 32, device=DEVICE).bfloat16()).any()
