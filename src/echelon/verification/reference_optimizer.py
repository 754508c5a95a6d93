"""One-device optimizers that `verify` compares with: torch's, or a rule as its paper states it, on full tensors.

They share hyperparameters and parameter groups with the engine's optimizers, and no code of an update. Each of
`PAPER_RULES` takes a matrix (each one of a stack) or a vector, its gradient, its state and its settings, and returns
the new weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from echelon.optim import optimizer_groups
from echelon.optim.torch_rules import build_torch_optimizer
from echelon.optim.update_rule import UpdateRule, resolve_betas, resolve_momentum

PaperState = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PaperSettings:
    """Hyperparameters of one update of one parameter."""

    step: int
    """from 1"""
    lr: float
    weight_decay: float
    rule: UpdateRule


PaperRule = Callable[[Tensor, Tensor, PaperState, PaperSettings], Tensor]


class ReferenceOptimizer:
    """The configured rule over full parameters, and the moving average of the weights."""

    def __init__(
        self,
        rule: UpdateRule,
        params: Mapping[str, Tensor],
        filters: Collection[str] = (),
        paper_rules: Mapping[str, PaperRule] | None = None,
    ):
        """`filters` are the convolutions' weights: a matrix with a row for each output channel."""
        paper_rules = PAPER_RULES if paper_rules is None else paper_rules
        self._rule, self._params, self._filters, self._num_steps = rule, params, filters, 0
        self._groups = [optimizer_groups.parse(text) for text in rule.groups]
        self._paper_rules = {
            name: paper_rules[rule.name]
            for name, param in params.items()
            if rule.name in paper_rules
            and (rule.name != "muon" or optimizer_groups.is_muon_matrix(rule, name, param.shape))
        }
        others = {name: param for name, param in params.items() if name not in self._paper_rules}
        torch_rule = _adamw_of_muon(rule) if rule.name == "muon" else rule
        self.torch_optimizer = build_torch_optimizer(torch_rule, others) if others else None
        self._states: dict[str, list[PaperState]] = {}
        self.averages = {name: param.detach().clone() for name, param in params.items()} if rule.ema else {}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        self._num_steps += 1
        if self.torch_optimizer is not None:
            for group in self.torch_optimizer.param_groups:
                group["lr"] = lr * group["factor"]
            self.torch_optimizer.step()
        for name, rule in self._paper_rules.items():
            self._update(name, self._params[name], rule, lr)
        for name, average in self.averages.items():
            average.mul_(self._rule.ema).add_(self._params[name], alpha=1 - self._rule.ema)

    def _update(self, name: str, param: Tensor, rule: PaperRule, lr: float) -> None:
        assert param.grad is not None
        own = optimizer_groups.settings_for(self._groups, self._rule, name, decays=param.dim() >= 2)
        settings = PaperSettings(
            step=self._num_steps, lr=lr * own.lr_factor, weight_decay=own.weight_decay, rule=self._rule
        )
        weights, gradients = (self._matrices(name, tensor) for tensor in (param, param.grad))
        states = self._states.setdefault(name, [{} for _ in weights])
        for weight, gradient, state in zip(weights, gradients, states, strict=True):
            weight.copy_(rule(weight, gradient, state, settings))

    def _matrices(self, name: str, tensor: Tensor) -> list[Tensor]:
        """Return views of the matrices of a stack."""
        if name in self._filters:
            return [tensor.flatten(1)]
        return list(tensor.flatten(0, -3)) if tensor.dim() > 2 else [tensor]


def filter_names(model: nn.Module) -> set[str]:
    """Return the names of the convolutions' weights."""
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, convolutions)}


def _adamw_of_muon(rule: UpdateRule) -> UpdateRule:
    decay, groups = rule.weight_decay, rule.groups
    return UpdateRule(lr=rule.lr, betas=resolve_betas(rule), eps=rule.eps, weight_decay=decay, groups=groups)


# -- rules, as their papers state them --------------------------------------------------------------------------------


def _is_factored(w: Tensor) -> bool:
    return w.dim() > 1 and min(w.shape) > 1


def _running_mean(state: PaperState, key: str, beta: float, new: Tensor) -> Tensor:
    state[key] = new * (1 - beta) if key not in state else state[key] * beta + new * (1 - beta)
    mean: Tensor = state[key]
    return mean


