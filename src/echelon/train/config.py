"""The configuration of a run: frozen dataclasses, from TOML, `--set key=value` and defaults.

Everything wrong with it is reported at once, before any process starts and without torch. The defaults are the
demonstration: a small model on text that is already on this machine, in about a minute.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from echelon.layout import Fault, FaultError, Layout, check, did_you_mean, grammar
from echelon.layout.faults import closest
from echelon.layout.layout import ASYNCHRONOUS, SPLIT_BACKWARD
from echelon.memory import packing
from echelon.memory.offload import has_states, pages
from echelon.memory.repeats import idle_reason
from echelon.models import own, sizes
from echelon.models.gate_text import with_gate
from echelon.optim import groups, hosted
from echelon.pipeline.schedules import file_fault, of_layout
from echelon.train import keys, pipeline_faults
from echelon.train.keys import Key, Range, Setting
from echelon.train.sections import (
    ABOVE_ZERO,
    AT_LEAST_0,
    AT_LEAST_1,
    BELOW_ONE,
    DataConfig,
    EvalConfig,
    MemoryConfig,
    OptimizerConfig,
    PipelineConfig,
    PrecisionConfig,
    SampleConfig,
    ScheduleConfig,
    ShardConfig,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    model: str = "llama-tiny"
    """A named size, or `file.py:factory` of your own, with a function `batch(rows, step)` beside it."""
    data: DataConfig = field(default_factory=DataConfig)
    seq_len: Annotated[int, AT_LEAST_1] = 128
    """Tokens per sequence."""
    batch: Annotated[int, AT_LEAST_1] = 24
    """Sequences per step, over all ranks."""
    steps: Annotated[int, AT_LEAST_1] = 400
    """Steps to train."""
    seed: Annotated[int, Range(low=0, high=2**63 - 1)] = 0
    """Of initial weights, dropout and the order of the data."""
    layout: str = ""
    """How the work is split, e.g. "dp=2,tp=2". Empty: data parallel over all ranks."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes the GPUs if there are any."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Of computation. Master weights and reductions are float32, or float64 with float64."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    kernels: Literal["auto", "plain"] = "auto"
    """Our kernels where there is a GPU, or torch's own operators everywhere, to compare with."""
    compress: Literal["none", "lossless", "lossless+fp16", "lossless+fp8", "lossless+int8"] = "none"
    """How what forward leaves for backward is kept: as it is, in fewer bytes, or with values in fewer bits too."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    clip: Annotated[float, AT_LEAST_0] = 1.0
    """Largest norm of the gradients; 0 turns clipping off."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    shard: ShardConfig = field(default_factory=ShardConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    dropout: Annotated[float | None, BELOW_ONE] = None
    """In place of the model's own dropout."""
    tied: bool | None = None
    """In place of the model's own choice to share the embedding with the output layer."""
    gate: str = ""
    """In place of a mixture's own gate: a name, with k and its options behind it, e.g. "switch,capacity_factor=1.5"."""
    expert_dropout: Annotated[float | None, BELOW_ONE] = None
    """Probability that dropout zeroes a hidden unit inside a mixture's experts, in place of the model's own."""
    run: str = ""
    """The run's directory. Empty: runs/MODEL-TIME."""
    timeout: Annotated[float, ABOVE_ZERO] = 600.0
    """Seconds that a rank waits for the others."""

    def changed(self, model: sizes.ModelConfig, seq_len: int = 0) -> sizes.ModelConfig:
        """A named size with what is set here in place of its own."""
        return sizes.changed(
            model,
            dropout=self.dropout,
            tied=self.tied,
            gate=self.gate,
            expert_dropout=self.expert_dropout,
            seq_len=seq_len,
        )

    @classmethod
    def load(cls, path: str | Path | None, settings: Sequence[str] = (), *, world: int | None = None) -> Self:
        """From a TOML file, then "key=value" settings over it, then defaults. Raises FaultError with every fault."""
        given, faults = _read_file(cls, path)
        typed, more = _read_settings(settings)
        config, wrong = _build(cls, given | typed)
        refused = {fault.key for fault in wrong}
        faults += [*more, *wrong, *config.faults(world=world, refused=refused)]
        faults += _idle_faults(config, given | typed, refused)
        if faults:
            raise FaultError(faults)
        return config

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """From TOML text alone, as `to_toml` wrote it. Does not ask whether its files still exist."""
        config, faults = _build(cls, keys.flatten(cls, tomllib.loads(text)))
        if faults:
            raise FaultError(faults)
        return config

    def to_toml(self) -> str:
        """Every key that has an effect, as TOML that loads to the same configuration."""
        idle = _idle(self)
        return keys.to_toml({name: value for name, value in keys.values_of(self).items() if name not in idle})

    @classmethod
    def keys(cls) -> tuple[Key, ...]:
        """The table of every key with its type, default and meaning."""
        return tuple(keys.table_of(cls, meanings=True).values())

    def faults(self, *, world: int | None = None, refused: Set[str] = frozenset()) -> list[Fault]:
        """What is wrong between keys, and between the configuration, the model, the layout and the files it names.

        `refused` are keys that are known to be wrong: rules that need their values are not asked.
        """
        rules = [*_data_rules(self), *_model_rules(self), *_precision_rules(self), *_optimizer_rules(self)]
        rules += [*_run_rules(self), *_compress_rules(self)]
        found = [fault for involved, fault in rules if refused.isdisjoint(involved)]
        return found + _layout_faults(self, world, refused)


