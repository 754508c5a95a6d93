"""Training: the loop and what it needs. Nothing is imported here, so that reading a configuration loads no torch."""
