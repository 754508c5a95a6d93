"""Names of our layout keys in other frameworks: never accepted, only recognized for "did you mean"."""

from __future__ import annotations

# fmt: off
ALIASES: dict[str, tuple[str, ...]] = {
    "dp": ("data_parallel", "data_parallel_size", "data_parallel_degree", "data_parallel_replicate_degree",
        "ddp", "dp_size", "num_replicas"),
    "zero": ("zero_stage", "stage", "zero_optimization", "fsdp", "fully_shard", "sharding", "distributed_optimizer"),
    "shard": ("hsdp", "shard_size", "sharding_degree", "data_parallel_shard_degree", "dp_shard",
        "zero_hpz_partition_size"),
    "tp": ("tensor", "tensor_parallel", "tensor_parallel_size", "tensor_parallel_degree",
        "tensor_model_parallel_size", "model_parallel", "mp", "mp_size", "tp_size"),
    "tp_kind": ("tensor_parallel_mode", "tp_mode", "tp_type"),
    "depth": ("tesseract_depth", "tp_depth"),
    "sp": ("sequence", "sequence_parallel", "enable_sequence_parallelism", "sequence_parallelism"),
    "cp": ("context", "context_parallel", "context_parallel_size", "context_parallel_degree", "cp_size"),
    "cp_kind": ("cp_comm_type", "cp_mode", "cp_type", "context_parallel_mode", "rotate_method"),
    "ulysses": ("ulysses_degree", "ulysses_size", "ulysses_sequence_parallel_size", "sequence_parallel_size"),
    "pp": ("pipe", "pipeline", "pipeline_parallel", "pipeline_parallel_size", "pipeline_parallel_degree",
        "pipeline_model_parallel_size", "num_stages", "stages", "pp_size"),
    "schedule": ("pipeline_schedule", "pipeline_parallel_schedule", "pp_schedule", "pp_engine"),
    "vpp": ("virtual_pipeline", "virtual_pipeline_size", "virtual_pipeline_model_parallel_size",
        "num_model_chunks", "chunks", "virtual_stages"),
    "ep": ("expert", "expert_parallel", "expert_parallel_size", "expert_model_parallel_size", "ep_size"),
    "etp": ("expert_tensor_parallel", "expert_tensor_parallel_size", "expert_tensor_parallel_degree"),
    "microbatch": ("mbs", "micro", "micro_batch", "micro_batch_size", "microbatch_size",
        "train_micro_batch_size_per_gpu", "per_device_train_batch_size"),
    "accumulate": ("gas", "ga", "accum", "grad_acc", "accumulation", "accumulation_steps",
        "gradient_accumulation", "gradient_accumulation_steps", "grad_accum", "num_microbatches"),
    "recompute": ("checkpoint", "checkpointing", "activation_checkpoint", "activation_checkpointing",
        "gradient_checkpointing", "ac", "remat", "rematerialize", "recompute_granularity", "recomputation"),
    "offload": ("cpu_offload", "offloading", "offload_optimizer", "offload_params", "zero_infinity"),
}
# fmt: on
"""From a layout key to its names elsewhere, in lower case with underscores."""
