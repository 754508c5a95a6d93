"""attention: see the modules."""
