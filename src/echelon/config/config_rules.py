"""Rules of the configuration across keys, the model, the layout and files; keys without effect."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.config import schema
from echelon.config.lora_rules import LORA_KEYS, lora_issues
from echelon.config.record_rules import record_issues, records_without_effect
from echelon.input_file import InputFileError, open_input
from echelon.layout import Layout, ValidationError, ValidationIssue, check_layout, grammar
from echelon.layout.layout import ASYNC_SCHEDULES
from echelon.memory.checkpointing.cost import ineffective_options
from echelon.memory.compression import cost as compression_cost
from echelon.memory.offload.cost import offloads_optimizer, offloads_params
from echelon.models import model_config, user_model
from echelon.models.foreign.hf_source import is_hf_model, read_hf_source
from echelon.models.model_config import ModelConfig
from echelon.models.moe_config import override_gate
from echelon.optim import offload_support, optimizer_groups
from echelon.pipeline.layer_profile import PipelineProfile
from echelon.pipeline.schedules import schedule_file_error, schedule_for_layout

if TYPE_CHECKING:
    from echelon.config.run_config import Config
    from echelon.config.sections import PipelineConfig


MAX_NAME_BYTES = 255
"""of a file or directory, on nearly every file system"""
KeyedIssue = tuple[tuple[str, ...], ValidationIssue]
"""the keys that a rule reads, and the issue that it reports"""


def cross_key_issues(config: Config, *, world: int | None, invalid_keys: Set[str]) -> list[ValidationIssue]:
    """Check all rules except those that read `invalid_keys`."""
    layout = resolve_layout(config)
    issues = [issue for rule in RULES for keys, issue in rule(config, layout) if invalid_keys.isdisjoint(keys)]
    return issues + _layout_issues(config, world, invalid_keys)


def conflicts_with_layout(config: Config, layout: Layout) -> list[ValidationIssue]:
    """Check the rules between keys for a layout that a command names instead of the configuration's own."""
    return [issue for rule in RULES for _, issue in rule(config, layout)]


def resolve_layout(config: Config) -> Layout:
    return Layout.resolve(grammar.parse_pairs(config.layout).values)


def _keyed(key: str, value: object, message: str, *, reads: tuple[str, ...] = (), legal: str = "") -> KeyedIssue:
    """Return an issue of `key` by a rule that also reads the keys in `reads`."""
    return (key, *reads), ValidationIssue(key, str(value), message, legal=legal)


def _data_rules(config: Config, layout: Layout) -> Iterator[KeyedIssue]:
    data = config.data
    if data.weights and len(data.weights) != len(data.path):
        message = f"does not match the paths ({len(data.weights)} weights, {len(data.path)} paths)"
        value, legal = schema.format_toml(data.weights), "one weight per path, or none"
        yield _keyed("data.weights", value, message, reads=("data.path",), legal=legal)
    if config.eval.every and not data.eval_fraction:
        message, legal = "has nothing to evaluate on (data.eval_fraction=0)", "0, or data.eval_fraction > 0"
        yield _keyed("eval.every", config.eval.every, message, reads=("data.eval_fraction",), legal=legal)
    for path in data.path:
        if not os.path.exists(path):
            yield _keyed("data.path", path, "does not exist", legal="files and folders")
        elif message := _unreadable(path):
            yield _keyed("data.path", path, message, legal="readable files and folders")
        elif os.path.isfile(path) and not os.path.getsize(path):
            yield _keyed("data.path", path, "is empty", legal="files with text or tokens")
    for issue in record_issues(data):
        yield (issue.key,), issue


def _unreadable(path: str) -> str:
    """Return why a file or folder of data cannot be read, or an empty text."""
    if os.path.isdir(path):
        return "" if os.access(path, os.R_OK | os.X_OK) else "cannot be read (permission denied)"
    try:
        open_input(path).close()
    except InputFileError as error:
        return error.reason
    return ""


def _precision_rules(config: Config, layout: Layout) -> Iterator[KeyedIssue]:
    precision = config.precision
    if precision.master == "none" and config.dtype != "bfloat16":
        message = f"requires bfloat16 weights with stochastic rounding (dtype={config.dtype})"
        yield _keyed("precision.master", "none", message, reads=("dtype",), legal="float32, or dtype=bfloat16")
    if precision.compute == "same":
        return
    conflicts = (
        (config.dtype != "bfloat16", "dtype", "requires dtype=bfloat16", "bfloat16"),
        (config.device == "cpu", "device", "requires a GPU", "cuda"),
        (config.kernels == "plain", "kernels", "requires fused kernels", "auto"),
    )
    for is_broken, other, message, remedy in conflicts:
        if is_broken:
            legal = f"same, or {other}={remedy}"
            yield _keyed("precision.compute", precision.compute, message, reads=(other,), legal=legal)


