"""tp: see the modules."""
