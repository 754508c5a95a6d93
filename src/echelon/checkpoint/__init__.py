"""Weights on disk: logical tensors in safetensors, and JSON. Importing this loads no torch."""
