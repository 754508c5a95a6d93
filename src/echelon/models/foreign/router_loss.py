"""The balance loss that a class of transformers adds to its loss (`output_router_logits`), for each sequence.

transformers takes the router logits of all layers and tokens of a batch together:

    loss = coefficient · E · sum over e of f_e · P_e      f: choices of an expert per token, P: its mean probability

Both are means over layers and tokens. So [sequences, 2, E] sums are enough, and those of layers on other stages and of
tokens on other ranks are added (parallel/ep/routing_sums.py). Whether a class adds this is tried: its forward runs on
router logits that are given, with the coefficient and the number of choices that its config has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from echelon.models.foreign.float64_casts import float64_casts
from echelon.models.foreign.layer_stack import LayerStack

FLAG = "output_router_logits"
"""key of the config, and keyword of the forward"""
OUTPUT = "router_logits"
TOLERANCE = 1e-9
LAYERS, TOKENS = 3, 5
"""of the trial"""


@dataclass(frozen=True, kw_only=True)
class RouterLoss:
    """What a class adds, and from which of its modules."""

    coefficient: float
    num_experts: int
    k: int
    routers: tuple[str, ...]
    output_index: int
    """of the logits among a router's outputs"""

    def sums(self, logits: Tensor, rows: int, is_token: Tensor | None = None) -> Tensor:
        """[rows, 2, E]: choices of each expert and its probabilities, summed over a layer's tokens but for padding."""
        wide = torch.promote_types(logits.dtype, torch.float32)
        probabilities = logits.reshape(rows, -1, self.num_experts).to(wide).softmax(-1)
        chosen = torch.zeros_like(probabilities).scatter_(2, probabilities.topk(self.k, -1).indices, 1.0)
        both = torch.stack((chosen.detach(), probabilities), dim=1)
        if is_token is None:
            return both.sum(2)
        if len(is_token) != both.shape[2]:
            raise ValueError(
                f"a router sees {both.shape[2]} tokens of a sequence, and this rank has {len(is_token)}, so that its "
                "balance loss cannot be divided; use cp=1, or output_router_logits=false"
            )
        return (both * is_token.to(wide).view(1, 1, -1, 1)).sum(2)

    def of_sequences(self, sums: Tensor) -> Tensor:
        """[rows]: the balance loss of each sequence, times its coefficient."""
        choices, probabilities = sums.unbind(1)
        rows = choices.sum(-1) / self.k  # tokens x layers
        return self.coefficient * self.num_experts * (choices * probabilities).sum(-1) / rows.square()


class RoutingSums(Protocol):
    """Ranks that have other tokens of the same sequences."""

    def is_token(self, device: torch.device) -> Tensor | None:
        """Which of this rank's tokens are no padding; none: all."""
        ...

    def total(self, sums: Tensor) -> Tensor:
        """The sums of all tokens."""
        ...


class KeepsRouterLogits:
    """Keeps the logits of the routers of one layer while it runs."""

    def __init__(self, layer: nn.Module, loss: RouterLoss, routers: list[str]):
        self.loss = loss
        self._logits: list[Tensor] | None = None
        for name in routers:
            layer.get_submodule(name).register_forward_hook(self._keep)

    def _keep(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if self._logits is not None:
            self._logits.append(output[self.loss.output_index] if isinstance(output, tuple) else output)

    def start(self) -> None:
        self._logits = []

    def take(self, rows: int, is_token: Tensor | None) -> Tensor:
        """The sums of the layer that has run."""
        logits, self._logits = self._logits or [], None
        return torch.stack([self.loss.sums(one, rows, is_token) for one in logits]).sum(0)


def find_router_loss(model: Any, stack: LayerStack, num_experts: int) -> RouterLoss | None:
    """Find what a class on the meta device adds to its loss; none if the config does not ask for it.

    Raises ValueError where it is something else than a balance loss of all layers' routers.
    """
    if not getattr(model.config, FLAG, False) or not num_experts:
        return None
    given = _random_logits(num_experts)
    try:
        with torch.no_grad(), float64_casts(torch.float64):
            aux, total = _run(model, stack, given)
    except Exception as error:  # whatever a class raises for an output of another kind
        raise _refuse(model, str(error)) from error
    if aux is None or not torch.is_tensor(aux):
        return None  # the class has no such loss
    added = float(total) - math.log(_num_words(model, stack))
    routers, index = _routers(model, stack)
    for coefficient in _floats(model.config):
        if not abs(coefficient * float(aux) - added) <= TOLERANCE * max(1.0, abs(added)):
            continue
        for k in _choices(model.config, num_experts):
            loss = RouterLoss(
                coefficient=coefficient, num_experts=num_experts, k=k, routers=routers, output_index=index
            )
            sums = torch.stack([loss.sums(logits, 1) for logits in given]).sum(0)
            if abs(float(loss.of_sequences(sums)) - added) <= TOLERANCE:
                return loss
    raise _refuse(model, "it is no balance loss of the routers' choices and probabilities")


def _num_words(model: Any, stack: LayerStack) -> int:
    return int(model.get_parameter(f"{stack.head_name}.weight").shape[0])


def _refuse(model: Any, reason: str) -> ValueError:
    return ValueError(f"the router loss of {type(model).__name__} is not known ({reason}); use {FLAG}=false")


def _random_logits(num_experts: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    return tuple(2 * torch.randn(TOKENS, num_experts, dtype=torch.float64, generator=generator) for _ in range(LAYERS))


def _run(model: Any, stack: LayerStack, given: tuple[Tensor, ...]) -> tuple[Any, Tensor]:
    """The class's own (balance loss, loss), where all words are as likely and routers gave these logits."""
    from transformers.modeling_outputs import MoeModelOutputWithPast

    kind: Any = MoeModelOutputWithPast
    hidden = torch.zeros(1, TOKENS, stack.embedding_size, dtype=torch.float64)
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    output = stack.run_after_base(
        model,
        kind(last_hidden_state=hidden, router_logits=given),
        hidden.new_zeros(1, TOKENS, _num_words(model, stack)),
        input_ids=tokens,
        labels=tokens,
        **{FLAG: True},
    )
    return getattr(output, "aux_loss", None), output.loss


def _routers(model: Any, stack: LayerStack) -> tuple[tuple[str, ...], int]:
    """The modules whose outputs transformers records as router logits, and at which index."""
    base = getattr(model, model.base_model_prefix)
    recorded = next((found[OUTPUT] for part in (base, model) if (found := _recorders(part)) and OUTPUT in found), None)
    target, index = getattr(recorded, "target_class", None), getattr(recorded, "index", 0)
    if not isinstance(target, type):
        raise _refuse(model, "its routers are not one class of modules")
    part = f".{(getattr(recorded, 'layer_name', None) or '').strip('.')}."
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, target) and (part == ".." or part in f".{name}.")
    ]
    outside = [name for name in names if not any(name.startswith(f"{layer}.") for layer in stack.layer_names)]
    if not names or outside:
        raise _refuse(model, "its routers are not in its layers")
    return tuple(names), index


def _recorders(module: Any) -> Any:
    return getattr(module, "_can_record_outputs", None)


def _floats(config: Any) -> Iterator[float]:
    return (value for value in vars(config).values() if isinstance(value, float))


def _choices(config: Any, num_experts: int) -> list[int]:
    numbers = {value for value in vars(config).values() if type(value) is int}
    return sorted(value for value in numbers if 1 <= value <= num_experts)
