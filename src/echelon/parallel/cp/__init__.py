"""cp: see the modules."""
