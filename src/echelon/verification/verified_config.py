"""The configuration that `verify` runs: the asked one, but for what float64 or a shrunken model cannot have.

    asked                                      in float64              why
    dtype, precision.compute, .master,         float64                 rounding would hide errors
      .reduce, .keep_fp32, optimizer.states
    compress=lossless+FORMAT                   lossless                values in fewer bits are rounded
    pipeline.layers, .profile, .slices,        chosen automatically    they are for the sizes of the full model
      patterns that name later layers

Everything else runs as asked: the optimizer with its groups, moving average and updates in backward, clipping, the
learning-rate schedule, dropout, packed documents, gates, sharding, offload, LoRA adapters (from a random B instead of
zero). A loss scale is an identity in float64, as it is a power of two. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from echelon.config.run_config import Config
from echelon.config.sections import PrecisionConfig

ROUNDING, LOSSY, SHRUNKEN = "rounding would hide errors", "it is lossy", "it is for the model's full size"
IN_FLOAT64 = {
    **dict.fromkeys(("dtype", "precision.compute", "precision.master", "precision.reduce"), ROUNDING),
    **dict.fromkeys(("precision.keep_fp32", "optimizer.states"), ROUNDING),
    "compress": LOSSY,
}
IN_A_SHRUNKEN_MODEL = {
    **dict.fromkeys(("pipeline.layers", "pipeline.slices", "pipeline.profile", "shard.units"), SHRUNKEN),
    **dict.fromkeys(("optimizer.groups", "optimizer.by_adamw", "precision.keep_fp32"), SHRUNKEN),
    **dict.fromkeys(("lora.targets", "lora.train"), SHRUNKEN),
}
"""why a key is replaced"""
LAYER_NUMBER = re.compile(r"[][0-9?!-]*[0-9][][0-9?!-]*")
"""a part of a pattern that matches numbers alone"""


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """A value of the configuration that `verify` does not run as it is."""

    key: str
    value: str
    by: str
    reason: str

    def __str__(self) -> str:
        return f"{self.key}={self.value} by {self.by}"


def float64_config(config: Config) -> tuple[Config, tuple[Replacement, ...]]:
    """Return the configuration in float64, and what that replaces."""
    precision, scale = config.precision, config.precision.loss_scale
    exact = PrecisionConfig(
        loss_scale=scale if isinstance(scale, float) else config.loss_scaling,  # type: ignore[arg-type]
        scale_start=precision.scale_start,
        scale_every=precision.scale_every,
        skips=precision.skips,
    )
    runs = replace(
        config,
        dtype="float64",
        device="cpu",
        precision=exact,
        optimizer=replace(config.optimizer, states="float32"),
        compress=config.compress.partition("+")[0],  # type: ignore[arg-type]
    )
    return runs, tuple(_replacements(config, runs, IN_FLOAT64))


def fitted_config(config: Config, *, layers: int, stages: int, seq_len: int) -> tuple[Config, tuple[Replacement, ...]]:
    """Return the configuration without what a shrunken model is too small for, and what that replaces."""
    pipeline, shard, rule = config.pipeline, config.shard, config.optimizer
    fits = (len(pipeline.layers), sum(pipeline.layers)) == (stages, layers)
    runs = replace(
        config,
        pipeline=replace(
            pipeline,
            layers=pipeline.layers if fits else (),
            slices=pipeline.slices if sum(pipeline.slices) == seq_len else (),
            profile="",
        ),
        shard=replace(shard, units=_existing(shard.units, layers)),
        optimizer=replace(rule, groups=_existing(rule.groups, layers), by_adamw=_existing(rule.by_adamw, layers)),
        lora=replace(
            config.lora, targets=_existing(config.lora.targets, layers), train=_existing(config.lora.train, layers)
        ),
        precision=replace(config.precision, keep_fp32=_existing(config.precision.keep_fp32, layers)),
    )
    return runs, tuple(_replacements(config, runs, IN_A_SHRUNKEN_MODEL))


def _existing(patterns: tuple[str, ...], layers: int) -> tuple[str, ...]:
    """Return the patterns but for those of layers that the model does not have: `blocks.31.*`, `blocks.3[01].*`."""
    return tuple(
        pattern
        for pattern in patterns
        if all(
            any(fnmatchcase(str(layer), part) for layer in range(layers))
            for part in pattern.partition(":")[0].strip().split(".")
            if LAYER_NUMBER.fullmatch(part)
        )
    )


def _replacements(asked: Config, runs: Config, reasons: dict[str, str]) -> Iterator[Replacement]:
    """Yield what differs, of the keys of `reasons`."""
    for key, reason in reasons.items():
        before, after = _value(asked, key), _value(runs, key)
        if before != after:
            by = "float64" if reason == ROUNDING else _text(after) or "an automatic choice"
            yield Replacement(key=key, value=_text(before), by=by, reason=reason)


def _value(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
