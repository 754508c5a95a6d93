"""execution: see the modules."""
