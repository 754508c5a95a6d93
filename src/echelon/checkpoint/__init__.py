"""Checkpoints: logical tensors in safetensors and JSON, written by every rank, read by any layout.

Importing this package loads no torch.
"""
