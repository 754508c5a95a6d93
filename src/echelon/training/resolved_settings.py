"""Every number that was chosen for the user, with its reason: printed at the start of a run, kept in its plan."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from echelon.config.run_config import Config
from echelon.kernels import dispatch
from echelon.layout import Layout
from echelon.memory.checkpointing.memory_budget import Budgeted
from echelon.memory.compression import cost as compression_cost
from echelon.memory.offload import cost as offload_cost
from echelon.models.model_config import ModelConfig
from echelon.models.moe_config import MixtureConfig
from echelon.optim import cost
from echelon.optim.optimizer_groups import is_muons
from echelon.optim.update_rule import BETAS, betas_of, momentum_of
from echelon.parallel.cp import cost as cp_cost
from echelon.parallel.dp import zero as shard
from echelon.parallel.dp.master_weights import SplitMaster
from echelon.parallel.ep.expert_parallel import CEILING
from echelon.parallel.tp import tensor_parallel
from echelon.parallel.tp_grid import cost as tp_grid_cost
from echelon.pipeline.execution.pipeline import Pipeline
from echelon.training import step_comm_volume
from echelon.training.engine import Engine
from echelon.training.logging.display import Derived, size
from echelon.training.logging.metrics import Peak


def derived(config: Config, engine: Engine, peak: Peak, threads: int) -> Iterator[Derived]:
    layout, parallel, options = engine.layout, engine.parallel, engine.parallel.options
    compute = name(options.compute)
    units = parallel.placement.units
    more = [f"{key}={getattr(layout, key)}" for key in ("cp", "pp") if getattr(layout, key) > 1]
    yield "layout", str(layout), " x ".join([f"{layout.world} rank(s): dp={layout.dp} x tp={layout.tp}", *more])
    if layout.cp > 1 and isinstance(getattr(engine.model, "config", None), ModelConfig):
        yield from _context(layout, config.seq_len)
    shape = getattr(engine.model, "config", None)
    if isinstance(shape, ModelConfig) and shape.mixture is not None:
        yield _experts(shape.mixture, layout, config.seq_len)
    if engine.pipeline is not None:
        yield from _pipeline(engine.pipeline, config.seq_len)
    yield (
        "batch",
        f"{layout.batch} sequences" + (f" x {config.seq_len} tokens" if traffic(engine, config.seq_len) else ""),
        f"dp {layout.dp} x microbatch {layout.microbatch} x accumulate {layout.accumulate}",
    )
    yield (
        "types",
        f"compute {compute}, master {_master(engine)}, gradients {_gradients(engine)}",
        _why_gradients(engine),
    )
    wide = [entry.name for unit in units if unit.wide for entry in unit.entries]
    if wide:
        shown = ", ".join(wide[:3]) + (f" and {len(wide) - 3} more" if len(wide) > 3 else "")
        yield "kept in float32", f"{len(wide)} parameters: {shown}", "precision.keep_fp32; with inputs in float32"
    if not engine.scaling.recipe.is_one:
        recipe = engine.scaling.recipe
        why = f"halved where gradients are not finite, doubled after {recipe.every:,} good steps"
        yield "loss scale", str(recipe), why if recipe.is_dynamic else "divided out again in the update"
    if options.products != "same":
        scales = "row of each factor" if options.products == "fp8-row" else "tensor"
        yield "products", options.products, f"in the layers, with a scale for each {scales}; sums are float32"
    if options.compress != compression_cost.NONE:
        rounded = (
            "only what backward reads is rounded"
            if compression_cost.narrow_of(options.compress)
            else "nothing is rounded"
        )
        yield "saved for backward", options.compress, f"{rounded}; parameters and small tensors stay"
    if options.device.type == "cuda":
        ours = options.kernels == "auto" and dispatch.allowed()
        why = "norms, rotary positions, SwiGLU, the head's loss, the update" if ours else "as asked, or without Triton"
        yield "kernels", "our own" if ours else "plain torch", why
    yield from _optimizer(engine)
    if layout.dp * layout.cp > 1:
        yield (
            "reduction",
            f"{_reduction(parallel.policy, layout.zero)}, in {_gradients(engine)}",
            "then divided once by the number of valid targets of the whole step",
        )
    if isinstance(parallel.recomputed, Budgeted):
        yield ("recompute", *parallel.recomputed.told())
    elif lengths := [len(segment.layers) for segment in parallel.recomputed.segments if len(segment.layers) > 1]:
        why = f"{len(parallel.recomputed.tails)} inputs are kept of {len(parallel.recomputed.forms)} layers on a rank"
        yield "recompute", f"segments of {max(lengths)} layers", why
    padding = sum(unit.shards * unit.shard_numel - unit.numel for unit in units)
    yield "units", f"{len(units)}, padded by {padding:,} elements", "parameters that are gathered and reduced together"
    if options.buffer:
        largest = max(unit.shards * unit.shard_numel for unit in units if not unit.kept) * options.compute.itemsize
        why = f"of parameters gathered or reduced at once, as memory.buffer={config.memory.buffer:g} asks"
        yield "largest unit", size(largest), why + ("" if largest <= options.buffer else ": one module is no smaller")
    if layout.tp > 1 and isinstance(getattr(engine.model, "config", None), ModelConfig):
        yield from _tensor_padding(engine, config.seq_len)
    held = shard.state_bytes(
        units,
        parallel.policy,
        compute_bytes=options.compute.itemsize,
        master_bytes=options.master.itemsize,
        reduce_bytes=options.gradients.itemsize,
        float16=options.compute == torch.float16,
        versions=engine.pipeline.versions if engine.pipeline is not None else 1,
    )
    held["optimizer"] = cost.held_bytes(engine.rule, parallel.placement, master_bytes=options.master.itemsize)
    held = _on_device(engine, held)
    shares = ", ".join(f"{key} {size(value)}" for key, value in held.items() if value)
    yield "states per rank", size(sum(held.values())), shares
    if layout.offload != "none":
        yield from _offload(engine)
    sent = sum(item.bytes * item.count for item in engine.collectives(traffic(engine, config.seq_len)))
    if sent:
        yield "collectives", f"{size(sent)} per rank and step", "sum of the tensors reduced, gathered and scattered"
    if config.replay.every:
        yield from _replay(engine, config)
    yield "time-out", f"{config.timeout:g} s", "a rank that waits longer ends the run"
    yield "threads", str(threads), "per rank"
    yield "peak", f"{peak.flops / 1e12:.3g} TFLOP/s per device", peak.why


def _optimizer(engine: Engine) -> Iterator[Derived]:
    rule = engine.rule
    numbers = {"betas": list(betas_of(rule)) if rule.name in BETAS else "", "momentum": momentum_of(rule) or ""}
    if told := ", ".join(f"{key} {value}" for key, value in numbers.items() if value):
        given = rule.betas is not None or rule.momentum is not None
        yield "optimizer", f"{rule.name}, {told}", "as asked" if given else "as is usual for it"
    if rule.name == "muon":
        entries = [entry for entry in engine.parallel.placement.entries.values() if entry.trainable]
        beside = sum(not is_muons(rule, entry.name, entry.shape) for entry in entries)
        by = f"{beside} of {len(entries)} parameters here"
        yield "by AdamW", by, "vectors, and matrices that optimizer.by_adamw names"
    if rule.states != "float32":
        why = {
            "bfloat16": "rounded up or down by chance, so that small changes add up",
            "int8": f"{cost.BLOCK} elements share a scale; parameters below {cost.LEAST} elements keep float32",
        }
        yield "moments", rule.states, why[rule.states]
    if rule.ema:
        yield "average", f"of the weights, decay {rule.ema:g}", "evaluation and the sample of text use it"
    if rule.in_backward:
        yield "update", "in backward", "each unit's as soon as its gradients are reduced, which are then let go"


def _replay(engine: Engine, config: Config) -> Iterator[Derived]:
    """The price of the checks, in forward and backward passes."""
    every, tolerance = config.replay.every, config.replay.tolerance
    on_gpu = engine.parallel.options.device.type == "cuda"
    how = "equal bits" + (", of torch's deterministic kernels" if on_gpu else "")
    how = f"norms, equal to {tolerance:g}: kernels may add up in any order" if tolerance else how
    price = f"+{100 / every:.3g} % forward and backward passes"
    yield "replay", f"step {every}, {2 * every}, ... computed twice: {price}", f"what each rank made is compared: {how}"


def _master(engine: Engine) -> str:
    found = name(engine.parallel.options.master)
    if engine.parallel.options.master == torch.bfloat16:
        return "none (updates are rounded up or down by chance)"
    split = any(isinstance(unit.master, SplitMaster) for unit in engine.parallel.flat.units)
    return f"{found} (in two halves, of which the upper one is the compute value)" if split else found


def _gradients(engine: Engine) -> str:
    return " and ".join(sorted({name(unit.gradient_type) for unit in engine.parallel.flat.units}))


def _why_gradients(engine: Engine) -> str:
    options, units = engine.parallel.options, engine.parallel.flat.units
    types = {unit.gradient_type for unit in units if not unit.unit.wide}
    if types == {options.compute} == {options.master} and options.compute.itemsize >= 4:
        return "one type for everything"
    if types == {options.compute} != {options.gradients}:
        return "one microbatch on one rank: a gradient is never added to, so a longer type would hold the same"
    asked = "as precision.reduce asks" if options.reduce else "in float32 whatever the compute type is"
    return f"gradients accumulate and are reduced {asked}; sums inside products are float32"


def _on_device(engine: Engine, held: dict[str, int]) -> dict[str, int]:
    """Of states per rank, what is left of them on the device."""
    parallel = engine.parallel
    whole = sum(unit.shard_numel for unit in parallel.placement.units)
    away = sum(unit.shard_numel for unit in parallel.placement.units if unit.name in parallel.away.names)
    names = {"master", "optimizer"}
    if parallel.away.host is not None and parallel.away.host.paged:
        names |= {"parameters", "gradients"}
    stay = (whole - away) / max(whole, 1)
    return {name: int(value * stay) if name in names else value for name, value in held.items()}


def _offload(engine: Engine) -> Iterator[Derived]:
    away, units = engine.parallel.away, engine.parallel.flat.units
    if away.host is not None:
        places = " and ".join(
            f"{size(value)} on the {key}" for key, value in step_comm_volume.held_away(engine).items() if value
        )
        those = "all of them" if len(away.names) == len(units) else "the last layers, which the next step needs last"
        yield "away", f"{len(away.names)} of {len(units)} units: {places} per rank", those
        moved = step_comm_volume.crossing(engine)
        told = f"{size(moved['gradients'])} of gradients down, {size(moved['parameters'])} of parameters up"
        yield "link", f"{told}, per rank and step", "between device and host, beside compute"
    elif offload_cost.has_states(engine.layout.offload):
        yield "away", "nothing", "everything fits the device"
    if away.stash is not None:
        yield "activations", "on the host between forward and backward", "about two layers' worth stays on the device"


def _pipeline(pipeline: Pipeline, seq_len: int) -> Iterator[Derived]:
    schedule = pipeline.scheduled(seq_len)
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


def traffic(engine: Engine, seq_len: int) -> tensor_parallel.Traffic | None:
    """What tensor parallelism's cost depends on; unknown for a user's module."""
    model = getattr(engine.model, "config", None)
    if not isinstance(model, ModelConfig):
        return None
    layout, size = engine.layout, engine.parallel.options.compute.itemsize
    return tensor_parallel.Traffic.of(model, batch=layout.microbatch, seq_len=seq_len, element_bytes=size)


def _reduction(policy: shard.Policy, zero: int) -> str:
    if policy.shards == 1:
        return f"all-reduce over {policy.replicas} ranks, once a step"
    when = "every microbatch" if zero >= 2 else "once a step"
    across = f", all-reduce over {policy.replicas} replicas once a step" if policy.replicas > 1 else ""
    return f"reduce-scatter over {policy.shards} ranks, {when}{across}"


def _context(layout: Layout, seq_len: int) -> Iterator[Derived]:
    tokens = cp_cost.slice_length(layout, seq_len)
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


def _experts(mixture: MixtureConfig, layout: Layout, seq_len: int) -> Derived:
    what = f"{mixture.k:g} of {mixture.experts} a token by {mixture.gate}, {mixture.experts // layout.ep} on a rank"
    if layout.ep * layout.etp == 1:
        return "experts", what, "all of them on every rank"
    even = mixture.k * layout.microbatch * seq_len / (layout.cp * layout.tp) * layout.etp
    rows = f"at most {CEILING * even:,.0f} rows at a time, {CEILING:g} x an even load; more come in rounds"
    by_nodes = f"; by way of nodes of {layout.ep_inner} ranks" if layout.ep_inner > 1 else ""
    return "experts", what, rows + by_nodes


def _tensor_padding(engine: Engine, seq_len: int) -> Iterator[Derived]:
    layout, model = engine.layout, engine.model.config
    assert isinstance(model, ModelConfig)
    side = layout.tp
    rows = -(-model.vocab // layout.tp) * layout.tp
    if layout.tp_kind != "1d":
        sizes = tp_grid_cost.grid_of(layout)
        side, rows = sizes.x, tp_grid_cost.padded_rows(layout, model.vocab)
        here, columns = tp_grid_cost.block(layout, layout.microbatch, model.width)
        yield (
            "grid",
            f"{sizes.z} x {sizes.y} x {sizes.x} ranks, {here:,} sequence(s) and {columns:,} columns on each",
            f"activations are divided; {layout.microbatch:,} sequence(s) are padded to {here * sizes.rows:,}",
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


def name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
