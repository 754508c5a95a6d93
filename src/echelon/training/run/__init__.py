"""run: see the modules."""