def _optimizer_rules(config: Config, layout: Layout) -> Iterator[KeyedIssue]:
    rule, key = config.optimizer, "optimizer.in_backward"
    for text in rule.groups:
        try:
            optimizer_groups.parse(text)
        except ValueError as error:
            yield _keyed("optimizer.groups", text, str(error), legal=optimizer_groups.GROUP_SYNTAX)
    if rule.in_backward and config.clip:
        reason = "clipping requires the norm of all gradients, and updates in backward free them before it is known"
        yield _keyed(key, "true", f"cannot clip: {reason}", reads=("clip",), legal="false, or clip=0")
    if rule.in_backward and config.loss_scaling == "dynamic":
        message = "cannot skip a step whose gradients overflow, since it updates before that is known"
        legal = "false, or a fixed precision.loss_scale"
        yield _keyed(key, "true", message, reads=("precision.loss_scale", "dtype"), legal=legal)
    if rule.in_backward and layout.pp > 1:
        reason = "gradients of several microbatches accumulate until the last one"
        yield _keyed(key, "true", f"gains nothing under pp: {reason}", reads=("layout",), legal="false")
    if rule.ema and layout.pp > 1 and layout.schedule in ASYNC_SCHEDULES:
        message = f"cannot average weights while older versions are in flight (schedule={layout.schedule})"
        legal = f"0, or another schedule than {', '.join(ASYNC_SCHEDULES)}"
        yield _keyed("optimizer.ema", rule.ema, message, reads=("layout",), legal=legal)
    for issue in offload_support.offload_faults(rule, layout.offload, master=config.precision.master):
        yield (issue.key, "layout"), issue


def _lora_rules(config: Config, layout: Layout) -> Iterator[KeyedIssue]:
    for issue in lora_issues(config, layout):
        yield (issue.key, "lora.rank", "model", "layout"), issue


def _compress_rules(config: Config, layout: Layout) -> Iterator[KeyedIssue]:
    if message := compression_cost.incompatibility(config.compress, layout.recompute, layout.offload):
        yield _keyed("compress", config.compress, message, reads=("layout",))


def _run_rules(config: Config, layout: Layout) -> Iterator[KeyedIssue]:
    if config.run and (message := _folder_problem(Path(config.run))):
        yield _keyed("run", config.run, message, legal="a folder that can be created and written")
    path = config.checkpoint.path
    is_remote = "://" in path and not path.startswith("file://")
    message = _address_problem(path) if is_remote else _folder_problem(Path(path.removeprefix("file://")))
    if path and message:
        legal = "a folder that can be created and written, or an address that fsspec supports"
        yield _keyed("checkpoint.path", path, message, legal=legal)


def _folder_problem(wanted: Path) -> str:
    """Return why a directory cannot be created or written, or an empty text."""
    if "\0" in str(wanted) or any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in wanted.parts):
        return f"cannot be created (a name has a NUL byte, or more than {MAX_NAME_BYTES} bytes)"
    existing = next((path for path in (wanted, *wanted.parents) if os.path.exists(path)), Path())
    if not os.path.isdir(existing):
        return f"cannot be created ({existing} is a file)"
    return "" if os.access(existing, os.W_OK | os.X_OK) else f"cannot be written ({existing} is read-only)"


def _address_problem(path: str) -> str:
    import fsspec  # type: ignore[import-untyped]

    protocol = path.partition("://")[0]
    if protocol == "memory":
        return "is the memory of one process, and is lost with it"
    try:
        fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        return f"cannot be opened by fsspec ({error})"
    return ""


def _elastic_rules(config: Config, layout: Layout) -> Iterator[KeyedIssue]:
    if config.elastic.replan and layout.pp > 1 and layout.schedule in ASYNC_SCHEDULES:
        message = f"would change the updates: with schedule={layout.schedule} they depend on the number of stages"
        yield _keyed("elastic.replan", "true", message, reads=("layout",), legal="false, or another schedule")


MOE_KEYS = ("gate", "expert_dropout")


def _keys_without_effect_on_model(model: str, table: Iterable[str]) -> dict[str, str]:
    if user_model.is_user_model(model):
        names = [name for name in table if name.startswith(BUILTIN_MODEL_KEYS) and name != "data.skip_batches"]
        return dict.fromkeys(names, "a custom model, whose file provides the batches")
    if is_hf_model(model):
        return dict.fromkeys(("dropout", "tied", *MOE_KEYS), "a model of transformers, whose config.json decides")
    if model in model_config.SIZES and model_config.find_model(model).moe is None:
        return dict.fromkeys(MOE_KEYS, f"model={model}, which has no MoE layers")
    return {}


