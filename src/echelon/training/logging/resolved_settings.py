"""Every number that was chosen for the user, with its reason: printed at the start of a run, kept in its plan."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from echelon.config.run_config import Config
from echelon.kernels import dispatch
from echelon.layout import Layout
from echelon.memory.checkpointing.memory_budget import MemoryBudget
from echelon.memory.compression import cost as compression_cost
from echelon.memory.offload import cost as offload_cost
from echelon.models.model_config import ModelConfig
from echelon.models.moe_config import MoEConfig
from echelon.optim import cost
from echelon.optim.optimizer_groups import is_muon_matrix
from echelon.optim.update_rule import DEFAULT_BETAS, resolve_betas, resolve_momentum
from echelon.parallel.cp import cost as cp_cost
from echelon.parallel.dp import cost as dp_cost
from echelon.parallel.dp import zero as shard
from echelon.parallel.dp.master_weights import SplitMasterWeights
from echelon.parallel.ep.cost import MAX_LOAD_FACTOR
from echelon.parallel.tp import cost as tp_cost
from echelon.parallel.tp_grid import cost as tp_grid_cost
from echelon.pipeline.execution.pipeline import Pipeline
from echelon.training import step_comm_volume
from echelon.training.engine import Engine
from echelon.training.logging.display import ResolvedSetting, format_bytes
from echelon.training.logging.metrics import PeakFlops


def resolved_settings(config: Config, engine: Engine, peak: PeakFlops, threads: int) -> Iterator[ResolvedSetting]:
    layout, parallel, options = engine.layout, engine.parallel, engine.parallel.options
    compute = dtype_name(options.compute_dtype)
    units = parallel.placement.param_groups
    more = [f"{key}={getattr(layout, key)}" for key in ("cp", "pp") if getattr(layout, key) > 1]
    yield "layout", str(layout), " x ".join([f"{layout.world} rank(s): dp={layout.dp} x tp={layout.tp}", *more])
    if layout.cp > 1 and isinstance(getattr(engine.model, "config", None), ModelConfig):
        yield from _cp_settings(layout, config.seq_len)
    shape = getattr(engine.model, "config", None)
    if isinstance(shape, ModelConfig) and shape.moe is not None:
        yield _moe_settings(shape.moe, layout, config.seq_len)
    if engine.pipeline is not None:
        yield from _pipeline_settings(engine.pipeline, config.seq_len)
    yield (
        "batch",
        f"{layout.batch} sequences" + (f" x {config.seq_len} tokens" if tp_traffic(engine, config.seq_len) else ""),
        f"dp {layout.dp} x microbatch {layout.microbatch} x accumulate {layout.accumulate}",
    )
    yield (
        "types",
        f"compute {compute}, master {_describe_master_weights(engine)}, gradients {_describe_gradient_dtype(engine)}",
        _gradient_dtype_reason(engine),
    )
    wide = [entry.name for unit in units if unit.keep_fp32 for entry in unit.params]
    if wide:
        shown = ", ".join(wide[:3]) + (f" and {len(wide) - 3} more" if len(wide) > 3 else "")
        yield "kept in float32", f"{len(wide)} parameters: {shown}", "precision.keep_fp32; with inputs in float32"
    if not engine.normalizer.loss_scaler.recipe.is_one:
        recipe = engine.normalizer.loss_scaler.recipe
        why = f"halved where gradients are not finite, doubled after {recipe.every:,} good steps"
        yield "loss scale", str(recipe), why if recipe.is_dynamic else "divided out again in the update"
    if options.matmul_precision != "same":
        scales = "row of each factor" if options.matmul_precision == "fp8-row" else "tensor"
        yield "products", options.matmul_precision, f"in the layers, with a scale for each {scales}; sums are float32"
    if options.compress != compression_cost.NONE:
        rounded = (
            "only what backward reads is rounded"
            if compression_cost.value_format(options.compress)
            else "nothing is rounded"
        )
        yield "saved for backward", options.compress, f"{rounded}; parameters and small tensors stay"
    if options.device.type == "cuda":
        ours = options.kernels == "auto" and dispatch.triton_enabled()
        why = "norms, rotary positions, SwiGLU, the head's loss, the update" if ours else "as asked, or without Triton"
        yield "kernels", "our own" if ours else "plain torch", why
    yield from _optimizer_settings(engine)
    if layout.dp * layout.cp > 1:
        yield (
            "reduction",
            f"{_describe_reduction(parallel.policy, layout.zero)}, in {_describe_gradient_dtype(engine)}",
            "then divided once by the number of valid targets of the whole step",
        )
    if isinstance(parallel.checkpointing, MemoryBudget):
        yield ("recompute", *parallel.checkpointing.describe())
    elif lengths := [len(segment.layers) for segment in parallel.checkpointing.segments if len(segment.layers) > 1]:
        why = f"{len(parallel.checkpointing.segment_tails)} inputs are kept of {len(parallel.checkpointing.forms)} layers on a rank"
        yield "recompute", f"segments of {max(lengths)} layers", why
    padding = sum(unit.num_shards * unit.shard_numel - unit.numel for unit in units)
    yield "units", f"{len(units)}, padded by {padding:,} elements", "parameters that are gathered and reduced together"
    if options.max_group_bytes:
        largest = (
            max(unit.num_shards * unit.shard_numel for unit in units if not unit.stays_unsharded)
            * options.compute_dtype.itemsize
        )
        why = f"of parameters gathered or reduced at once, as memory.buffer={config.memory.buffer:g} asks"
        yield (
            "largest unit",
            format_bytes(largest),
            why + ("" if largest <= options.max_group_bytes else ": one module is no smaller"),
        )
    if layout.tp > 1 and isinstance(getattr(engine.model, "config", None), ModelConfig):
        yield from _tp_settings(engine, config.seq_len)
    held = dp_cost.state_bytes(
        units,
        parallel.policy,
        compute_bytes=options.compute_dtype.itemsize,
        master_bytes=options.master_dtype.itemsize,
        reduce_bytes=options.grad_dtype.itemsize,
        float16=options.compute_dtype == torch.float16,
        num_versions=engine.pipeline.peak_weight_versions if engine.pipeline is not None else 1,
    )
    held["optimizer"] = cost.rank_state_bytes(
        engine.update_rule, parallel.placement, master_bytes=options.master_dtype.itemsize
    )
    held = _device_bytes(engine, held)
    shares = ", ".join(f"{key} {format_bytes(value)}" for key, value in held.items() if value)
    yield "states per rank", format_bytes(sum(held.values())), shares
    if layout.offload != "none":
        yield from _offload_settings(engine)
    sent = sum(item.bytes * item.count for item in engine.collectives(tp_traffic(engine, config.seq_len)))
    if sent:
        yield (
            "collectives",
            f"{format_bytes(sent)} per rank and step",
            "sum of the tensors reduced, gathered and scattered",
        )
    if config.replay.every:
        yield from _replay_settings(engine, config)
    yield "time-out", f"{config.timeout:g} s", "a rank that waits longer ends the run"
    yield "threads", str(threads), "per rank"
    yield "peak", f"{peak.flops / 1e12:.3g} TFLOP/s per device", peak.source


def _optimizer_settings(engine: Engine) -> Iterator[ResolvedSetting]:
    rule = engine.update_rule
    numbers = {
        "betas": list(resolve_betas(rule)) if rule.name in DEFAULT_BETAS else "",
        "momentum": resolve_momentum(rule) or "",
    }
    if told := ", ".join(f"{key} {value}" for key, value in numbers.items() if value):
        given = rule.betas is not None or rule.momentum is not None
        yield "optimizer", f"{rule.name}, {told}", "as asked" if given else "as is usual for it"
    if rule.name == "muon":
        entries = [entry for entry in engine.parallel.placement.params.values() if entry.trainable]
        beside = sum(not is_muon_matrix(rule, entry.name, entry.shape) for entry in entries)
        by = f"{beside} of {len(entries)} parameters here"
        yield "by AdamW", by, "vectors, and matrices that optimizer.by_adamw names"
    if rule.states != "float32":
        why = {
            "bfloat16": "rounded up or down by chance, so that small changes add up",
            "int8": f"{cost.QUANTIZATION_BLOCK} elements share a scale; parameters below {cost.MIN_QUANTIZED_NUMEL} elements keep float32",
        }
        yield "moments", rule.states, why[rule.states]
    if rule.ema:
        yield "average", f"of the weights, decay {rule.ema:g}", "evaluation and the sample of text use it"
    if rule.in_backward:
        yield "update", "in backward", "each unit's as soon as its gradients are reduced, which are then let go"


def _replay_settings(engine: Engine, config: Config) -> Iterator[ResolvedSetting]:
    """The price of the checks, in forward and backward passes."""
    every, tolerance = config.replay.every, config.replay.tolerance
    on_gpu = engine.parallel.options.device.type == "cuda"
    how = "equal bits" + (", of torch's deterministic kernels" if on_gpu else "")
    how = f"norms, equal to {tolerance:g}: kernels may add up in any order" if tolerance else how
    price = f"+{100 / every:.3g} % forward and backward passes"
    yield "replay", f"step {every}, {2 * every}, ... computed twice: {price}", f"what each rank made is compared: {how}"


def _describe_master_weights(engine: Engine) -> str:
    found = dtype_name(engine.parallel.options.master_dtype)
    if engine.parallel.options.master_dtype == torch.bfloat16:
        return "none (updates are rounded up or down by chance)"
    split = any(isinstance(unit.master, SplitMasterWeights) for unit in engine.parallel.sharded_model.param_groups)
    return f"{found} (in two halves, of which the upper one is the compute value)" if split else found


def _describe_gradient_dtype(engine: Engine) -> str:
    return " and ".join(sorted({dtype_name(unit.grad_dtype) for unit in engine.parallel.sharded_model.param_groups}))


def _gradient_dtype_reason(engine: Engine) -> str:
    options, units = engine.parallel.options, engine.parallel.sharded_model.param_groups
    types = {unit.grad_dtype for unit in units if not unit.spec.keep_fp32}
    if types == {options.compute_dtype} == {options.master_dtype} and options.compute_dtype.itemsize >= 4:
        return "one type for everything"
    if types == {options.compute_dtype} != {options.grad_dtype}:
        return "one microbatch on one rank: a gradient is never added to, so a longer type would hold the same"
    asked = "as precision.reduce asks" if options.reduce_dtype else "in float32 whatever the compute type is"
    return f"gradients accumulate and are reduced {asked}; sums inside products are float32"


def _device_bytes(engine: Engine, state_bytes: dict[str, int]) -> dict[str, int]:
    """Of states per rank, what is left of them on the device."""
    parallel = engine.parallel
    whole = sum(unit.shard_numel for unit in parallel.placement.param_groups)
    away = sum(
        unit.shard_numel for unit in parallel.placement.param_groups if unit.name in parallel.offload.group_names
    )
    names = {"master", "optimizer"}
    if parallel.offload.host is not None and parallel.offload.host.paged:
        names |= {"parameters", "gradients"}
    stay = (whole - away) / max(whole, 1)
    return {name: int(value * stay) if name in names else value for name, value in state_bytes.items()}


def _offload_settings(engine: Engine) -> Iterator[ResolvedSetting]:
    away, units = engine.parallel.offload, engine.parallel.sharded_model.param_groups
    if away.host is not None:
        places = " and ".join(
            f"{format_bytes(value)} on the {key}"
            for key, value in step_comm_volume.offloaded_bytes(engine).items()
            if value
        )
        those = (
            "all of them" if len(away.group_names) == len(units) else "the last layers, which the next step needs last"
        )
        yield "away", f"{len(away.group_names)} of {len(units)} units: {places} per rank", those
        moved = step_comm_volume.host_transfer_bytes(engine)
        told = f"{format_bytes(moved['gradients'])} of gradients down, {format_bytes(moved['parameters'])} of parameters up"
        yield "link", f"{told}, per rank and step", "between device and host, beside compute"
    elif offload_cost.offloads_optimizer(engine.layout.offload):
        yield "away", "nothing", "everything fits the device"
    if away.activation_offload is not None:
        yield "activations", "on the host between forward and backward", "about two layers' worth stays on the device"


def _pipeline_settings(pipeline: Pipeline, seq_len: int) -> Iterator[ResolvedSetting]:
    schedule = pipeline.schedule_for(seq_len)
    yield (
        "schedule",
        f"{schedule.name}: {schedule.stages} stages, {schedule.microbatches} microbatches",
        schedule.note or "every rank does its list of actions in order",
    )
    if pipeline.asynchronous:
        yield (
            "updates",
            "without waiting for the pipeline to be empty",
            "on older versions of the weights; the norm that clips is of each stage",
        )
    for line in str(pipeline.stages.split).splitlines():
        stage, links = line.split("  ", 1)
        yield stage, links.strip(), "links, and their share of the cost"


def tp_traffic(engine: Engine, seq_len: int) -> tp_cost.TransformerSizes | None:
    """What tensor parallelism's cost depends on; unknown for a user's module."""
    model = getattr(engine.model, "config", None)
    if not isinstance(model, ModelConfig):
        return None
    layout, size = engine.layout, engine.parallel.options.compute_dtype.itemsize
    return tp_cost.TransformerSizes.from_config(model, batch=layout.microbatch, seq_len=seq_len, element_bytes=size)


def _describe_reduction(policy: shard.ShardingPolicy, zero: int) -> str:
    if policy.num_shards == 1:
        return f"all-reduce over {policy.num_replicas} ranks, once a step"
    when = "every microbatch" if zero >= 2 else "once a step"
    across = f", all-reduce over {policy.num_replicas} replicas once a step" if policy.num_replicas > 1 else ""
    return f"reduce-scatter over {policy.num_shards} ranks, {when}{across}"


def _cp_settings(layout: Layout, seq_len: int) -> Iterator[ResolvedSetting]:
    tokens = cp_cost.tokens_per_rank(layout, seq_len)
    padding = tokens * layout.cp - seq_len
    padded = f", {padding} of them padding" if padding else ""
    how = {
        "ring": "keys and values go around",
        "gather": "keys and values are gathered",
        "ulysses": "heads are exchanged for tokens",
        "ring-ulysses": f"heads are exchanged between {layout.ulysses} ranks, keys and values go around",
    }
    zigzag = "" if layout.cp_kind == "ulysses" else "; a rank has an early and a late part, so that all see as much"
    why = how[layout.cp_kind] + zigzag
    yield "context", f"{tokens} tokens of {tokens * layout.cp} a rank{padded}", why


def _moe_settings(mixture: MoEConfig, layout: Layout, seq_len: int) -> ResolvedSetting:
    what = f"{mixture.k:g} of {mixture.experts} a token by {mixture.gate}, {mixture.experts // layout.ep} on a rank"
    if layout.ep * layout.etp == 1:
        return "experts", what, "all of them on every rank"
    even = mixture.k * layout.microbatch * seq_len / (layout.cp * layout.tp) * layout.etp
    rows = (
        f"at most {MAX_LOAD_FACTOR * even:,.0f} rows at a time, {MAX_LOAD_FACTOR:g} x an even load; more come in rounds"
    )
    by_nodes = f"; by way of nodes of {layout.ep_inner} ranks" if layout.ep_inner > 1 else ""
    return "experts", what, rows + by_nodes


def _tp_settings(engine: Engine, seq_len: int) -> Iterator[ResolvedSetting]:
    layout, model = engine.layout, engine.model.config
    assert isinstance(model, ModelConfig)
    side = layout.tp
    rows = -(-model.vocab // layout.tp) * layout.tp
    if layout.tp_kind != "1d":
        sizes = tp_grid_cost.grid_shape(layout)
        side, rows = sizes.x, tp_grid_cost.padded_vocab_rows(layout, model.vocab)
        here, columns = tp_grid_cost.local_activation_shape(layout, layout.microbatch, model.width)
        yield (
            "grid",
            f"{sizes.z} x {sizes.y} x {sizes.x} ranks, {here:,} sequence(s) and {columns:,} columns on each",
            f"activations are divided; {layout.microbatch:,} sequence(s) are padded to {here * sizes.batch_parts:,}",
        )
    yield "vocabulary", f"{model.vocab:,} padded to {rows:,}", "padded ids have no probability and no gradient"
    if layout.sp:
        length = -(-seq_len // layout.tp) * layout.tp
        yield (
            "sequence",
            f"{seq_len:,} padded to {length:,}",
            "between tensor-parallel regions each tp rank holds a slice",
        )
    if side > model.kv_heads:
        yield (
            "key-value heads",
            f"{model.kv_heads}, each on {side // model.kv_heads} ranks",
            "tp is a multiple of them" if layout.tp_kind == "1d" else "a side of the grid is a multiple of them",
        )


def dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
