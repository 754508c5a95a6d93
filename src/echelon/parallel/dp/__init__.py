"""dp: see the modules."""
