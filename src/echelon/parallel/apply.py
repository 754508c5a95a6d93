"""From a one-device model to one rank's part of a layout: the order of the transforms, to be read aloud."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from echelon import rng
from echelon.faults.flight_recorder import FlightRecorder
from echelon.layout import Layout, Mesh
from echelon.layout.placement import LogicalParam, ParamGroupSpec, Placement, group_params
from echelon.memory.checkpointing.checkpoint_policy import CheckpointedLayers, RecomputePolicy, StageLayers
from echelon.memory.checkpointing.cost import ineffective_options, segment_length
from echelon.memory.checkpointing.memory_budget import MemoryBudget
from echelon.memory.checkpointing.saved_inputs import InputArena, SaveInput, save_as_is
from echelon.memory.compression import cost as compression_cost
from echelon.memory.compression import saved_tensor_compression
from echelon.memory.offload.cost import offloads_params
from echelon.models.pipeline_model import is_within
from echelon.models.tp_splits import get_tp_split
from echelon.parallel import stage_modules as stage_slicing
from echelon.parallel.comm.mesh_axis import SINGLE_RANK, MeshAxes, MeshAxis, enumerate_groups, world_rank
from echelon.parallel.cp.context_parallel import ContextParallel, apply_context_parallel
from echelon.parallel.dp import sync_batchnorm, zero
from echelon.parallel.dp.offload_policy import StateOffload, make_offload
from echelon.parallel.dp.sharded_model import GroupSharding, ShardedModel
from echelon.parallel.ep import expert_parallel
from echelon.parallel.init_weights import initial_values, move_buffers
from echelon.parallel.partitioned_activations import PartitionedActivations
from echelon.parallel.tp import tensor_parallel
from echelon.parallel.tp.tp_collectives import RegionBoundary
from echelon.parallel.tp_grid import grid_parallel
from echelon.precision import fp8_linear
from echelon.precision import keep_fp32 as keep

EXPERT_DP_AXIS = "edp"
WORLD_AXIS = "pp*replica*shard*cp*tp"
STAGE_RANKS_AXIS = "replica*shard*cp*tp"
"""ranks of one stage, which must choose alike"""


def mesh_axis_names(policy: zero.ShardingPolicy, token_axis: str) -> tuple[str, ...]:
    """The axes that every run has, in the order in which all ranks make their process groups."""
    states = (
        policy.replica_axis,
        policy.shard_axis,
        "dp",
        "tp",
        f"{policy.shard_axis}*tp",
        f"pp*{policy.shard_axis}*tp",
    )
    return (*states, "pp", token_axis, f"pp*{token_axis}", WORLD_AXIS)


CHOICES = {
    "kernels": ("auto", "plain"),
    "products": ("same", *fp8_linear.FP8_RECIPES),
    "compress": compression_cost.COMPRESSIONS,
}
"""of options that are words"""


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """What a run may choose beside the layout."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    compute_dtype: torch.dtype = torch.float32
    """the type of parameters and activations in forward and backward"""
    master_dtype: torch.dtype = torch.float32
    """the type of the optimizer's copy; bfloat16, the compute type itself, has none, and is rounded by chance"""
    reduce_dtype: torch.dtype | None = None
    """the type of gradients where they accumulate and are reduced; none: the master's, and at least float32"""
    keep_fp32: tuple[str, ...] = ()
    """patterns of the modules that compute in float32 beside a 16-bit compute type"""
    products: str = "same"
    """how linear layers of the layers multiply: in the compute type, or in 8 bits (`fp8`, `fp8-row`)"""
    kernels: str = "auto"
    """our own where there is a GPU, or `plain` torch everywhere"""
    compress: str = compression_cost.NONE
    """how what forward leaves for backward is kept (`lossless`, `lossless+fp8`): memory/compression/cost.py"""
    seed: int = 0
    reshard_after_forward: bool = True
    prefetch: int = 1
    units: tuple[str, ...] = ()
    """patterns of the modules that form units; empty chooses the layers"""
    stage_layers: tuple[int, ...] = ()
    """layers of each pipeline stage; empty balances them"""
    layer_costs: Mapping[str, float] = field(default_factory=dict)
    """of each link of the model's chain by its name, to balance them by; empty counts parameters"""
    slice_lengths: tuple[int, ...] = ()
    """lengths of TeraPipe's slices; empty chooses them"""
    partition: bool = False
    """inputs of layers that are repeated are divided over tp until then (sp=0)"""
    arena: bool = False
    """they are copied into memory set aside for them"""
    max_group_bytes: int = 0
    """bytes of parameters that are gathered or reduced at once, at most, as far as modules can be told apart; 0: any"""
    host_share: float | None = None
    """with `offload`, the share of the states that leave the device; none: as few as a GPU's memory asks for"""
    working_bytes: int = 0
    """with `offload`, bytes on the device for activations and whatever else comes and goes; 0 estimates them"""
    optimizer_bytes_per_element: float = 8.0
    """with `offload`, what the optimizer keeps of an element; an engine knows it"""
    disk_dir: str = ""
    """with `offload=disk`, a folder for its files; empty takes the one for temporary files"""
    user_loop: bool = False
    """the loop and the optimizer are the user's own (training/wrap.py)"""
    drop_collective: str = ""
    """a collective left out on purpose (`dp:all_reduce`), to see that `verify` misses it"""

    def __post_init__(self) -> None:
        for key, legal in CHOICES.items():
            if getattr(self, key) not in legal:
                raise ValueError(f"there is no such choice ({key}={getattr(self, key)}); use {' or '.join(legal)}")
        if self.master_dtype.itemsize < 4 and (self.master_dtype, self.compute_dtype) != (
            torch.bfloat16,
            torch.bfloat16,
        ):
            raise ValueError(
                f"without a master copy weights are rounded by chance, which is built for bfloat16 (compute "
                f"{self.compute_dtype}, master {self.master_dtype}); use master=torch.float32"
            )
        if self.user_loop and (self.reduce_dtype is not None or self.master_dtype.itemsize < 4):
            raise ValueError(
                "in a loop of your own the optimizer reads master values and gradients of one type "
                f"(master {self.master_dtype}, reduce {self.reduce_dtype}); leave both out, or use echelon.Engine"
            )

    @property
    def grad_dtype(self) -> torch.dtype:
        """The type in which gradients accumulate and are reduced."""
        return self.reduce_dtype or torch.promote_types(self.master_dtype, torch.float32)


