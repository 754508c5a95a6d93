"""profile: see the modules."""
