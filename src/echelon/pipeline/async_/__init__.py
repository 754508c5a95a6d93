"""async_: see the modules."""
