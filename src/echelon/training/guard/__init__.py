"""guard: see the modules."""