def lion(w: Tensor, g: Tensor, state: PaperState, settings: PaperSettings) -> Tensor:
    beta1, beta2 = resolve_betas(settings.rule)
    m = state.get("m", torch.zeros_like(g))
    state["m"] = beta2 * m + (1 - beta2) * g
    return w - settings.lr * (torch.sign(beta1 * m + (1 - beta1) * g) + settings.weight_decay * w)


def lamb(w: Tensor, g: Tensor, state: PaperState, settings: PaperSettings) -> Tensor:
    beta1, beta2 = resolve_betas(settings.rule)
    m = _running_mean(state, "m", beta1, g) / (1 - beta1**settings.step)
    v = _running_mean(state, "v", beta2, g * g) / (1 - beta2**settings.step)
    r = m / (torch.sqrt(v) + settings.rule.eps) + settings.weight_decay * w
    norms = float(w.norm()), float(r.norm())
    trust_ratio = norms[0] / norms[1] if w.dim() > 1 and min(norms) > 0 else 1.0
    return w - settings.lr * trust_ratio * r


def adafactor(w: Tensor, g: Tensor, state: PaperState, settings: PaperSettings) -> Tensor:
    decay_rate, squares = 1 - settings.step**-0.8, g * g + 1e-30
    if _is_factored(w):
        rows = _running_mean(state, "rows", decay_rate, squares.sum(1))
        columns = _running_mean(state, "columns", decay_rate, squares.sum(0))
        # The root of each factor, not of their product, which underflows where gradients are 0.
        u = g / (torch.sqrt(rows / rows.sum())[:, None] * torch.sqrt(columns))
    else:
        u = g / torch.sqrt(_running_mean(state, "v", decay_rate, squares))
    u = u / max(1.0, float(u.square().mean().sqrt()))
    move = max(1e-3, float(w.square().mean().sqrt())) * settings.lr * u
    if momentum := resolve_momentum(settings.rule):
        move = _running_mean(state, "m", momentum, move)
    return w - move - settings.lr * settings.weight_decay * w


def sm3(w: Tensor, g: Tensor, state: PaperState, settings: PaperSettings) -> Tensor:
    if _is_factored(w):
        rows, columns = state.get("rows", w.new_zeros(len(w))), state.get("columns", w.new_zeros(w.shape[1]))
        v = torch.minimum(rows[:, None], columns[None, :]) + g * g
        state["rows"], state["columns"] = v.amax(1), v.amax(0)
    else:
        v = state["v"] = state.get("v", torch.zeros_like(g)) + g * g
    move = torch.where(v > 0, g / torch.sqrt(v), 0.0)
    if momentum := resolve_momentum(settings.rule):
        move = _running_mean(state, "m", momentum, move)
    return w - settings.lr * move - settings.lr * settings.weight_decay * w


def muon(w: Tensor, g: Tensor, state: PaperState, settings: PaperSettings) -> Tensor:
    return _muon(w, g, state, settings, _orthogonalize_by_svd)


def muon_in_bfloat16(w: Tensor, g: Tensor, state: PaperState, settings: PaperSettings) -> Tensor:
    """As Jordan runs it on GPUs: Newton-Schulz steps need no more precision."""
    return _muon(w, g, state, settings, _newton_schulz_in_bfloat16)


def _muon(
    w: Tensor, g: Tensor, state: PaperState, settings: PaperSettings, orthogonalize: Callable[[Tensor], Tensor]
) -> Tensor:
    momentum = resolve_momentum(settings.rule)
    state["m"] = momentum * state.get("m", torch.zeros_like(g)) + g
    move: Tensor = 0.2 * max(w.shape) ** 0.5 * orthogonalize(g + momentum * state["m"])
    return w - settings.lr * settings.weight_decay * w - settings.lr * move


def _orthogonalize_by_svd(u: Tensor) -> Tensor:
    """The quintic of five Newton-Schulz steps, on the singular values."""
    left, values, right = torch.linalg.svd(u, full_matrices=False)
    values = values / (values.norm() + 1e-7)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    orthogonal: Tensor = (left * values) @ right
    return orthogonal


def _newton_schulz_in_bfloat16(u: Tensor) -> Tensor:
    if len(u) > u.shape[1]:
        return _newton_schulz_in_bfloat16(u.T).T
    x: Tensor = u.bfloat16()
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        quartic = torch.addmm(square, square, square, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, quartic, x, beta=3.4445)
    return x.to(u.dtype)


PAPER_RULES: Mapping[str, PaperRule] = {"lion": lion, "lamb": lamb, "adafactor": adafactor, "sm3": sm3, "muon": muon}
