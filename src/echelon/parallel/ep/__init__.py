"""ep: see the modules."""
