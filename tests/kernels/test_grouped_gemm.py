"""Products of runs: rows that belong to no run are cleared by a kernel, and no other is touched."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICE

pytest.importorskip("triton")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (32, 256), (33, 8), (70, 300), (5, 513)])
def test_rows_after_the_last_group_are_zeroed(rows: int, width: int, dtype: torch.dtype) -> None:
    from echelon.kernels.gemm.grouped_gemm_triton import ROWS, zero_rows_after

    torch.manual_seed(0)
    for last in sorted({0, 1, rows // 2, ROWS - 1, ROWS, ROWS + 1, rows - 1, rows} & set(range(rows + 1))):
        # What a product left there may be no number. Beyond the rows there is memory of others.
        memory = torch.randn(rows + 3, width, device=DEVICE).to(dtype)
        memory[last:] = torch.nan
        expected = memory.clone()
        expected[last:rows] = 0
        ends = torch.tensor([last // 3, last // 2, last], dtype=torch.int32, device=DEVICE)
        found = zero_rows_after(memory[:rows], ends)
        assert found.data_ptr() == memory.data_ptr()
        assert torch.equal(memory.nan_to_num(7.0), expected.nan_to_num(7.0)), last
