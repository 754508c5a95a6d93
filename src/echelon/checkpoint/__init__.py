"""Checkpoints: logical tensors on disk, written by every rank, read by any layout."""
