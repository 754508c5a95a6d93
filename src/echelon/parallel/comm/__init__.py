"""comm: see the modules."""
