"""torchtitan's Llama in its own multi-GPU recipe, run on one GPU; in bf16, or in fp8 by torchao's tensorwise recipe.

Its model, its `apply_fsdp` (float32 master weights, bfloat16 compute), its compiled blocks, its compiled loss, fused
AdamW, clipping. Tested with torchtitan 0.2.2.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from echelon.bench.measurement import Measurement
from echelon.bench.peers.import_stubs import stub_missing_modules
from echelon.bench.step_timing import StepFunction, random_tokens, training_step

UNUSED = (
    *("datasets", "datasets.distributed", "datasets.iterable_dataset", "tokenizers", "einops", "PIL"),
    *("tyro", "tyro.extras", "tyro.conf", "tomli", "tensorboard", "torch.utils.tensorboard", "wandb"),
)
"""packages that torchtitan's files import and its model never calls"""
BLOCK = 256
"""torchtitan rounds the feed-forward size up to a multiple of this"""


def prepare(measurement: Measurement, convert: Callable[[Any], None] | None = None) -> StepFunction:
    """Build the step; `convert` changes the model on the meta device, before it is compiled and sharded."""
    device = torch.device(measurement.device)
    stub_missing_modules(UNUSED)
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # port 0: any free port
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    atexit.register(dist.destroy_process_group)
    parallelize = importlib.import_module("torchtitan.models.llama3.infra.parallelize")
    config = importlib.import_module("torchtitan.config.job_config")

    model = _model(measurement)
    if convert is not None:
        convert(model)
    if measurement.recompute == "full":
        checkpoint = importlib.import_module("torchtitan.distributed.activation_checkpoint")
        checkpoint.apply_ac(model, config.ActivationCheckpoint(mode="full", preserve_rng_state=False))
    parallelize.apply_compile(model, config.Compile(enable=True))
    mesh = dist.device_mesh.init_device_mesh(device.type, (1,))
    parallelize.apply_fsdp(model, mesh, torch.bfloat16, torch.float32, pp_enabled=False)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=device)

    tokens, targets = random_tokens(measurement)
    loss = torch.compile(_loss)
    return training_step(model, lambda: loss(model(tokens), targets))


def prepare_float8(measurement: Measurement) -> StepFunction:
    """Build the step with fp8 matmuls in all layers but the last."""
    return prepare(measurement, convert=_to_float8)


def _to_float8(model: Any) -> None:
    float8 = importlib.import_module("torchao.float8")
    recipe = float8.Float8LinearConfig.from_recipe_name("tensorwise")
    float8.convert_to_float8_training(model, config=recipe, module_filter_fn=lambda _, name: "output" not in name)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))


def _model(measurement: Measurement) -> Any:
    args = importlib.import_module("torchtitan.models.llama3.model.args")
    models = importlib.import_module("torchtitan.models.llama3.model.model")
    ours = measurement.model
    config = args.TransformerModelArgs(
        dim=ours.width,
        n_layers=ours.layers,
        n_heads=ours.heads,
        n_kv_heads=ours.kv_heads,
        vocab_size=ours.vocab,
        multiple_of=min(BLOCK, ours.ffn & -ours.ffn),  # our size, not rounded up
        ffn_dim_multiplier=ours.ffn / (8 * ours.width / 3),
        rope_theta=500_000,
        max_seq_len=measurement.seq_len,
    )
    with torch.device("meta"), contextlib.redirect_stdout(None):
        model = models.Transformer(config)
    counted = sum(parameter.numel() for parameter in model.parameters())
    if counted != ours.parameters:
        raise ValueError(f"torchtitan's model differs from ours ({counted:,} parameters, expected {ours.parameters:,})")
    return model
