"""A run's directory, checkpoints, planned layout and prediction."""
