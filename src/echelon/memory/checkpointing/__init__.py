"""checkpointing: see the modules."""
