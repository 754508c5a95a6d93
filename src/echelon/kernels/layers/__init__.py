"""layers: see the modules."""