def keys_without_effect(config: Config) -> dict[str, str]:
    """Return the keys without effect in this configuration, each with the reason."""
    table = schema.key_table(type(config))
    idle = {} if config.replay.every else dict.fromkeys(("replay.action", "replay.tolerance"), "replay.every=0")
    idle |= _keys_without_effect_on_model(config.model, table)
    if not user_model.is_user_model(config.model):
        idle |= records_without_effect(config.data)
    if not config.lora.rank:
        idle |= dict.fromkeys(LORA_KEYS, "lora.rank=0")
    layout = resolve_layout(config)
    if layout.zero != 3 and not offloads_params(layout.offload):
        idle |= dict.fromkeys(("shard.reshard_after_forward", "shard.prefetch"), f"zero={layout.zero}")
    idle |= {f"memory.{word}": why for word, why in ineffective_options(layout).items()}
    if not layout.zero and not offloads_params(layout.offload):
        idle["memory.buffer"] = "zero=0, where nothing is all-gathered"
    elif config.shard.units:
        idle["memory.buffer"] = "shard.units, which defines the parameter groups"
    if layout.pp == 1:
        idle |= dict.fromkeys(("pipeline.layers", "pipeline.profile", "pipeline.slices"), "pp=1")
    elif layout.schedule != "terapipe":
        idle["pipeline.slices"] = f"schedule={layout.schedule}"
    if not offloads_optimizer(layout.offload):
        idle["memory.host"] = f"offload={layout.offload}"
    if "disk" not in layout.offload.split("+"):
        idle["memory.disk"] = f"offload={layout.offload}"
    if not config.checkpoint.every:
        idle |= dict.fromkeys(("checkpoint.keep", "checkpoint.keep_every"), "checkpoint.every=0")
    if config.dtype in ("float32", "float64"):
        idle["precision.keep_fp32"] = f"dtype={config.dtype}"
    if config.loss_scaling != "dynamic":
        why = f"precision.loss_scale={config.precision.loss_scale}, which is not dynamic with dtype={config.dtype}"
        idle |= dict.fromkeys(("precision.scale_start", "precision.scale_every"), why)
    if layout.pp > 1 and layout.zero == 3:
        idle["shard.reshard_after_forward"] = f"pp={layout.pp}, where layers are resharded after every use"
    return idle


BUILTIN_MODEL_KEYS = ("data.", "sample.", "eval.", "seq_len", "dropout", "tied", *MOE_KEYS)
"""keys that apply to built-in models and data only"""


def no_effect_issues(config: Config, given: Mapping[str, Any], invalid_keys: Set[str]) -> list[ValidationIssue]:
    """Return an issue for each given key without effect."""
    if not invalid_keys.isdisjoint(("model", "layout")):
        return []
    idle = {name: why for name, why in keys_without_effect(config).items() if name in given}
    return [
        ValidationIssue(name, schema.format_given(given[name]), f"has no effect with {why}", hint="leave it out")
        for name, why in idle.items()
    ]


def _model_rules(config: Config, layout: Layout) -> Iterator[KeyedIssue]:
    if user_model.is_user_model(config.model):
        batch_spec = config.model.rpartition(":")[0] + ":batch"
        legal = "a function batch(rows, step) in the file of the model"
        issues = list(user_model.validate_spec(config.model)) or list(user_model.validate_spec(batch_spec, legal=legal))
        yield from ((("model",), issue) for issue in issues)
        return
    if is_hf_model(config.model):
        yield from _hf_model_rules(config)
        return
    try:
        model = model_config.find_model(config.model)
    except ValidationError as error:
        yield from ((("model",), issue) for issue in error.issues)
        return
    if model.family == "conv":
        legal = ", ".join(name for name, size in model_config.SIZES.items() if size.family != "conv")
        yield _keyed("model", model.name, "is a vision model, and cannot train on text", legal=legal)
        return
    if model.moe is not None and config.gate:
        try:
            moe = override_gate(model.moe, config.gate)
        except ValidationError as error:
            yield from ((("gate",), issue) for issue in error.issues)
            return
        from echelon.models.transformer_block import validate_gate  # imports torch, only for another gate

        yield from ((("gate",), issue) for issue in validate_gate(moe))
    if config.seq_len > model_config.override_config(model, seq_len=config.seq_len).max_seq_len:
        message = f"is longer than the model allows ({model.name}: {model.max_seq_len})"
        yield _keyed("seq_len", config.seq_len, message, reads=("model",), legal=f"1 to {model.max_seq_len}")


