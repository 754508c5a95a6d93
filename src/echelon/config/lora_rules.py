"""Rules of `lora.*`: layouts that have no adapters, patterns that match nothing, the adapter to start from.

Patterns are compared with the names of the model's linears, for which the model is built without values. That imports
torch, and transformers for `hf:DIR`, so it happens only where a pattern is given; a custom model's file is never run
here, and its ranks compare.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.layout import Layout, ValidationError, ValidationIssue
from echelon.models import model_config, user_model
from echelon.models.foreign.hf_source import is_hf_model, read_hf_source
from echelon.models.lora.lora_options import lora_scale
from echelon.models.lora.peft_config import PeftConfig

if TYPE_CHECKING:
    from echelon.config.run_config import Config

LORA_KEYS = ("lora.alpha", "lora.targets", "lora.dropout", "lora.rslora", "lora.train", "lora.init")


def lora_issues(config: Config, layout: Layout) -> Iterator[ValidationIssue]:
    """Check the adapters of a configuration, but for their patterns."""
    lora = config.lora
    if not lora.rank:
        return
    if layout.tp > 1 and layout.tp_kind != "1d":
        message = f"has no adapters on tensor grids (tp_kind={layout.tp_kind})"
        yield ValidationIssue("lora.rank", str(lora.rank), message, legal="0, or tp_kind=1d")
    if lora.init:
        yield from _init_issues(config)


def _init_issues(config: Config) -> Iterator[ValidationIssue]:
    lora = config.lora
    try:
        peft = PeftConfig.read(Path(lora.init))
    except ValidationError as error:
        yield from error.issues
        return
    scale = lora_scale(peft.alpha, peft.rank, rslora=peft.rslora)
    given = {"lora.rank": lora.rank, "lora.alpha": lora.alpha, "lora.rslora": lora.rslora}
    stored = {"lora.rank": peft.rank, "lora.alpha": peft.alpha, "lora.rslora": peft.rslora}
    for key, value in given.items():
        if value != stored[key] and (key == "lora.rank" or abs(scale - lora.scale) > 1e-9 * scale):
            message, legal = f"is not that of the adapter to start from ({lora.init})", f"{stored[key]}".lower()
            yield ValidationIssue(key, str(value).lower(), message, legal=legal)


def pattern_issues(config: Config) -> Iterator[ValidationIssue]:
    """Patterns that match nothing; a model that cannot be built is reported by another rule."""
    lora, model = config.lora, None
    if not lora.rank or not (lora.targets or lora.train):
        return
    with suppress(ValidationError):
        model = _shapes_only(config)
    if model is None:
        return
    from echelon.models.lora.add_lora import check_patterns

    yield from check_patterns(model, lora)


def _shapes_only(config: Config) -> Any:
    """The model on the meta device; none of a custom model."""
    if user_model.is_user_model(config.model):
        return None
    if is_hf_model(config.model):
        from echelon.models.foreign.causal_lm import build_causal_lm

        return build_causal_lm(read_hf_source(config.model))
    from echelon import models

    return models.build(config.override_model(model_config.find_model(config.model), seq_len=config.seq_len), "meta")
