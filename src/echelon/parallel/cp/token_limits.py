"""Numbers of tokens in a config, made so short that a trial of a few tokens meets them.

A layer may hide what lies beyond a window or a chunk, choose some of the tokens, or scale what is far from the start. A
trial of fewer tokens would see nothing of that, and take such a layer for one that attends to all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SHORT = {
    "position": 7,
    "length": 7,
    "seq": 7,
    "window": 3,
    "chunk": 3,
    "floor": 2,
    "budget": 2,
    "topk": 2,
    "block": 2,
    "stride": 2,
    "compress": 2,
}
"""words of keys that count tokens: less than those of a trial, or than those of its rank that has not the last"""
NO_LIMITS = (
    *("layer", "expert", "moe", "group", "router", "vocab", "_id", "dim", "theta", "init"),
    *("vision", "audio", "image"),
)
"""words of keys that count something else"""


def find_token_limits(config: Any) -> dict[str, int]:
    """The keys of a config (those inside others with dots) that are too long for a trial, and a short value of each."""
    return {key: short for key, value in _numbers(config) if (short := _short(key)) and value > short}


def shorten(config: Any, limits: Mapping[str, int]) -> None:
    """Set limits of a config."""
    for key, value in limits.items():
        owner: Any = config
        *path, name = key.split(".")
        for part in path:
            owner = vars_of(owner)[part]
        vars_of(owner)[name] = value


def _short(key: str) -> int:
    name = key.rpartition(".")[2]
    if any(word in key for word in NO_LIMITS):
        return 0
    return min((value for word, value in SHORT.items() if word in name), default=0)


def _numbers(config: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in vars_of(config).items():
        if not isinstance(key, str) or key.startswith("_"):
            continue
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", value
        elif isinstance(value, dict) or hasattr(value, "model_type"):
            yield from _numbers(value, f"{prefix}{key}.")


def vars_of(owner: Any) -> dict[str, Any]:
    """The values of a config, or of a dictionary in one."""
    return owner if isinstance(owner, dict) else vars(owner)
