"""Memory saving: activation checkpointing, offload to host and disk, compression of saved activations."""
