"""tp_grid: see the modules."""
