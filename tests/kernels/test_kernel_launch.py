"""A launch that is like one before it takes what Triton chose then; one that is not asks again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.kernels import kernel_launch as room
from echelon.kernels.kernel_launch import launch


class Compiled:
    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *given: self.launches.append((grid, given))


class Kernel:
    """Compiles at every call, as Triton's would where it knows nothing."""

    def __init__(self) -> None:
        self.arg_names = ["x_ptr", "row", "CHUNK", "SIZE"]
        self.made: list[Compiled] = []

    def __getitem__(self, _grid: tuple[int, ...]) -> Any:
        def call(*_given: Any, **_constants: Any) -> Compiled:
            self.made.append(Compiled())
            return self.made[-1]

        return call


def test_equal_signatures_reuse_the_compiled_kernel() -> None:
    kernel, x, y = Kernel(), torch.zeros(64), torch.zeros(64)
    launch(kernel, 3, x, 64, CHUNK=32, SIZE=16)
    launch(kernel, 5, y, 64, CHUNK=32, SIZE=16)
    assert len(kernel.made) == 1
    assert kernel.made[0].launches == [((5, 1, 1), (y.data_ptr(), 64, 32, 16))]


def test_different_signatures_are_compiled() -> None:
    kernel, x = Kernel(), torch.zeros(64)
    launch(kernel, 3, x, 64, CHUNK=32, SIZE=16)
    launch(kernel, 3, x[1:], 64, CHUNK=32, SIZE=16)  # its address is no multiple of 16
    launch(kernel, 3, x.half(), 64, CHUNK=32, SIZE=16)
    launch(kernel, 3, x, 65, CHUNK=32, SIZE=16)
    launch(kernel, 3, x, 64, CHUNK=32, SIZE=8)
    launch(kernel, 3, x, 64, CHUNK=32, SIZE=16, num_warps=8)
    assert len(kernel.made) == 6
    assert not any(made.launches for made in kernel.made)


def test_constants_in_another_order_raise() -> None:
    with pytest.raises(TypeError, match="not in the order"):
        launch(Kernel(), 3, torch.zeros(64), 64, SIZE=16, CHUNK=32)


def test_the_launch_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_CACHED", 8)
    monkeypatch.setattr(room, "_compiled", {})
    for row in range(20):
        launch(Kernel(), 1, torch.zeros(4), row, CHUNK=32, SIZE=16)
    assert len(room._compiled) <= 8