AnyConfig = TypeVar("AnyConfig", bound=Config)


def _read_file(cls: type, path: str | Path | None) -> tuple[dict[str, Any], list[Fault]]:
    if path is None:
        return {}, []
    try:
        return keys.flatten(cls, tomllib.loads(Path(path).read_text(encoding="utf-8"))), []
    except OSError as error:
        rule = f"cannot be read ({(error.strerror or str(error)).lower()})"
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        rule = f"is not valid TOML ({str(error)[:1].lower()}{str(error)[1:]})"
    return {}, [Fault(key="config", value=str(path), rule=rule, legal="a TOML file")]


def _read_settings(settings: Sequence[str]) -> tuple[dict[str, Any], list[Fault]]:
    given: dict[str, Any] = {}
    faults: list[Fault] = []
    for setting in settings:
        name, equals, text = setting.partition("=")
        if equals and name.strip():
            given[name.strip()] = Setting(text.strip())
        else:
            faults.append(Fault(key="set", value=setting, rule="is not a setting", legal="key=value"))
    return given, faults


def _build(cls: type[AnyConfig], given: Mapping[str, Any]) -> tuple[AnyConfig, list[Fault]]:
    """The configuration, with defaults where a value was refused so that the other rules can still be checked."""
    values, faults = keys.read(cls, given)
    known = keys.table_of(cls)
    faults = [fault if fault.key in known else _with_layout_hint(fault) for fault in faults]
    refused = {fault.key for fault in faults}
    return keys.build(cls, {name: value for name, value in values.items() if name not in refused}), faults


def _with_layout_hint(fault: Fault) -> Fault:
    """`tp=2` given as a configuration key belongs into the layout."""
    if fault.hint or not (meant := closest(fault.key, grammar.ROWS)):
        return fault
    return replace(fault, hint=f'did you mean layout="{meant}={fault.value}"?')


Rule = tuple[tuple[str, ...], Fault]
"""The keys a rule reads, and the fault it found."""


def _data_rules(config: Config) -> Iterator[Rule]:
    data = config.data
    if data.weights and len(data.weights) != len(data.path):
        yield (
            ("data.weights", "data.path"),
            Fault(
                key="data.weights",
                value=keys.show(data.weights),
                rule=f"does not match the paths ({len(data.weights)} weights, {len(data.path)} paths)",
                legal="one weight per path, or none",
            ),
        )
    if config.eval.every and not data.eval_fraction:
        yield (
            ("eval.every", "data.eval_fraction"),
            Fault(
                key="eval.every",
                value=str(config.eval.every),
                rule="has nothing to evaluate on (data.eval_fraction=0)",
                legal="0, or data.eval_fraction > 0",
            ),
        )
    for path in data.path:
        file = Path(path)
        if not file.exists():
            yield ("data.path",), Fault(key="data.path", value=path, rule="does not exist", legal="files and folders")
        elif file.is_file() and not file.stat().st_size:
            yield ("data.path",), Fault(key="data.path", value=path, rule="is empty", legal="files with text or tokens")
    if data.tokenizer != "bytes" and not Path(data.tokenizer).is_file():
        suggestion = did_you_mean(data.tokenizer, ["bytes"])
        legal = "bytes, or a tokenizers JSON file"
        fault = Fault(key="data.tokenizer", value=data.tokenizer, rule="does not exist", legal=legal, hint=suggestion)
        yield ("data.tokenizer",), fault


