"""What the references of the gates share: plain NumPy, one number at a time, and slopes by finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon import rng
from echelon.moe import build_gate
from echelon.moe.gates.gate import Gate
from echelon.moe.routing import Routing

Array = NDArray[np.float64]
Dense = tuple[Array, Array]
"""combine weights [G, T, E], and the loss of each group [G]"""


def best(row: Array, k: int) -> list[int]:
    """The indices of the k largest numbers, the first of equals first."""
    return sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]


def softmax(row: Array) -> Array:
    e = [math.exp(v - max(row)) for v in row]
    return np.array(e) / sum(e)


def softplus(x: float) -> float:
    return math.log1p(math.exp(-abs(x))) + max(x, 0.0)


def below(x: float) -> float:
    """The normal distribution."""
    return 0.5 * math.erfc(-x / math.sqrt(2))


def cv_squared(x: Array) -> float:
    mean = sum(x) / len(x)
    return sum((v - mean) ** 2 for v in x) / len(x) / mean**2


def tokens(groups: int, length: int, width: int, seed: int) -> Tensor:
    return torch.randn(groups, length, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gate(name: str, width: int, num_experts: int, k: float, *, seed: int = 0, groups: int = 2, **options: Any) -> Gate:
    """A gate in fp64 with routers large enough for clear choices, whose random numbers are functions of their place."""
    made = build_gate(name, width, num_experts, k, **options).double()
    generator = torch.Generator().manual_seed(100 + seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
    stream = rng.RandomStream(seed)
    stream.samples = torch.arange(10, 10 + groups)
    rng.attach_stream(made, stream)
    return made


def dense(routing: Routing, groups: int) -> Tensor:
    """[G, T, E]: the weight of each expert's output for each token."""
    out = routing.weights.new_zeros(routing.num_tokens, routing.num_experts + 1)
    out = out.index_put((routing.tokens, routing.experts), routing.weights, accumulate=True)
    return out[:, :-1].view(groups, -1, routing.num_experts)


def slopes(f: Callable[..., Dense], inputs: list[Array], pull: Dense, at: list[list[int]]) -> list[Array]:
    """Elements of the gradient of sum(weights * pull) + sum(loss * pull), by central differences."""

    def total() -> float:
        weights, loss = f(*inputs)
        return float((weights * pull[0]).sum() + (loss * pull[1]).sum())

    found = []
    for x, some in zip(inputs, at, strict=True):
        flat, slope, step = x.reshape(-1), [], 1e-6
        for i in some:
            kept = flat[i]
            flat[i] = kept + step
            up = total()
            flat[i] = kept - step
            slope.append((up - total()) / (2 * step))
            flat[i] = kept
        found.append(np.array(slope))
    return found


def same(made: Gate, x: Tensor, reference: Callable[..., Dense], names: tuple[str, ...] = ("weight",)) -> Routing:
    """Values and gradients of a gate equal those of reference(x, *its routers)."""
    x = x.clone().requires_grad_()
    routers = [dict(made.named_parameters())[name] for name in names]
    routing = made(x)
    weights = dense(routing, len(x))
    inputs = [t.detach().numpy().copy() for t in (x, *routers)]
    expected = reference(*inputs)
    np.testing.assert_allclose(weights.detach().numpy(), expected[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(routing.loss.detach().numpy(), expected[1], rtol=1e-11, atol=1e-13)
    source = np.random.default_rng(1)
    pull = (source.normal(size=expected[0].shape), 10 * source.normal(size=expected[1].shape))
    ours = torch.autograd.grad(
        (weights * torch.from_numpy(pull[0])).sum() + (routing.loss * torch.from_numpy(pull[1])).sum(), (x, *routers)
    )
    # A dozen elements each: all of them take most of a test's time.
    at = [source.permutation(x.size)[:12].tolist() for x in inputs]
    for gradient, slope, some in zip(ours, slopes(reference, inputs, pull, at), at, strict=True):
        np.testing.assert_allclose(gradient.flatten()[some].numpy(), slope, rtol=1e-6, atol=1e-8)
    # One expert's weight may be the constant 1.
    assert made.k == 1 or max(float(gradient.abs().max()) for gradient in ours) > 1e-3
    return routing


def accounted(routing: Routing) -> None:
    """Every choice was either kept or dropped, and what was dropped has no weight."""
    kept = routing.experts < routing.num_experts
    assert int(kept.sum()) + int(routing.dropped) == int(routing.load.sum())
    assert not routing.weights[~kept].any()
    counts = torch.bincount(routing.experts[kept], minlength=routing.num_experts)
    assert bool((counts <= routing.load).all())
