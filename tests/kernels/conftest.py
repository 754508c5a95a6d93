"""Kernels on a machine without a GPU: Triton's interpreter runs them, statement by statement, on the processor."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
