"""Initial values of parameters by name, so that any rank can draw any slice of any parameter."""

import math
from typing import Protocol, cast

from torch import nn

from echelon.moe.gates.gate import Gate
from echelon.rng import ONES, ZEROS, Init, normal_init

INIT_STD = 0.02

MATRICES = ("embed", "positions", "head", "q", "k", "v", "kv", "q_down", "kv_down", "gate", "up")
NORMS = ("norm", "norm1", "norm2", "q_norm", "k_norm", "kv_norm")
RESIDUAL = ("o", "down")
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class HasParamInit(Protocol):
    def initial(self, name: str) -> Init: ...


def transformer_init(name: str, layers: int) -> Init:
    """GPT-2's rule: normal with std 0.02, less for projections into the residual stream, norms 1, biases 0."""
    owner, _, attribute = name.rpartition(".")
    module = owner.rpartition(".")[2]
    if attribute == "bias":
        return ZEROS
    if module == "experts":
        return normal_init(INIT_STD / math.sqrt(2 * layers) if attribute == "down" else INIT_STD)
    if module in NORMS:
        return ONES
    if module in RESIDUAL:
        # Each block adds two projections to the residual stream; the variance of their sum stays that of one.
        return normal_init(INIT_STD / math.sqrt(2 * layers))
    if module in MATRICES:
        return normal_init(INIT_STD)
    raise ValueError(f"unknown initialisation of a parameter ({name}); add its module to models/weight_init.py")


def init_weights(model: nn.Module, seed: int) -> None:
    """Fill the parameters and buffers of an unsharded model. A tied parameter is drawn under its first name."""
    source = cast(HasParamInit, model)
    for name, parameter in model.named_parameters():
        source.initial(name).fill(parameter, seed, name)
    for module in model.modules():
        if isinstance(module, BATCH_NORMS):
            module.reset_running_stats()
        elif isinstance(module, Gate):
            for name, buffer in module.named_buffers(recurse=False):
                module.initial(name).fill(buffer, seed, name)
