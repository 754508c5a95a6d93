"""offload: see the modules."""
