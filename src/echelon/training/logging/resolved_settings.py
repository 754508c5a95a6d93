"""Resolved settings of a run, with their reasons: printed at its start, and written to its plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
from echelon.parallel.regional_compile import compiled_layers
from echelon.parallel.tp import cost as tp_cost
from echelon.pipeline.execution.pipeline import Pipeline
from echelon.training import step_comm_volume
from echelon.training.engine import Engine, model_config_of
from echelon.training.logging.display import ResolvedSetting, format_bytes
from echelon.training.logging.metrics import PeakFlops


def resolved_settings(config: Config, engine: Engine, peak: PeakFlops, threads: int) -> Iterator[ResolvedSetting]:
    """Yield every setting that was chosen for the user, with its reason."""
    layout, parallel, seq_len = engine.layout, engine.parallel, config.seq_len
    model = model_config_of(engine.model)
    more = [f"{key}={getattr(layout, key)}" for key in ("cp", "pp") if getattr(layout, key) > 1]
    yield "layout", str(layout), " x ".join([f"{layout.world} rank(s): dp={layout.dp} x tp={layout.tp}", *more])
    if layout.cp > 1 and model is not None:
        yield from _cp_settings(layout, seq_len)
    if parallel.cp_context is not None and parallel.cp_context.sequences is not None:
        yield from _gathered_modules(parallel.cp_context.sequences.modules)
    if model is not None and model.moe is not None:
        yield _moe_settings(model.moe, layout, seq_len)
    if engine.pipeline is not None:
        yield from _pipeline_settings(engine.pipeline, seq_len)
    size = f"{layout.batch} sequences" + (f" x {seq_len} tokens" if model is not None else "")
    yield "batch", size, f"dp {layout.dp} x microbatch {layout.microbatch} x accumulate {layout.accumulate}"
    if engine.adapted_linears:
        yield _adapter_setting(config, engine)
    yield from _precision_settings(engine)
    yield from _optimizer_settings(engine)
    if layout.dp * layout.cp > 1:
        reduction = f"{_describe_reduction(parallel.policy, layout.zero)}, in {_describe_gradient_dtype(engine)}"
        yield "reduction", reduction, "then divided once by the number of valid targets of the step"
    yield from _recompute_settings(engine)
    yield from _group_settings(engine, config.memory.buffer)
    if layout.tp > 1 and model is not None:
        yield from _tp_settings(model, layout, seq_len)
    yield _state_bytes(engine)
    if layout.offload != "none":
        yield from _offload_settings(engine)
    volume = sum(item.bytes * item.count for item in engine.collectives(tp_traffic(engine, seq_len)))
    if volume:
        yield "collectives", f"{format_bytes(volume)} per rank and step", "total size of their tensors"
    if config.replay.every:
        yield from _replay_settings(engine, config)
    yield "time-out", f"{config.timeout:g} s", "a rank that waits longer ends the run"
    yield "threads", str(threads), "per rank"
    yield "peak", f"{peak.flops / 1e12:.3g} TFLOP/s per device", peak.source


def _gathered_modules(names: Sequence[str]) -> Iterator[ResolvedSetting]:
    """What context parallelism leaves whole."""
    if names:
        parts = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
        yield "whole under cp", f"{len(names)} modules: {parts}", "every rank computes them, for full sequences"


def _adapter_setting(config: Config, engine: Engine) -> ResolvedSetting:
    lora, share = config.lora, engine.num_trained / engine.num_params
    what = f"rank {lora.rank} beside {len(engine.adapted_linears)} linears, outputs times {lora.scale:g}"
    trained = f"{engine.num_trained:,} of {engine.num_params:,} parameters are trained ({100 * share:.2g} %)"
    return "adapters", what, f"{trained}; " + (f"from {lora.init}" if lora.init else "B starts at zero")


def _precision_settings(engine: Engine) -> Iterator[ResolvedSetting]:
    options, recipe = engine.parallel.options, engine.normalizer.loss_scaler.recipe
    master, gradients = _describe_master_weights(engine), _describe_gradient_dtype(engine)
    compute = dtype_name(options.compute_dtype)
    yield "dtypes", f"compute {compute}, master {master}, gradients {gradients}", _gradient_dtype_reason(engine)
    wide = [param.name for group in engine.parallel.placement.param_groups if group.keep_fp32 for param in group.params]
    if wide:
        shown = ", ".join(wide[:3]) + (f" and {len(wide) - 3} more" if len(wide) > 3 else "")
        yield "in float32", f"{len(wide)} parameters: {shown}", "precision.keep_fp32; with inputs in float32"
    if not recipe.is_one:
        why = f"halves if gradients are not finite, doubles after {recipe.every:,} finite steps"
        yield "loss scale", str(recipe), why if recipe.is_dynamic else "the update divides by it"
    if options.matmul_precision != "same":
        scales = "row of each operand" if options.matmul_precision == "fp8-row" else "tensor"
        yield "GEMMs", options.matmul_precision, f"in the layers, with a scale per {scales}; accumulation is float32"
    if options.compress != compression_cost.NONE:
        lossy = compression_cost.value_format(options.compress)
        why = "only what backward reads is rounded" if lossy else "lossless"
        yield "saved activations", options.compress, f"{why}; parameters and small tensors are not compressed"
    if options.device.type == "cuda":
        fused = options.kernels == "auto" and dispatch.triton_enabled()
        why = "norms, rotary embedding, SwiGLU, LM head loss, update" if fused else "as configured, or without Triton"
        yield "kernels", "fused" if fused else "plain torch", why
    if counts := compiled_layers(engine.model):
        shown = ", ".join(f"{count} {name}" for name, count in counts.items())
        yield "compiled", shown, "the layers, once for each class; with compile=off as written"


def _recompute_settings(engine: Engine) -> Iterator[ResolvedSetting]:
    checkpointing = engine.parallel.checkpointing
    if isinstance(checkpointing, MemoryBudget):
        yield ("recompute", *checkpointing.describe())
    elif lengths := [len(segment.layers) for segment in checkpointing.segments if len(segment.layers) > 1]:
        why = f"{len(checkpointing.segment_tails)} inputs are saved of {len(checkpointing.forms)} layers on a rank"
        yield "recompute", f"segments of {max(lengths)} layers", why


def _group_settings(engine: Engine, limit_mib: float) -> Iterator[ResolvedSetting]:
    options, groups = engine.parallel.options, engine.parallel.placement.param_groups
    padding = sum(group.num_shards * group.shard_numel - group.numel for group in groups)
    yield "parameter groups", f"{len(groups)}, padded by {padding:,} elements", "all-gathered and reduced together"
    if options.max_group_bytes:
        numel = max(group.num_shards * group.shard_numel for group in groups if not group.stays_unsharded)
        largest = numel * options.compute_dtype.itemsize
        fits = "" if largest <= options.max_group_bytes else ": one module is larger"
        yield "largest group", format_bytes(largest), f"memory.buffer={limit_mib:g}{fits}"


def _state_bytes(engine: Engine) -> ResolvedSetting:
    parallel, options = engine.parallel, engine.parallel.options
    state_bytes = dp_cost.state_bytes(
        parallel.placement.param_groups,
        parallel.policy,
        compute_bytes=options.compute_dtype.itemsize,
        master_bytes=options.master_dtype.itemsize,
        reduce_bytes=options.grad_dtype.itemsize,
        float16=options.compute_dtype == torch.float16,
        num_versions=engine.pipeline.num_weight_versions if engine.pipeline is not None else 1,
        expert_policy=shard.expert_sharding_policy(parallel.layout, parallel.policy),
    )
    master_bytes = options.master_dtype.itemsize
    state_bytes["optimizer"] = cost.rank_state_bytes(engine.update_rule, parallel.placement, master_bytes=master_bytes)
    state_bytes = _device_bytes(engine, state_bytes)
    parts = ", ".join(f"{key} {format_bytes(value)}" for key, value in state_bytes.items() if value)
    return "states per rank", format_bytes(sum(state_bytes.values())), parts


def _optimizer_settings(engine: Engine) -> Iterator[ResolvedSetting]:
    rule = engine.update_rule
    betas = list(resolve_betas(rule)) if rule.name in DEFAULT_BETAS else ""
    numbers = {"betas": betas, "momentum": resolve_momentum(rule) or ""}
    if text := ", ".join(f"{key} {value}" for key, value in numbers.items() if value):
        given = rule.betas is not None or rule.momentum is not None
        yield "optimizer", f"{rule.name}, {text}", "as configured" if given else "its default"
    if rule.name == "muon":
        params = [param for param in engine.parallel.placement.params.values() if param.trainable]
        by_adamw = sum(not is_muon_matrix(rule, param.name, param.shape) for param in params)
        count = f"{by_adamw} of {len(params)} parameters on this rank"
        yield "by AdamW", count, "vectors, and matrices that optimizer.by_adamw names"
    if rule.states != "float32":
        why = {
            "bfloat16": "stochastic rounding, so that small changes accumulate",
            "int8": f"{cost.QUANTIZATION_BLOCK} elements share a scale; float32 below {cost.MIN_QUANTIZED_NUMEL}",
        }
        yield "moments", rule.states, why[rule.states]
    if rule.ema:
        yield "EMA", f"of the weights, decay {rule.ema:g}", "for evaluation and the text sample"
    if rule.in_backward:
        yield "update", "in backward", "of each parameter group when its gradients are reduced, which are then freed"


def _replay_settings(engine: Engine, config: Config) -> Iterator[ResolvedSetting]:
    """The replay check, with its price in forward and backward passes."""
    every, tolerance = config.replay.every, config.replay.tolerance
    on_gpu = engine.parallel.options.device.type == "cuda"
    how = "equal bits" + (", with deterministic kernels" if on_gpu else "")
    how = f"norms, equal to {tolerance:g}: kernels need not be deterministic" if tolerance else how
    price = f"+{100 / every:.3g} % forward and backward passes"
    yield "replay", f"step {every}, {2 * every}, ... computed twice: {price}", f"each rank compares: {how}"


def _describe_master_weights(engine: Engine) -> str:
    dtype = dtype_name(engine.parallel.options.master_dtype)
    if engine.parallel.options.master_dtype == torch.bfloat16:
        return "none (stochastic rounding)"
    split = any(isinstance(group.master, SplitMasterWeights) for group in engine.parallel.sharded_model.param_groups)
    return f"{dtype} (split: the upper half is the compute weight)" if split else dtype


def _describe_gradient_dtype(engine: Engine) -> str:
    return " and ".join(sorted({dtype_name(one.grad_dtype) for one in engine.parallel.sharded_model.trainable_groups}))


def _gradient_dtype_reason(engine: Engine) -> str:
    options, groups = engine.parallel.options, engine.parallel.sharded_model.trainable_groups
    dtypes = {group.grad_dtype for group in groups if not group.spec.keep_fp32}
    if dtypes == {options.compute_dtype} == {options.master_dtype} and options.compute_dtype.itemsize >= 4:
        return "one dtype for everything"
    if dtypes == {options.compute_dtype} != {options.grad_dtype}:
        return "one microbatch on one rank: gradients do not accumulate, so a wider dtype would be equal"
    how = "as in precision.reduce" if options.reduce_dtype else "in float32 for every compute dtype"
    return f"gradients accumulate and are reduced {how}; the accumulation dtype of GEMMs is float32"


def _device_bytes(engine: Engine, state_bytes: dict[str, int]) -> dict[str, int]:
    """Return the part of the states that stays on the device."""
    parallel = engine.parallel
    groups = parallel.placement.param_groups
    total = sum(group.shard_numel for group in groups)
    offloaded = sum(group.shard_numel for group in groups if group.name in parallel.offload.group_names)
    names = {"master", "optimizer"}
    if parallel.offload.host is not None and parallel.offload.host.paged:
        names |= {"parameters", "gradients"}
    share = (total - offloaded) / max(total, 1)
    return {name: int(value * share) if name in names else value for name, value in state_bytes.items()}


def _offload_settings(engine: Engine) -> Iterator[ResolvedSetting]:
    offload, groups = engine.parallel.offload, engine.parallel.sharded_model.param_groups
    if offload.host is not None:
        sizes = step_comm_volume.offloaded_bytes(engine)
        places = " and ".join(f"{format_bytes(value)} on the {key}" for key, value in sizes.items() if value)
        num_offloaded = len(offload.group_names)
        why = "all of them" if num_offloaded == len(groups) else "the last layers, which the next step needs last"
        yield "offload", f"{num_offloaded} of {len(groups)} parameter groups: {places} per rank", why
        moved = step_comm_volume.host_transfer_bytes(engine)
        down, up = format_bytes(moved["gradients"]), format_bytes(moved["parameters"])
        text = f"{down} of gradients to the host, {up} of parameters to the device, per rank and step"
        why = "overlapped with compute"
        if "states" in moved:
            text = ", ".join(f"{format_bytes(size)} of {name}" for name, size in moved.items() if size)
            text = f"{text}, both ways together, per rank and step"
            why = f"{engine.update_rule.name} updates on the device, page by page"
        yield "transfers", text, why
    elif offload_cost.offloads_optimizer(engine.layout.offload):
        yield "offload", "nothing", "all states fit the device"
    if offload.activation_offload is not None:
        yield "activations", "on the host between forward and backward", "except about two layers"


def _pipeline_settings(pipeline: Pipeline, seq_len: int) -> Iterator[ResolvedSetting]:
    schedule = pipeline.runtime.schedule_for(seq_len)
    what = f"{schedule.name}: {schedule.stages} stages, {schedule.microbatches} microbatches"
    yield "schedule", what, schedule.note or "each rank executes its list of actions in order"
    if pipeline.asynchronous:
        why = "from older weight versions; each stage clips by its own norm"
        yield "updates", "without draining the pipeline", why
    for line in str(pipeline.stages.split).splitlines():
        stage, layers = line.split("  ", 1)
        yield stage, layers.strip(), "layers, and their share of the cost"


def tp_traffic(engine: Engine, seq_len: int) -> tp_cost.TransformerSizes | None:
    """Return the sizes that communication costs depend on; None for a custom model."""
    model = model_config_of(engine.model)
    if model is None:
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
        "ring": "ring of keys and values",
        "gather": "all-gather of keys and values",
        "ulysses": "all-to-all between heads and tokens",
        "ring-ulysses": f"all-to-all over {layout.ulysses} ranks, ring of keys and values",
    }
    why = how[layout.cp_kind]
    if layout.cp_kind != "ulysses":
        why += "; zigzag: each rank has an early and a late chunk, which balances attention"
    yield "context", f"{tokens} tokens of {tokens * layout.cp} per rank{padded}", why


def _moe_settings(moe: MoEConfig, layout: Layout, seq_len: int) -> ResolvedSetting:
    what = f"{moe.k:g} of {moe.experts} per token by {moe.gate}, {moe.experts // layout.ep} per rank"
    if layout.ep * layout.etp == 1:
        return "experts", what, "all of them on every rank"
    balanced = moe.k * layout.microbatch * seq_len / (layout.cp * layout.tp) * layout.etp
    limit = f"{MAX_LOAD_FACTOR * balanced:,.0f} tokens at a time, {MAX_LOAD_FACTOR:g} x a balanced load"
    hierarchical = f"; hierarchical, {layout.ep_inner} ranks per node" if layout.ep_inner > 1 else ""
    return "experts", what, f"at most {limit}; more are dispatched in chunks{hierarchical}"


def _tp_settings(model: ModelConfig, layout: Layout, seq_len: int) -> Iterator[ResolvedSetting]:
    sizes, rows = tp_cost.grid_shape(layout), tp_cost.padded_vocab_rows(layout, model.vocab)
    if layout.tp_kind != "1d":
        sequences, columns = tp_cost.local_activation_shape(layout, layout.microbatch, model.width)
        grid = f"{sizes.z} x {sizes.y} x {sizes.x} ranks, {sequences:,} sequence(s) and {columns:,} columns on each"
        padding = f"{layout.microbatch:,} sequence(s) padded to {sequences * sizes.batch_parts:,}"
        yield "grid", grid, f"activations are sharded; {padding}"
    yield "vocabulary", f"{model.vocab:,} padded to {rows:,}", "padded ids have no probability and no gradient"
    if layout.sp:
        length = f"{seq_len:,} padded to {-(-seq_len // layout.tp) * layout.tp:,}"
        yield "sequence", length, "sequence parallelism: each tp rank holds a slice"
    if sizes.x > model.kv_heads:
        multiple = "tp" if layout.tp_kind == "1d" else "a side of the grid"
        heads = f"{model.kv_heads}, each on {sizes.x // model.kv_heads} ranks"
        yield "key-value heads", heads, f"{multiple} is a multiple of them"


def dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