@dataclass(frozen=True)
class ParallelModel:
    """A model laid out on this rank."""

    model: nn.Module
    layout: Layout
    axes: MeshAxes
    placement: Placement
    sharded_model: ShardedModel
    rng_stream: rng.RandomStream
    policy: zero.ShardingPolicy
    options: ParallelOptions
    token_axis: MeshAxis
    """the axis of ranks that have different tokens: losses and counts are summed over it"""
    offload: StateOffload
    """which units' states live off the device"""
    tp_boundary: RegionBoundary | None = None
    """where tensor-parallel regions begin and end"""
    cp_context: ContextParallel | None = None
    """how sequences are cut over cp"""
    has_expert_params: bool = False
    """some stage has experts that are folded over its ranks"""
    checkpointing: CheckpointedLayers = field(default_factory=CheckpointedLayers)
    """what layers do about what backward needs"""

    def saved_tensor_context(self) -> AbstractContextManager[object]:
        """Around every forward pass: what it leaves for backward is kept as the options say."""
        kind = self.options.compress
        return saved_tensor_compression.compressed(kind) if kind != compression_cost.NONE else nullcontext()


@dataclass(frozen=True, kw_only=True)
class StageModules:
    """Which modules each rank of pp holds."""

    by_pp_rank: tuple[frozenset[str], ...]
    """by rank of pp"""
    by_stage: tuple[tuple[str, ...], ...]
    """by stage of this rank"""
    in_flight: tuple[tuple[int, ...], ...] = ()
    """microbatches of each stage of this rank that are between forward and backward, at every moment that may be the
    fullest"""


