"""slices: see the modules."""
