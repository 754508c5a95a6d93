"""Optimizers on sharded parameters: one optimizer, one file in rules/.

update_rule           hyperparameters; optimizer_groups: learning rate and weight decay by parameter name
optimizer_factory     builds a rank's optimizer from a rule; cost: its bytes, without torch
optimizer_protocol    what the engine asks of an optimizer; optimizer_state: its states by name, for checkpoints
param_shards          a parameter as a rank holds it; matrix_shards: its rows and columns; flat_segments: joined shards
reduced_stats         row, column and norm statistics, all-reduced together
stochastic_rounding   bfloat16 weights without master weights; blockwise_quantization: int8 moments
torch_rules           torch's own AdamW and SGD; torch_optimizer: these on a CPU's shards
host_optimizer        updates on the host, concurrent with the device; offload_support: which rules it supports

rules/adamw  adamw_int8  sgd  lion  ema     elementwise: need nothing but the local shard
rules/adafactor  sm3  lamb                  statistics of full matrices, in one or two small all-reduces per step
rules/muon                                  full matrices, each gathered once by the rank that owns it
"""
