"""Echelon trains a one-device PyTorch model on many devices. This page is the whole public API.

ec.plan(model, cluster)             which layout, how long, how much memory? needs no device
ec.verify(model, layouts)           does a layout compute what one device computes?
ec.train(config_or_model, ...)      train, on as many ranks as the layout needs
ec.wrap(model, layout)              a drop-in for DDP and FSDP in a loop of your own
ec.Engine(model, layout).step(b)    one exact step on the global batch
ec.compressed("lossless+fp8")       what forward leaves for backward in fewer bytes, around any model
ec.Chain, ec.Link                   where a pipeline may cut a model of your own
ec.Core, ec.Seen                    its attention, for context parallelism
ec.Layout.parse("dp=2,tp=2")        a layout is data
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.layout import Layout, Mesh, ValidationError

if TYPE_CHECKING:
    from echelon.config.run_config import Config
    from echelon.memory.compression.saved_tensor_compression import compressed
    from echelon.models.attention import AttentionContext, CoreAttention
    from echelon.models.pipeline_model import PipelineLayer, PipelineModel
    from echelon.training.engine import Engine
    from echelon.training.run_dir import Run
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
    "compressed",
    "plan",
    "train",
    "verify",
    "wrap",
]

_LATE = {
    "Chain": "echelon.models.pipeline_model",
    "Config": "echelon.config.run_config",
    "Core": "echelon.models.attention",
    "Engine": "echelon.training.engine",
    "Link": "echelon.models.pipeline_model",
    "Report": "echelon.verification.verifier",
    "Run": "echelon.training.run_dir",
    "Seen": "echelon.models.attention",
    "compressed": "echelon.memory.compression.saved_tensor_compression",
    "verify": "echelon.verification.verifier",
    "wrap": "echelon.training.wrap",
}


def __getattr__(name: str) -> object:
    """Imports on first use: torch takes seconds, and reading a layout needs none of it."""
    from importlib import import_module

    if name in ("plan", "train"):
        return import_module({"plan": "echelon.planning", "train": "echelon.training"}[name])
    if name not in _LATE:
        raise AttributeError(f"module 'echelon' has no attribute {name!r}")
    value = getattr(import_module(_LATE[name]), name)
    globals()[name] = value
    return value
