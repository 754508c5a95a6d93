"""Launching ranks: on this node, under torchrun, and as a pool of warm processes."""
