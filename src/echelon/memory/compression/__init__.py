"""compression: see the modules."""
