"""config: see the modules."""
