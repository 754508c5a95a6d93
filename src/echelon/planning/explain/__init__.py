"""explain: see the modules."""
