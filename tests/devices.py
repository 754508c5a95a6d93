"""Where kernels run in tests: on the GPU that is there, else on the CPU, through Triton's interpreter (conftest.py)."""

from __future__ import annotations

import os

import torch

DEVICE = torch.device("cpu") if os.environ.get("TRITON_INTERPRET") == "1" else torch.device("cuda", 0)
ON_GPU = DEVICE.type == "cuda"