def _hf_model_rules(config: Config) -> Iterator[KeyedIssue]:
    try:
        source = read_hf_source(config.model)
    except ValidationError as error:
        yield from ((("model",), issue) for issue in error.issues)
        return
    if 0 < source.max_seq_len < config.seq_len:
        message = f"is longer than the model allows ({source.name}: {source.max_seq_len})"
        yield _keyed("seq_len", config.seq_len, message, reads=("model",), legal=f"1 to {source.max_seq_len}")


def _layout_issues(config: Config, world: int | None, invalid_keys: Set[str]) -> list[ValidationIssue]:
    if "layout" in invalid_keys:
        return []
    model = None
    is_built_in = not user_model.is_user_model(config.model) and not is_hf_model(config.model)
    if "model" not in invalid_keys and is_built_in:
        with suppress(ValidationError):
            model = config.override_model(model_config.find_model(config.model))
    batch = None if "batch" in invalid_keys else config.batch
    seq_len = None if "seq_len" in invalid_keys else config.seq_len
    issues: list[ValidationIssue] = []
    try:
        layout = check_layout(config.layout, world=world, batch=batch, seq_len=seq_len, model=model)
    except ValidationError as error:
        return list(error.issues)
    if wrong := schedule_file_error(layout, model.layers if model else 0):
        issues.append(ValidationIssue("schedule", layout.schedule, f"cannot be run: {wrong}"))
    elif config.pipeline.layers and layout.pp > 1 and model:
        issues += stage_issues(config.pipeline.layers, schedule_for_layout(layout).stages, model)
    return [*issues, *profile_issues(config.pipeline), *slice_issues(config)]


def _guard_rules(config: Config, layout: Layout) -> Iterator[KeyedIssue]:
    """Rules of `spike.` and `replay.`."""
    if config.spike.action == "rollback" and not config.checkpoint.every:
        message, legal = "has no checkpoint to roll back to (checkpoint.every=0)", "none, warn, or checkpoint.every > 0"
        yield _keyed("spike.action", "rollback", message, reads=("checkpoint.every",), legal=legal)
    if config.replay.every:
        for other, message, legal in _replay_conflicts(config, layout):
            yield _keyed("replay.every", config.replay.every, message, reads=(other,), legal=f"0, or {legal}")


def _replay_conflicts(config: Config, layout: Layout) -> Iterator[tuple[str, str, str]]:
    """Yield (key, why a step cannot be computed twice before its update, remedy)."""
    if layout.pp > 1 and layout.schedule in ASYNC_SCHEDULES:
        message = f"cannot replay a step that updates before its end (schedule={layout.schedule})"
        yield "layout", message, "layout=...,schedule=1f1b"
    if config.optimizer.in_backward:
        yield "optimizer.in_backward", "cannot replay a step that updates in backward", "optimizer.in_backward=false"
    if offloads_optimizer(layout.offload) or offloads_params(layout.offload):
        message = f"cannot replay a step that offloads its gradients (offload={layout.offload})"
        yield "layout", message, "layout=... without offload of optimizer, params or disk"


RULES = (
    *(_data_rules, _model_rules, _precision_rules, _optimizer_rules, _run_rules),
    *(_compress_rules, _elastic_rules, _guard_rules, _lora_rules),
)
MEASURE = "measure"
"""value of `pipeline.profile` that measures the layers before the run"""


def slice_issues(config: Config) -> Iterator[ValidationIssue]:
    slices = config.pipeline.slices
    if slices and sum(slices) != config.seq_len:
        message, legal = f"does not sum to a sequence (seq_len={config.seq_len})", f"a sum of {config.seq_len}"
        yield ValidationIssue("pipeline.slices", str(list(slices)), message, legal=legal)


def profile_issues(pipeline: PipelineConfig) -> Iterator[ValidationIssue]:
    key, given = "pipeline.profile", pipeline.profile
    if given and pipeline.layers:
        yield ValidationIssue(key, given, "is incompatible with pipeline.layers", hint="give one")
    if given and given != MEASURE:
        try:
            PipelineProfile.read(given)
        except ValueError as error:
            reason = error.reason if isinstance(error, InputFileError) else f"cannot be read ({error})"
            yield ValidationIssue(key, given, reason, legal=f"{MEASURE}, or RUN/profile.json")


def stage_issues(layers: tuple[int, ...], stages: int, model: ModelConfig) -> Iterator[ValidationIssue]:
    if len(layers) != stages or sum(layers) != model.layers:
        message = f"does not divide the {model.layers} layers of {model.name} into {stages} stages"
        legal = f"{stages} numbers that sum to {model.layers}"
        yield ValidationIssue("pipeline.layers", str(list(layers)), message, legal=legal)
