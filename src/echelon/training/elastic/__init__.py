"""elastic: see the modules."""
