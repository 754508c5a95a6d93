"""Restarts of a run, with the ranks that are left."""