def apply(
    model: nn.Module,
    layout: Layout,
    options: ParallelOptions,
    stage_modules: StageModules | None = None,
    recorder: FlightRecorder | None = None,
) -> ParallelModel:
    """Changes `model` in place. Parameters on the meta device are made here, slice by slice, by `model.initial`."""
    mesh = Mesh(layout)
    stream = rng.RandomStream(options.seed)
    exact = torch.promote_types(
        options.master_dtype, torch.float32
    )  # a short master is rounded from what a long one holds
    values = initial_values(model, device=options.device, dtype=exact, seed=options.seed)
    entries = logical_params(model)
    if options.keep_fp32 and options.compute_dtype.itemsize < 4:
        entries = keep.mark_fp32_entries(model, entries, options.keep_fp32)

    rng.attach_stream(model, stream)
    policy = zero.sharding_policy(
        layout,
        reshard_after_forward=options.reshard_after_forward,
        prefetch=options.prefetch,
        user_loop=options.user_loop,
    )
    tokens = "*".join(token_axes(layout))
    axes = MeshAxes(
        mesh,
        world_rank(),
        mesh_axis_names(policy, tokens),
        drop_collective=options.drop_collective,
        recorder=recorder,
    )
    boundary: RegionBoundary | None = None
    if layout.tp > 1 and layout.tp_kind == "1d":
        entries, boundary = tensor_parallel.apply_tensor_parallel(
            model, entries, get_tp_split(model), axes["tp"], sequence_parallel=bool(layout.sp)
        )
    elif layout.tp > 1:
        entries = grid_parallel.apply_grid_parallel(model, entries, get_tp_split(model), layout, axes)
    if layout.tp > 1:
        for name in sorted({axis for entry in entries for axis in entry.partial_grad_axes}):
            axes.add(name)
    context = apply_context_parallel(model, layout, axes, options.device) if layout.cp > 1 else None
    entries = expert_parallel.apply_expert_parallel(model, entries, layout, axes, boundary, context)
    folded = any(entry.is_expert for entry in entries)
    if layout.dp > 1:
        sync_batchnorm.convert_sync_batchnorm(model, axes["dp"])
    if stage_modules is not None:
        for name in sorted({axis for pp in range(layout.pp) for axis in _tied(entries, stage_modules, pp)}):
            axes.add(name)
        entries = stage_slicing.stage_params(entries, stage_modules.by_pp_rank, axes.coordinates["pp"])
        stage_slicing.prune_modules(model, stage_modules.by_pp_rank[axes.coordinates["pp"]])
    saved_tensor_compression.check_compatible(options.compress, layout.recompute, layout.offload)
    recomputed = _recompute(model, layout, options, stream, axes, stage_modules)
    if options.products != "same":
        grid_parallel.check_matmul_precision(layout, options.products)
        fp8_linear.check_fp8(options.device, options.compute_dtype, options.kernels)
        # Whole weights would be kept that zero=3 and offload=params let go of.
        kept = layout.accumulate > 1 and layout.zero < 3 and not offloads_params(layout.offload)
        fp8_linear.apply_fp8(model, zero.layer_names(model), options.products, cache_weights=kept)
    wide = keep.fp32_modules(entries)
    keep.compute_in_float32(model, wide, options.compute_dtype)
    units = zero.choose_param_groups(
        model, options.units, max_numel=options.max_group_bytes // options.compute_dtype.itemsize
    )
    experts = zero.expert_sharding_policy(layout, policy)
    moves = {
        folded: (found, axes.get_or_add(found.shard_axis), axes.get_or_add(found.replica_axis))
        for folded, found in ((False, policy), (True, experts))
    }
    for found in (policy, experts):
        axes.get_or_add(param_shard_axis(found))
    placement = Placement(
        param_groups=group_params(entries, units, policy.num_shards, experts.num_shards),
        coordinates=placement_coordinates(axes, axes.rank, policy, experts),
    )
    away = make_offload(layout, options, placement.param_groups, policy, model, zero.layer_names(model))

    def moved(unit: ParamGroupSpec) -> GroupSharding:
        how, *over = moves[unit.is_expert]
        return how.with_params_on_host() if away.is_paged(unit) else how, over[0], over[1]

    flat = ShardedModel(
        model,
        placement,
        policy,
        moved,
        device=options.device,
        compute_dtype=options.compute_dtype,
        master_dtype=options.master_dtype,
        reduce_dtype=options.grad_dtype,
        stage_modules=stage_modules.by_stage if stage_modules is not None else (),
        host_for=away.host_for,
    )
    if away.activation_offload is not None:
        away.activation_offload.exclude([unit.unsharded_param for unit in flat.param_groups])
    flat.init_values(values)
    move_buffers(model, options.device, options.compute_dtype, wide)
    recomputed.set_before_recompute(flat.unshard_for_recompute)
    return ParallelModel(
        model,
        layout,
        axes,
        placement,
        flat,
        stream,
        policy,
        options,
        axes[tokens],
        away,
        boundary,
        context,
        folded,
        recomputed,
    )


