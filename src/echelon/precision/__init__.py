"""Numerics: FP8 linear layers, modules kept in fp32, the accumulation dtype of GEMMs, loss scaling."""
