"""What is wrong with the keys of `pipeline.`: stages that do not add up, profiles that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.layout import ValidationIssue
from echelon.models.model_config import ModelConfig
from echelon.pipeline.layer_profile import PipelineProfile

if TYPE_CHECKING:
    from echelon.config.run_config import Config
    from echelon.config.sections import PipelineConfig

MEASURE = "measure"
"""the `pipeline.profile` that is made before a run"""


def slice_faults(config: Config) -> Iterator[ValidationIssue]:
    slices = config.pipeline.slices
    if slices and sum(slices) != config.seq_len:
        rule = f"does not make up a sequence (seq_len={config.seq_len})"
        yield ValidationIssue(
            key="pipeline.slices", value=str(list(slices)), message=rule, legal=f"a sum of {config.seq_len}"
        )


def profile_faults(pipeline: PipelineConfig) -> Iterator[ValidationIssue]:
    key, given = "pipeline.profile", pipeline.profile
    if given and pipeline.layers:
        yield ValidationIssue(
            key=key, value=given, message="leaves nothing to choose beside pipeline.layers", hint="give one"
        )
    if given and given != MEASURE:
        try:
            PipelineProfile.from_json(Path(given).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ValueError) as error:
            yield ValidationIssue(
                key=key, value=given, message=f"cannot be read ({error})", legal=f"{MEASURE}, or RUN/profile.json"
            )


def stage_faults(layers: tuple[int, ...], stages: int, model: ModelConfig) -> Iterator[ValidationIssue]:
    if len(layers) != stages or sum(layers) != model.layers:
        yield ValidationIssue(
            key="pipeline.layers",
            value=str(list(layers)),
            message=f"does not give the {model.layers} layers of {model.name} to {stages} stages",
            legal=f"{stages} numbers that sum to {model.layers}",
        )
