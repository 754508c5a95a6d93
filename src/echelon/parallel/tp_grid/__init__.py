"""Tensor parallelism on 2d, 2.5d and 3d grids of ranks; reached through `parallel.tp_strategy` alone."""
