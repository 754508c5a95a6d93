"""The configuration of a run: frozen dataclasses, from TOML, `--set key=value` and defaults.

All issues are reported at once, before any process starts and without torch. The defaults are the demonstration: a
small model on text that exists on every machine, in about a minute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from echelon.config import schema, sections
from echelon.config.config_rules import cross_key_issues, keys_without_effect, no_effect_issues
from echelon.config.lora_rules import pattern_issues
from echelon.config.schema import ConfigKey, Range, SettingText
from echelon.config.sections import AT_LEAST_0, AT_LEAST_1, BELOW_ONE
from echelon.config.size_rules import size_issues
from echelon.input_file import InputFileError, parse_toml, read_toml
from echelon.layout import ValidationError, ValidationIssue, grammar
from echelon.layout.validation_error import closest_word
from echelon.models import model_config


@dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of a run; `echelon train --keys` lists its keys.

    >>> ec.Config(model="gpt-tiny", steps=10).batch
    24
    """

    model: str = "llama-tiny"
    """A named size, a directory of `echelon import`, `hf:DIR` of Hugging Face, or `file.py:factory` of yours with
    `batch(rows, step)` in it."""
    data: sections.DataConfig = field(default_factory=sections.DataConfig)
    seq_len: Annotated[int, AT_LEAST_1] = 128
    """Tokens per sequence."""
    batch: Annotated[int, AT_LEAST_1] = 24
    """Global batch: sequences per step over all ranks."""
    steps: Annotated[int, AT_LEAST_1] = 400
    """Steps to train."""
    seed: Annotated[int, Range(low=0, high=2**63 - 1)] = 0
    """Seed of initial weights, dropout and the order of the data."""
    layout: str = ""
    """Parallel layout, e.g. "dp=2,tp=2". Empty: data parallel over all ranks."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto takes GPUs if there are any."""
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    """Compute dtype. Master weights and gradient reduction are float32 (float64 with float64), or as in `precision`."""
    precision: sections.PrecisionConfig = field(default_factory=sections.PrecisionConfig)
    kernels: Literal["auto", "plain"] = "auto"
    """Fused kernels on a GPU, or plain torch operators everywhere, for comparison."""
    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    """Launch a step on one GPU as one graph: our own models where the host is too slow, any model, or none."""
    compile: Literal["auto", "on", "off"] = "off"
    """Compile the layers of models that are not ours (`torch.compile`); auto does on a GPU, but not in float64."""
    compress: Literal["none", "lossless", "lossless+fp16", "lossless+fp8", "lossless+int8"] = "none"
    """Compression of saved activations: none, lossless, or lossless with values in fewer bits."""
    lora: sections.LoRAConfig = field(default_factory=sections.LoRAConfig)
    optimizer: sections.OptimizerConfig = field(default_factory=sections.OptimizerConfig)
    schedule: sections.LRScheduleConfig = field(default_factory=sections.LRScheduleConfig)
    clip: Annotated[float, AT_LEAST_0] = 1.0
    """Largest gradient norm; 0 turns clipping off."""
    eval: sections.EvalConfig = field(default_factory=sections.EvalConfig)
    checkpoint: sections.CheckpointConfig = field(default_factory=sections.CheckpointConfig)
    spike: sections.SpikeConfig = field(default_factory=sections.SpikeConfig)
    replay: sections.ReplayConfig = field(default_factory=sections.ReplayConfig)
    elastic: sections.ElasticConfig = field(default_factory=sections.ElasticConfig)
    sample: sections.SampleConfig = field(default_factory=sections.SampleConfig)
    shard: sections.ShardConfig = field(default_factory=sections.ShardConfig)
    memory: sections.MemoryConfig = field(default_factory=sections.MemoryConfig)
    pipeline: sections.PipelineConfig = field(default_factory=sections.PipelineConfig)
    dropout: Annotated[float | None, BELOW_ONE] = None
    """Override the model's dropout."""
    tied: bool | None = None
    """Override whether the LM head shares the embedding's weight."""
    gate: str = ""
    """Override the gate of MoE layers: a name, then k and options, e.g. "switch,capacity_factor=1.5"."""
    expert_dropout: Annotated[float | None, BELOW_ONE] = None
    """Override the dropout of hidden units inside experts."""
    run: str = ""
    """The run's directory. Empty: runs/MODEL-TIME."""
    timeout: Annotated[float, Range(low=0.1, high=1e7)] = 600.0
    """Seconds that a rank waits for other ranks."""

    def override_model(self, model: model_config.ModelConfig, seq_len: int = 0) -> model_config.ModelConfig:
        """Return a named model with the overrides of this configuration."""
        overrides: dict[str, Any] = {key: getattr(self, key) for key in ("dropout", "tied", "gate", "expert_dropout")}
        return model_config.override_config(model, **overrides, seq_len=seq_len)

    @classmethod
    def load(
        cls,
        path: str | Path | None,
        settings: Sequence[str] = (),
        *,
        world: int | None = None,
        written_by_run: bool = False,
        to_train: bool = False,
    ) -> Self:
        """Load a TOML file with "key=value" settings over it. Raise ValidationError with every issue.

        A file that a run wrote may have keys without effect next to the settings, since no user set them. With
        `to_train`, sizes must fit into this machine, and patterns of adapters the model.
        """
        given, issues = _read_file(cls, path)
        typed, more = _read_settings(settings)
        config, invalid = _build(cls, given | typed)
        invalid_keys = {issue.key for issue in invalid}
        issues += [*more, *invalid, *config.issues(world=world, invalid_keys=invalid_keys)]
        issues += no_effect_issues(config, typed if written_by_run else given | typed, invalid_keys)
        issues += size_issues(config, world=world, invalid_keys=invalid_keys) if to_train else []
        issues += pattern_issues(config) if to_train and "lora.rank" not in invalid_keys else []
        return _checked(config, issues)

    @classmethod
    def from_settings(cls, settings: Sequence[str], layout: str) -> Self:
        """Build a configuration for `plan --set` in a layout. Without a layout, any key may have an effect."""
        typed, issues = _read_settings(settings)
        config, invalid = _build(cls, typed)
        invalid_keys = {issue.key for issue in invalid}
        issues += [*invalid, *config.issues(invalid_keys=invalid_keys)]
        if layout:
            issues += no_effect_issues(replace(config, layout=layout), typed, invalid_keys)
        return _checked(config, issues)

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """Build it from the TOML text of `to_toml`, without checking that its files still exist."""
        config, issues = _build(cls, schema.flatten(cls, parse_toml(text)))
        return _checked(config, issues)

    def to_toml(self) -> str:
        """Return every key that has an effect, as TOML that loads to the same configuration."""
        values, left_out = schema.effective_values(self), keys_without_effect(self)
        return schema.to_toml({name: value for name, value in values.items() if name not in left_out})

    @classmethod
    def keys(cls) -> tuple[ConfigKey, ...]:
        """Return every key with its type, default and meaning."""
        return tuple(schema.key_table(cls, with_meanings=True).values())

    def issues(self, *, world: int | None = None, invalid_keys: Set[str] = frozenset()) -> list[ValidationIssue]:
        """Check rules across keys, the model, the layout and files.

        Rules that read `invalid_keys` are not checked.
        """
        return cross_key_issues(self, world=world, invalid_keys=invalid_keys)

    @property
    def loss_scaling(self) -> str:
        """The loss scaling in effect: dynamic, fixed or none."""
        loss_scale = self.precision.loss_scale
        if isinstance(loss_scale, float):
            return "fixed"
        return loss_scale if loss_scale != "auto" else "dynamic" if self.dtype == "float16" else "none"


