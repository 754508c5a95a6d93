"""gates: see the modules."""
