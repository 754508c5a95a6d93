"""Single-device models and their named sizes. Importing this loads no torch; building does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from echelon.models.model_config import SIZES, ModelConfig, find_model
from echelon.models.reduced_model import reduced_config

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["SIZES", "ModelConfig", "build", "find_model", "init_weights", "reduced_config"]


def build(
    config: ModelConfig, device: str | torch.device = "cpu", *, dtype: torch.dtype | None = None, seed: int = 0
) -> nn.Module:
    """Build the model of a config with the initial weights of `seed`; on the meta device it has shapes only."""
    import torch

    from echelon.models.gpt import GPT
    from echelon.models.language_model import LanguageModel
    from echelon.models.llama import Llama
    from echelon.models.vision.convnet import ConvNet

    # On meta first: torch's default initialisation would cost time and advance the global generator.
    with torch.device("meta"):
        model = {"gpt": GPT, "llama": Llama, "conv": ConvNet}[config.family](config)
    if dtype is not None:
        model.to(dtype)
    has_data = torch.device(device).type != "meta"
    if has_data:
        model.to_empty(device=device)
    if isinstance(model, LanguageModel):
        model.tie_weights()
    if has_data:
        init_weights(model, seed)
    return model


def init_weights(model: nn.Module, seed: int) -> None:
    """Fill the parameters and buffers of an unsharded model that has a method `initial(name)`.

    The values of a parameter depend on its name: any rank can draw any slice of any parameter. A tied parameter is
    drawn under its first name.
    """
    from torch import nn

    from echelon.moe.gates.gate import Gate

    batch_norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    source: Any = model
    for name, parameter in model.named_parameters():
        source.initial(name).fill(parameter, seed, name)
    for module in model.modules():
        if isinstance(module, batch_norms):
            module.reset_running_stats()
        elif isinstance(module, Gate):
            for name, buffer in module.named_buffers(recurse=False):
                module.initial(name).fill(buffer, seed, name)
