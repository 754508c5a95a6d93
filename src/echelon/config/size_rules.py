"""Sizes of a training run against the memory of this machine: what cannot fit is refused before it is allocated.

[Note: a lower bound]

Only what every run allocates is counted, so that no run that fits is refused:

    host        window, document starts and targets of a microbatch: three int64 per token
    on the CPU  also the weights of a rank, and the residual stream in the compute dtype, once for every layer whose
                input autograd saves

against all memory of the machine. A GPU's own memory is not known without torch, whose error comes quickly.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.layout import Layout, ValidationError, ValidationIssue, grammar
from echelon.models import model_config, user_model
from echelon.models.foreign.hf_source import is_hf_model
from echelon.models.model_config import ModelConfig

if TYPE_CHECKING:
    from echelon.config.run_config import Config

GIB = 1 << 30
LOADER_BYTES = 3 * 8
"""per token of a microbatch"""
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
MAX_SAMPLES = 2**63 - 1


def size_issues(config: Config, *, world: int | None, invalid_keys: Set[str] = frozenset()) -> list[ValidationIssue]:
    """Return an issue for each of model, batch and seq_len that no rank of this machine can hold."""
    issues = []
    if invalid_keys.isdisjoint(("steps", "batch")) and config.steps * config.batch > MAX_SAMPLES:
        message = f"counts more samples than int64 holds (batch={config.batch})"
        issues.append(ValidationIssue("steps", str(config.steps), message, legal=f"1 to {MAX_SAMPLES // config.batch}"))
    if not invalid_keys.isdisjoint(("model", "layout", "device", "dtype", "batch", "seq_len")):
        return issues
    if user_model.is_user_model(config.model) or is_hf_model(config.model):
        return issues
    with suppress(ValidationError):  # of an unknown model, which another rule reports
        model = config.override_model(model_config.find_model(config.model))
        issues += _memory_issues(config, model, world)
    return issues


def _memory_issues(config: Config, model: ModelConfig, world: int | None) -> Iterator[ValidationIssue]:
    on_cpu = config.device == "cpu" or (config.device == "auto" and not any(map(os.path.exists, GPU_DEVICES)))
    world = world or int(os.environ.get("WORLD_SIZE", 0)) or None
    if world is None and not config.layout and not on_cpu:
        return  # one rank per GPU, and their number is not known here
    layout = Layout.resolve(grammar.parse_pairs(config.layout).values, world=world, batch=config.batch)
    memory = machine_memory()
    weights = _weight_bytes(config, model, layout) if on_cpu else 0
    token = LOADER_BYTES + (_activation_bytes(config, model, layout) if on_cpu else 0)
    # Against one token, so that an impossible batch is reported with an impossible sequence length.
    seq_len = 1 if token * config.seq_len > memory else config.seq_len
    sizes = {"model": weights, "seq_len": token * config.seq_len, "batch": token * layout.microbatch * seq_len}
    for key, needed in sizes.items():
        if needed > memory:
            value = getattr(config, key)
            of_tokens = f"with seq_len={config.seq_len} " if key == "batch" and seq_len > 1 else ""
            needs = f"requires at least {needed / GIB:,.1f} GiB of memory on a rank ({memory / GIB:,.1f} in all here)"
            most = 0 if key == "model" else int(value * memory / needed)
            legal = f"{key} of at most {most}, if nothing else takes memory" if most else "a smaller model"
            hint = "or shard over more ranks" if key == "model" else "or more ranks, or accumulate in the layout"
            yield ValidationIssue(key, str(value), of_tokens + needs, legal=legal, hint=hint)


def _weight_bytes(config: Config, model: ModelConfig, layout: Layout) -> int:
    return 0 if "disk" in layout.offload else model.parameters * ITEM_BYTES[config.dtype] // layout.world


def _activation_bytes(config: Config, model: ModelConfig, layout: Layout) -> float:
    """Bytes per token of the microbatch; see [Note: a lower bound]."""
    saves_all = layout.recompute == "none" and config.compress == "none" and "activations" not in layout.offload
    layers = max(1, model.layers // layout.pp) if saves_all else 1
    return layers * model.width * ITEM_BYTES[config.dtype] / (layout.tp * layout.cp)


def machine_memory() -> int:
    """Return the bytes of memory of this machine, or of its container."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # "max" is no number
            limits.append(int(path.read_text(encoding="ascii")))
    return min(limits)
