"""gemm: see the modules."""