def _precision_rules(config: Config) -> Iterator[Rule]:
    compute, key = config.precision.compute, "precision.compute"
    if compute == "same":
        return
    schedule = Layout.resolve(grammar.read(config.layout).given).schedule
    reasons = {
        "dtype": "needs dtype=bfloat16" if config.dtype != "bfloat16" else "",
        "device": "needs a GPU" if config.device == "cpu" else "",
        "kernels": "needs our kernels" if config.kernels == "plain" else "",
        "layout": f"cannot put off weights' gradients (schedule={schedule})" if schedule in SPLIT_BACKWARD else "",
    }
    for other, rule in reasons.items():
        if rule:
            remedy = {"dtype": "bfloat16", "device": "cuda", "kernels": "auto", "layout": "...,schedule=1f1b"}[other]
            yield (key, other), Fault(key=key, value=compute, rule=rule, legal=f"same, or {other}={remedy}")


def _optimizer_rules(config: Config) -> Iterator[Rule]:
    rule = config.optimizer
    layout = Layout.resolve(grammar.read(config.layout).given)
    for text in rule.groups:
        try:
            groups.parse(text)
        except ValueError as error:
            fault = Fault(key="optimizer.groups", value=text, rule=str(error), legal=groups.FORM)
            yield ("optimizer.groups",), fault
    key = "optimizer.in_backward"
    if rule.in_backward and config.clip:
        reason = "clipping needs the norm of all gradients, and updates in backward let them go before it is known"
        yield (key, "clip"), Fault(key=key, value="true", rule=f"cannot clip: {reason}", legal="false, or clip=0")
    if rule.in_backward and layout.pp > 1:
        reason = "gradients of several microbatches add up, and all of them live until the last"
        yield (key, "layout"), Fault(key=key, value="true", rule=f"gains nothing under pp: {reason}", legal="false")
    if rule.ema and layout.pp > 1 and layout.schedule in ASYNCHRONOUS:
        reason = f"cannot be used while older weights are under way (schedule={layout.schedule})"
        legal = f"0, or another schedule than {', '.join(ASYNCHRONOUS)}"
        yield ("optimizer.ema", "layout"), Fault(key="optimizer.ema", value=str(rule.ema), rule=reason, legal=legal)
    for fault in hosted.faults(rule, layout.offload):
        yield (fault.key, "layout"), fault


def _compress_rules(config: Config) -> Iterator[Rule]:
    layout = Layout.resolve(grammar.read(config.layout).given)
    if rule := packing.beside(config.compress, layout.recompute, layout.offload):
        yield ("compress", "layout"), Fault(key="compress", value=config.compress, rule=rule)


def _run_rules(config: Config) -> Iterator[Rule]:
    if not config.run:
        return
    # What is missing of the path is made; what is there must be a folder that takes it.
    there = next((path for path in (Path(config.run), *Path(config.run).parents) if path.exists()), Path())
    rule = ""
    if not there.is_dir():
        rule = f"cannot be made ({there} is a file)"
    elif not os.access(there, os.W_OK | os.X_OK):
        rule = f"cannot be written ({there} is read-only)"
    if rule:
        yield ("run",), Fault(key="run", value=config.run, rule=rule, legal="a folder that can be made and written")


OF_MIXTURES = ("gate", "expert_dropout")


