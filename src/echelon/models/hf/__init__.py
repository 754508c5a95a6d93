"""hf: see the modules."""
