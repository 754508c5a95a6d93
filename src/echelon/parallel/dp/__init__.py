"""Data parallelism: replication, ZeRO and FSDP sharding, master weights, gradient reduction, offload."""
