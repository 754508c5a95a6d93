"""calibrate: see the modules."""
