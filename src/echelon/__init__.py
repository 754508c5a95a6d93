"""Echelon trains a one-device PyTorch model on many devices. This page is the complete public API.

ec.plan(model, cluster)             rank layouts by predicted step time and memory; needs no device
ec.verify(model, layouts)           check that layouts compute what one device computes
ec.train(config_or_model, ...)      train on as many ranks as the layout needs
ec.wrap(model, layout)              a drop-in for DDP and FSDP in a custom training loop
ec.Engine(model, layout).step(b)    one exact step on the global batch
ec.add_lora(model, rank=8)          freeze a model and add LoRA adapters
ec.compressed("lossless+fp8")       compress the saved activations of any model
ec.PipelineModel, ec.PipelineLayer  where a pipeline may cut a custom model
ec.CoreAttention, AttentionContext  the attention of a custom model, for context parallelism
ec.Layout.parse("dp=2,tp=2")        a layout is data

Examples in docstrings assume `import echelon as ec` and `import torch`; tests/test_public_api.py runs them.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in typing, whose import takes longer than this module's

if TYPE_CHECKING:
    from echelon.config.run_config import Config
    from echelon.layout import Layout, Mesh, ValidationError
    from echelon.memory.compression.saved_tensor_compression import compressed
    from echelon.models.attention import AttentionContext, CoreAttention
    from echelon.models.lora.add_lora import add_lora
    from echelon.models.pipeline_model import PipelineLayer, PipelineModel
    from echelon.planning.planner import plan
    from echelon.training.engine import Engine
    from echelon.training.run.run_dir import Run
    from echelon.training.start_training import train
    from echelon.training.wrap import wrap
    from echelon.verification.verifier import Report, verify

__all__ = [
    "AttentionContext",
    "Config",
    "CoreAttention",
    "Engine",
    "Layout",
    "Mesh",
    "PipelineLayer",
    "PipelineModel",
    "Report",
    "Run",
    "ValidationError",
    "add_lora",
    "compressed",
    "plan",
    "train",
    "verify",
    "wrap",
]

_MODULES = {
    "AttentionContext": "echelon.models.attention",
    "Config": "echelon.config.run_config",
    "CoreAttention": "echelon.models.attention",
    "Engine": "echelon.training.engine",
    "Layout": "echelon.layout",
    "Mesh": "echelon.layout",
    "PipelineLayer": "echelon.models.pipeline_model",
    "PipelineModel": "echelon.models.pipeline_model",
    "Report": "echelon.verification.verifier",
    "Run": "echelon.training.run.run_dir",
    "ValidationError": "echelon.layout",
    "add_lora": "echelon.models.lora.add_lora",
    "compressed": "echelon.memory.compression.saved_tensor_compression",
    "plan": "echelon.planning.planner",
    "train": "echelon.training.start_training",
    "verify": "echelon.verification.verifier",
    "wrap": "echelon.training.wrap",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use: importing torch takes seconds, and reading a layout needs none of it."""
    from importlib import import_module

    if name not in _MODULES:
        raise AttributeError(f"module 'echelon' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
