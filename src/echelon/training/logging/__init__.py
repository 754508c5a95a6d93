"""logging: see the modules."""
