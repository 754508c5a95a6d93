"""Pictures of a run, from what its directory has. No torch."""
