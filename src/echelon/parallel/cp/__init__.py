"""Context parallelism: ring, all-gather and Ulysses attention over sharded sequences."""
