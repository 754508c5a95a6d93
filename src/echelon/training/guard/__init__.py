"""Guards of a run: NaN debugging, loss spikes, silent data corruption."""
