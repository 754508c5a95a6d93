"""Kernels compile for Hopper, on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).parent / "compile_for_hopper.py"
KERNELS = {"norm": 3, "swiglu": 2, "loss": 2, "rope": 2, "cast": 3, "blocks": 2, "fill": 1}
KERNELS |= {"bits": 4, "sparse": 2, "blockwise": 2, "places": 2, "pool": 2}
KERNELS |= {"adamw": 2, "lion": 1, "sgd": 1, "average": 1, "halves": 2}
"""by the first word of their names, how many"""


def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    plain = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**plain, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    names = set(found.stdout.split())
    assert {kind: sum(name.startswith(f"_{kind}") for name in names) for kind in KERNELS} == KERNELS
