"""optim: see the modules."""
