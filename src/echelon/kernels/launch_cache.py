"""Launches a kernel again without asking Triton which of its compiled forms it is, which takes longer than the launch.

Triton compiles a kernel for the types of its arguments, for whether numbers and addresses are multiples of 16, and for
its constants. What it chose is remembered here for arguments that are alike in all of that.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_compiled: dict[tuple[Any, ...], Any] = {}
MAX_CACHED = 4096
"""launches that are remembered; numbers are remembered as they are, and a program with ever new ones starts afresh"""


def launch(kernel: Any, num_programs: int, *given: Tensor | int | float, num_warps: int = 4, **constants: Any) -> None:
    """The kernel's parameters are `given`, in order, then `constants`, by name."""
    key: list[Any] = [kernel, num_warps, *constants.values()]
    passed: list[Any] = []
    for x in given:
        if isinstance(x, Tensor):
            address = x.data_ptr()
            key += (x.dtype, x.device, address % 16 == 0)
            passed.append(address)  # of a tensor Triton would ask the driver where it is
        else:
            key.append(x)
            passed.append(x)
    chosen = _compiled.get(tuple(key))
    if chosen is not None:
        chosen[num_programs, 1, 1](*passed, *constants.values())
        return
    if list(constants) != kernel.arg_names[len(given) :]:
        raise TypeError(f"the kernel's constants are in another order ({kernel.arg_names[len(given) :]})")
    chosen = kernel[(num_programs,)](*given, **constants, num_warps=num_warps)
    if chosen is not None:  # Triton's interpreter compiles nothing
        if len(_compiled) >= MAX_CACHED:
            _compiled.clear()
        _compiled[tuple(key)] = chosen
