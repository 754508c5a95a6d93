"""Training: the engine, its step, the loop around it. Importing this package loads no torch."""
