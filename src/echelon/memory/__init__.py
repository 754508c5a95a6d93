"""Ways to need less memory: what is recomputed, what lives elsewhere."""
