"""rules: see the modules."""
