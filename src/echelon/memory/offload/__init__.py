"""Offload of activations, the transfers between device and host, the disk, and their costs.

Parameters and optimizer states are offloaded by parallel/dp/offload_policy.py (which parameter groups),
parallel/dp/offloaded_state.py (where they live) and optim/host_optimizer.py (the update).
"""