def _idle(config: Config) -> dict[str, str]:
    """Keys that do nothing in this configuration, each with why."""
    table = keys.table_of(Config)
    idle: dict[str, str] = {}
    if is_own(config.model):
        names = [name for name in table if name.startswith(OF_OUR_TASK)]
        idle |= dict.fromkeys(names, "a module of your own, whose file makes the batches")
    elif config.model in sizes.SIZES and sizes.find(config.model).mixture is None:
        idle |= dict.fromkeys(OF_MIXTURES, f"model={config.model}, which has no experts")
    layout = Layout.resolve(grammar.read(config.layout).given)
    if layout.zero != 3 and not pages(layout.offload):
        idle |= dict.fromkeys(("shard.reshard_after_forward", "shard.prefetch"), f"zero={layout.zero}")
    idle |= {f"memory.{word}": why for word, why in idle_reason(layout).items()}
    if not layout.zero and not pages(layout.offload):
        idle["memory.buffer"] = "zero=0, where nothing is gathered"
    elif config.shard.units:
        idle["memory.buffer"] = "shard.units, which says what is gathered at once"
    if layout.pp == 1:
        idle |= dict.fromkeys(("pipeline.layers", "pipeline.profile", "pipeline.slices"), "pp=1")
    elif layout.schedule != "terapipe":
        idle["pipeline.slices"] = f"schedule={layout.schedule}"
    if not has_states(layout.offload):
        idle["memory.host"] = f"offload={layout.offload}"
    if "disk" not in layout.offload.split("+"):
        idle["memory.disk"] = f"offload={layout.offload}"
    if layout.pp > 1 and layout.zero == 3:
        idle["shard.reshard_after_forward"] = f"pp={layout.pp}, where layers are freed after every use"
    return idle


OF_OUR_TASK = ("data.", "sample.", "eval.", "seq_len", "dropout", "tied", *OF_MIXTURES)
"""keys that only our own models and data read"""


def _idle_faults(config: Config, given: Mapping[str, Any], refused: Set[str]) -> list[Fault]:
    if not refused.isdisjoint(("model", "layout")):
        return []
    return [
        Fault(key=name, value=keys.as_given(given[name]), rule=f"has no effect with {why}", hint="leave it out")
        for name, why in _idle(config).items()
        if name in given
    ]


def is_own(model: str) -> bool:
    """`file.py:factory`, a module of the user's own."""
    return ":" in model


def _model_rules(config: Config) -> Iterator[Rule]:
    if is_own(config.model):
        found = list(own.faults(config.model))
        beside = config.model.rpartition(":")[0] + ":batch"
        found = found or list(own.faults(beside, legal="a function batch(rows, step) in the file of the model"))
        yield from ((("model",), fault) for fault in found)
        return
    try:
        model = sizes.find(config.model)
    except FaultError as error:
        yield from ((("model",), fault) for fault in error.faults)
        return
    if model.family == "conv":
        legal = ", ".join(name for name, size in sizes.SIZES.items() if size.family != "conv")
        yield ("model",), Fault(key="model", value=model.name, rule="learns from images, not from text", legal=legal)
        return
    if model.mixture is not None and config.gate:
        try:
            mixture = with_gate(model.mixture, config.gate)
        except FaultError as error:
            yield from ((("gate",), fault) for fault in error.faults)
            return
        from echelon.models.mixture import gate_faults  # torch: only where another gate is asked for

        yield from ((("gate",), fault) for fault in gate_faults(mixture))
    if config.seq_len > sizes.changed(model, seq_len=config.seq_len).max_seq_len:
        yield (
            ("model", "seq_len"),
            Fault(
                key="seq_len",
                value=str(config.seq_len),
                rule=f"is longer than the model allows ({model.name}: {model.max_seq_len})",
                legal=f"1 to {model.max_seq_len}",
            ),
        )


def _layout_faults(config: Config, world: int | None, refused: Set[str]) -> list[Fault]:
    if "layout" in refused:
        return []
    model = None
    if "model" not in refused and not is_own(config.model):
        with suppress(FaultError):
            model = config.changed(sizes.find(config.model))
    batch = None if "batch" in refused else config.batch
    seq_len = None if "seq_len" in refused else config.seq_len
    # Asked of the keys as they are written, so that a layout with other faults says it too.
    planned = Layout.resolve(grammar.read(config.layout).given).plan_only
    found = [Fault(key="layout", value=config.layout, rule=f"cannot be run: {reason}") for reason in planned]
    try:
        layout = check(config.layout, world=world, batch=batch, seq_len=seq_len, model=model)
    except FaultError as error:
        return [*error.faults, *found]
    if wrong := file_fault(layout, model.layers if model else 0):
        found.append(Fault(key="schedule", value=layout.schedule, rule=f"cannot be run: {wrong}"))
    elif config.pipeline.layers and layout.pp > 1 and model:
        found += pipeline_faults.of_stages(config.pipeline.layers, of_layout(layout).stages, model)
    return [*found, *pipeline_faults.of_profile(config.pipeline), *pipeline_faults.of_slices(config)]
