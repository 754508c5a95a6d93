"""Tensor parallelism for any module: an integer program shards its traced operators."""
