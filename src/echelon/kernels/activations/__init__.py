"""activations: see the modules."""