def param_shard_axis(policy: zero.ShardingPolicy) -> str:
    """The ranks of a stage that hold different elements of a parameter, shards of parts of it."""
    inside = "tp" if policy.shard_axis not in (EXPERT_DP_AXIS, SINGLE_RANK) else "etp"
    return inside if policy.shard_axis == SINGLE_RANK else f"{policy.shard_axis}*{inside}"


def placement_coordinates(
    axes: MeshAxes, rank: int, policy: zero.ShardingPolicy, expert_policy: zero.ShardingPolicy
) -> dict[str, int]:
    """Where a rank stands on every axis, and among the shards and replicas of the placement record."""
    places = {
        "shard": policy.shard_axis,
        "replica": policy.replica_axis,
        "expert shard": expert_policy.shard_axis,
        "expert replica": expert_policy.replica_axis,
    }
    found = axes.mesh.coordinates(rank)
    for name, axis in places.items():
        found[name] = 0
        if axis != SINGLE_RANK:
            ranks = next(ranks for ranks in enumerate_groups(axes.mesh, axis) if rank in ranks)
            found[name] = ranks.index(rank)
    return found


def _recompute(
    model: nn.Module,
    layout: Layout,
    options: ParallelOptions,
    stream: rng.RandomStream,
    axes: MeshAxes,
    held: StageModules | None,
) -> CheckpointedLayers:
    """Layers repeat what they do not keep."""
    names = zero.layer_names(model)
    stages = held.by_stage if held is not None else (names,)
    flights = held.in_flight if held is not None else ((1,),)
    parts, left = [], list(names)
    for stage, counts in zip(stages, zip(*flights, strict=True), strict=True):
        mine = [name for name in left if any(is_within(name, other) or is_within(other, name) for other in stage)]
        left = [name for name in left if name not in mine]
        parts.append(StageLayers(tuple(mine), max(counts)))
    keep = _keep(layout, options, axes, parts)
    policy = RecomputePolicy(
        model, stream, save_input=keep, tensor_parallel=layout.tp > 1, context_parallel=layout.cp > 1
    )
    if layout.recompute.startswith("budget"):
        axes.add(STAGE_RANKS_AXIS)
        agree = partial(axes[STAGE_RANKS_AXIS].all_reduce, op="max")
        return MemoryBudget(
            policy, layout.recompute, parts, flights, all_reduce_max=agree, all_reduce_sum=axes["pp"].all_reduce
        )
    return policy.apply(layout.recompute, parts)


def _keep(layout: Layout, options: ParallelOptions, axes: MeshAxes, parts: Sequence[StageLayers]) -> SaveInput:
    """How inputs of layers that are repeated are kept."""
    reason = ineffective_options(layout)
    for word in ("partition", "arena"):
        if getattr(options, word) and (why := reason.get(word)):
            raise ValueError(f"memory.{word} has no effect with {why}; leave it out")
    keep: SaveInput = PartitionedActivations(axes["tp"]) if options.partition else save_as_is
    if not options.arena:
        return keep
    lengths = (segment_length(layout.recompute, layers=len(p.names), in_flight=p.in_flight) for p in parts)
    places = sum(p.in_flight * -(-len(p.names) // length) for p, length in zip(parts, lengths, strict=True))
    return InputArena(places, keep)


def token_axes(layout: Layout) -> tuple[str, ...]:
    """The axes over which a step's tokens are divided."""
    context = ("cp",) if layout.cp > 1 else ()
    return ("dp", *context, *(grid_parallel.token_axes(layout) if layout.tp_kind != "1d" else ()))


def _tied(entries: list[LogicalParam], held: StageModules, at_pp: int) -> set[str]:
    return {
        stage_slicing.tied_axis(entry.tied_pp_ranks)
        for entry in stage_slicing.stage_params(entries, held.by_pp_rank, at_pp)
        if entry.tied_pp_ranks
    }


def logical_params(model: nn.Module) -> list[LogicalParam]:
    """Every logical parameter once, under the first of its names."""
    names: dict[int, list[str]] = {}
    found: dict[int, nn.Parameter] = {}
    filters = {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        found[id(parameter)] = parameter
    return [
        LogicalParam(
            name=names[key][0],
            names=tuple(names[key]),
            shape=tuple(parameter.shape),
            decay=parameter.dim() >= 2,
            trainable=parameter.requires_grad,
            is_conv=key in filters,
        )
        for key, parameter in found.items()
    ]
