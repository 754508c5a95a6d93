"""cluster: see the modules."""
