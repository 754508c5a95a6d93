"""Casts to 8 bits: kernels against plain torch, and what is lost."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICE

from echelon.kernels import tensor_metadata
from echelon.kernels.gemm import fp8_cast
from echelon.kernels.tensor_metadata import TensorMetadata

pytest.importorskip("triton")
TYPES = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(3, 16), (130, 70), (16, 200), (1, 1)])
@pytest.mark.parametrize("by", ["tensor", "row"])
def test_fp8_cast_and_transpose(dtype: torch.dtype, shape: tuple[int, int], by: str) -> None:
    from echelon.kernels.gemm.fp8_cast_triton import cast_to_fp8

    # Values that 8 bits hold exactly: Triton's interpreter does not round to 8 bits as a GPU does.
    torch.manual_seed(0)
    x = torch.randint(-8, 9, shape, device=DEVICE).float()
    one = torch.tensor(2.0, device=DEVICE)
    rows = one if by == "tensor" else 2.0 ** torch.randint(-2, 3, (shape[0], 1), device=DEVICE)
    columns = one if by == "tensor" else 2.0 ** torch.randint(-2, 3, (shape[1], 1), device=DEVICE)
    plain, turned = cast_to_fp8(x, dtype, rows, columns)
    assert plain is not None
    assert turned is not None
    assert torch.equal(plain.float(), fp8_cast.cast_to_fp8_plain(x, dtype, rows).float())
    assert torch.equal(turned.float(), fp8_cast.cast_to_fp8_plain(x.t(), dtype, columns).float())
    only = cast_to_fp8(x, dtype, None, columns)
    assert only[0] is None
    assert only[1] is not None


@pytest.mark.parametrize("shape", [(1, 16), (5, 37), (3, 5000)])
def test_row_amax(shape: tuple[int, int]) -> None:
    from echelon.kernels.gemm.fp8_cast_triton import row_amax

    x = torch.randn(shape, device=DEVICE)
    assert torch.equal(row_amax(x), x.abs().amax(1))


@pytest.mark.parametrize("shape", [(1, 16), (130, 37), (5, 1500)])
def test_column_amax(shape: tuple[int, int]) -> None:
    from echelon.kernels.gemm.fp8_cast_triton import column_amax

    x = torch.randn(shape, device=DEVICE)
    assert torch.equal(column_amax(x), x.abs().amax(0))
    assert torch.equal(column_amax(x), fp8_cast.column_amax(x))


def test_attached_row_amax_is_not_recomputed() -> None:
    x = torch.randn(3, 4, device=DEVICE)
    reported = torch.ones(3, device=DEVICE)
    assert fp8_cast.row_amax(tensor_metadata.attach(x, TensorMetadata(row_amax=reported))) is reported


@pytest.mark.parametrize("dtype", TYPES)
def test_amax_maps_to_the_end_of_the_range_and_zeros_stay(dtype: torch.dtype) -> None:
    x = torch.randn(4, 32, device=DEVICE)
    inverse = fp8_cast.inverse_scale_of(x.abs().max(), dtype)
    found = fp8_cast.cast_to_fp8_plain(x, dtype, inverse).float()
    assert float(found.abs().max()) == torch.finfo(dtype).max
    error = (found * inverse - x).abs() / x.abs()
    assert float(error.median()) < (0.04 if dtype == torch.float8_e4m3fn else 0.08)
    nothing = torch.zeros(4, 32, device=DEVICE)
    found = fp8_cast.cast_to_fp8_plain(nothing, dtype, fp8_cast.inverse_scale_of(nothing.abs().max(), dtype)).float()
    assert not found.any()


def test_nan_stays_nan() -> None:
    from echelon.kernels.gemm.fp8_cast_triton import cast_to_fp8

    x, one = torch.ones(2, 16, device=DEVICE), torch.tensor(1.0, device=DEVICE)
    x[1, 3] = float("nan")
    # In 16 bits, as Triton's interpreter makes a number of what is none in 8; the range is cut alike.
    for found in cast_to_fp8(x, torch.float16, one, one):
        assert found is not None
        assert int(found.isnan().sum()) == 1
    for dtype in TYPES:
        assert int(fp8_cast.cast_to_fp8_plain(x, dtype, one).float().isnan().sum()) == 1


def test_row_amax_of_views() -> None:
    from echelon.kernels.gemm import fp8_cast_triton

    turned, spread = torch.randn(40, 16, device=DEVICE).t(), torch.randn(5, 1, device=DEVICE).expand(5, 16)
    for x in (turned, spread, torch.randn(6, 64, device=DEVICE)[:, ::2]):
        assert torch.equal(fp8_cast_triton.row_amax(x), x.abs().amax(1))
        assert torch.equal(fp8_cast_triton.column_amax(x), x.abs().amax(0))
