"""vision: see the modules."""
