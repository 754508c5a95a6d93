"""Weights on disk: logical tensors in safetensors, and JSON; written by every rank, read by any layout.

Importing this loads no torch.
"""
