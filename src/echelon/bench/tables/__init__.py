"""tables: see the modules."""
