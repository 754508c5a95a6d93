"""Starting ranks: on this machine, under torchrun, and as a pool of warm processes."""
