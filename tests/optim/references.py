"""The optimizers once more, in NumPy, from their papers: one parameter at a time, on one device. Nothing of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Array = np.ndarray
State = dict[str, Any]
Reference = Callable[[Array, Array, State, int, float, float], Array]
"""(weights, gradient, state, number of the step from 1, lr, weight decay) to the new weights"""


def matrices(x: Array) -> Iterator[tuple[int, ...]]:
    """Where the matrices of a stack are."""
    return iter(np.ndindex(*x.shape[:-2])) if x.ndim > 2 else iter([()])


def each_matrix(rule: Reference) -> Reference:
    """A stack's matrices are parameters of their own."""

    def of_stack(w: Array, g: Array, state: State, t: int, lr: float, decay: float) -> Array:
        out = np.empty_like(w)
        for place in matrices(w):
            own = state.setdefault(place, {})
            out[place] = rule(w[place], g[place], own, t, lr, decay)
        return out

    return of_stack


def adamw(w, g, state, t, lr, decay, betas=(0.9, 0.95), eps=1e-8):
    m = state["m"] = betas[0] * state.get("m", 0.0) + (1 - betas[0]) * g
    v = state["v"] = betas[1] * state.get("v", 0.0) + (1 - betas[1]) * g**2
    step = (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
    return w - lr * decay * w - lr * step


def sgd(w, g, state, t, lr, decay, momentum=0.9):
    g = g + decay * w
    state["m"] = momentum * state["m"] + g if t > 1 else g
    return w - lr * state["m"]


def lion(w, g, state, t, lr, decay):
    m = state.get("m", 0.0)
    state["m"] = 0.99 * m + 0.01 * g
    return w - lr * (np.sign(0.9 * m + 0.1 * g) + decay * w)


@each_matrix
def lamb(w, g, state, t, lr, decay):
    m = state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * g
    v = state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * g**2
    r = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8) + decay * w
    norms = np.linalg.norm(w), np.linalg.norm(r)
    trust = norms[0] / norms[1] if w.ndim > 1 and min(norms) > 0 else 1.0
    return w - lr * trust * r


def adafactor(momentum=0.0):
    @each_matrix
    def rule(w, g, state, t, lr, decay):
        square, b = g**2 + 1e-30, 1 - t**-0.8
        if w.ndim > 1 and min(w.shape) > 1:
            r = state["r"] = b * state.get("r", 0.0) + (1 - b) * square.sum(1)
            c = state["c"] = b * state.get("c", 0.0) + (1 - b) * square.sum(0)
            v = np.outer(r, c) / r.sum()
        else:
            v = state["v"] = b * state.get("v", 0.0) + (1 - b) * square
        u = g / np.sqrt(v)
        u = u / max(1.0, np.sqrt(np.mean(u**2)))
        move = max(1e-3, np.sqrt(np.mean(w**2))) * lr * u
        if momentum:
            move = state["m"] = momentum * state.get("m", 0.0) + (1 - momentum) * move
        return w - move - lr * decay * w

    return rule


def sm3(momentum=0.0):
    @each_matrix
    def rule(w, g, state, t, lr, decay):
        if w.ndim > 1 and min(w.shape) > 1:
            row, column = state.get("row", np.zeros(w.shape[0])), state.get("column", np.zeros(w.shape[1]))
            v = np.empty_like(w)
            for i in range(w.shape[0]):
                for j in range(w.shape[1]):
                    v[i, j] = min(row[i], column[j]) + g[i, j] ** 2
            state["row"], state["column"] = v.max(1), v.max(0)
        else:
            v = state["v"] = state.get("v", 0.0) + g**2
        move = np.divide(g, np.sqrt(v), out=np.zeros_like(g), where=v > 0)
        if momentum:
            move = state["m"] = momentum * state.get("m", 0.0) + (1 - momentum) * move
        return w - lr * move - lr * decay * w

    return rule


@each_matrix
def muon(w, g, state, t, lr, decay):
    """For matrices inside the model; the quintic in its eigenvalues' form, on the singular values."""
    state["m"] = 0.95 * state.get("m", 0.0) + g
    left, values, right = np.linalg.svd(g + 0.95 * state["m"], full_matrices=False)
    values = values / (np.sqrt((values**2).sum()) + 1e-7)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return w - lr * decay * w - lr * 0.2 * np.sqrt(max(w.shape)) * (left * values) @ right