AnyConfig = TypeVar("AnyConfig", bound=Config)


def _checked(config: AnyConfig, issues: Sequence[ValidationIssue]) -> AnyConfig:
    """Return the configuration, or raise its issues."""
    if issues:
        raise ValidationError(issues)
    return config


def _read_file(cls: type, path: str | Path | None) -> tuple[dict[str, Any], list[ValidationIssue]]:
    if path is None:
        return {}, []
    try:
        return schema.flatten(cls, read_toml(path)), []
    except InputFileError as error:
        return {}, [ValidationIssue("config", str(path), error.reason, legal="a TOML file")]


def _read_settings(settings: Sequence[str]) -> tuple[dict[str, Any], list[ValidationIssue]]:
    given: dict[str, Any] = {}
    issues: list[ValidationIssue] = []
    for setting in settings:
        name, equals, text = setting.partition("=")
        if equals and name.strip():
            given[name.strip()] = SettingText(text.strip())
        else:
            issues.append(ValidationIssue("set", setting, "is not a setting", legal="key=value"))
    return given, issues


def _build(cls: type[AnyConfig], given: Mapping[str, Any]) -> tuple[AnyConfig, list[ValidationIssue]]:
    """Build the configuration with defaults for invalid values, so that other rules can still be checked."""
    values, issues = schema.parse_values(cls, given)
    known = schema.key_table(cls)
    issues = [issue if issue.key in known else _with_layout_hint(issue) for issue in issues]
    invalid_keys = {issue.key for issue in issues}
    return schema.build(cls, {name: value for name, value in values.items() if name not in invalid_keys}), issues


def _with_layout_hint(issue: ValidationIssue) -> ValidationIssue:
    """Suggest the layout for a key like `tp=2`."""
    if issue.hint or not (meant := closest_word(issue.key, grammar.KEYS_BY_NAME)):
        return issue
    return replace(issue, hint=f'did you mean layout="{meant}={issue.value}"?')
