"""Display, log and metrics of a run."""
