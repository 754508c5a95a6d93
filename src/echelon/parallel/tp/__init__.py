"""Tensor and sequence parallelism in one dimension, after Megatron-LM."""
