"""From a one-device model to one rank's part of a layout: the order of the transforms, to be read aloud."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from echelon import rng
from echelon.layout import Layout, Mesh
from echelon.layout.placement import Entry, Placement, Unit, units_of
from echelon.memory.checkpointing.checkpoint_policy import Part, Policy, Recomputed
from echelon.memory.checkpointing.cost import idle_reason, segment_length
from echelon.memory.checkpointing.memory_budget import Budgeted
from echelon.memory.checkpointing.saved_inputs import Arena, Keep, whole
from echelon.memory.compression import cost as compression_cost
from echelon.memory.compression import saved_tensor_compression
from echelon.memory.offload.cost import pages
from echelon.models.pipeline_model import inside
from echelon.models.tp_splits import split_of
from echelon.parallel import stage_modules
from echelon.parallel.comm.mesh_axis import ALONE, Axes, Axis, enumerate_groups, world_rank
from echelon.parallel.cp.context_parallel import Context, spread
from echelon.parallel.dp import sync_batchnorm, zero
from echelon.parallel.dp.offload_policy import Away, away_of
from echelon.parallel.dp.sharded_model import Flat, Moved
from echelon.parallel.ep import expert_parallel
from echelon.parallel.init_weights import first_values, move_buffers
from echelon.parallel.partitioned_activations import Partition
from echelon.parallel.tp import tensor_parallel
from echelon.parallel.tp.tp_collectives import Boundary
from echelon.parallel.tp_grid import grid_parallel
from echelon.precision import fp8_linear
from echelon.precision import keep_fp32 as keep

EXPERTS = "edp"
WORLD = "pp*replica*shard*cp*tp"
AGREEING = "replica*shard*cp*tp"
"""ranks of one stage, which must choose alike"""


def axes_of(policy: zero.Policy, tokens: str) -> tuple[str, ...]:
    """The axes that every run has, in the order in which all ranks make their process groups."""
    states = (policy.replica_axis, policy.axis, "dp", "tp", f"{policy.axis}*tp", f"pp*{policy.axis}*tp")
    return (*states, "pp", tokens, f"pp*{tokens}", WORLD)


CHOICES = {"kernels": ("auto", "plain"), "products": ("same", *fp8_linear.KINDS), "compress": compression_cost.KINDS}
"""of options that are words"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a run may choose beside the layout."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    compute: torch.dtype = torch.float32
    """the type of parameters and activations in forward and backward"""
    master: torch.dtype = torch.float32
    """the type of the optimizer's copy; bfloat16, the compute type itself, has none, and is rounded by chance"""
    reduce: torch.dtype | None = None
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
    link_costs: Mapping[str, float] = field(default_factory=dict)
    """of each link of the model's chain by its name, to balance them by; empty counts parameters"""
    slices: tuple[int, ...] = ()
    """lengths of TeraPipe's slices; empty chooses them"""
    partition: bool = False
    """inputs of layers that are repeated are divided over tp until then (sp=0)"""
    arena: bool = False
    """they are copied into memory set aside for them"""
    buffer: int = 0
    """bytes of parameters that are gathered or reduced at once, at most, as far as modules can be told apart; 0: any"""
    host: float | None = None
    """with `offload`, the share of the states that leave the device; none: as few as a GPU's memory asks for"""
    working: int = 0
    """with `offload`, bytes on the device for activations and whatever else comes and goes; 0 estimates them"""
    state_bytes: float = 8.0
    """with `offload`, what the optimizer keeps of an element; an engine knows it"""
    disk: str = ""
    """with `offload=disk`, a folder for its files; empty takes the one for temporary files"""
    own_loop: bool = False
    """the loop and the optimizer are the user's own (training/wrap.py)"""
    leave_out: str = ""
    """a collective left out on purpose (`dp:all_reduce`), to see that `verify` misses it"""

    def __post_init__(self) -> None:
        for key, legal in CHOICES.items():
            if getattr(self, key) not in legal:
                raise ValueError(f"there is no such choice ({key}={getattr(self, key)}); use {' or '.join(legal)}")
        if self.master.itemsize < 4 and (self.master, self.compute) != (torch.bfloat16, torch.bfloat16):
            raise ValueError(
                f"without a master copy weights are rounded by chance, which is built for bfloat16 (compute "
                f"{self.compute}, master {self.master}); use master=torch.float32"
            )
        if self.own_loop and (self.reduce is not None or self.master.itemsize < 4):
            raise ValueError(
                "in a loop of your own the optimizer reads master values and gradients of one type "
                f"(master {self.master}, reduce {self.reduce}); leave both out, or use echelon.Engine"
            )

    @property
    def gradients(self) -> torch.dtype:
        """The type in which gradients accumulate and are reduced."""
        return self.reduce or torch.promote_types(self.master, torch.float32)


@dataclass(frozen=True)
class Parallel:
    """A model laid out on this rank."""

    model: nn.Module
    layout: Layout
    axes: Axes
    placement: Placement
    flat: Flat
    stream: rng.Stream
    policy: zero.Policy
    options: Options
    tokens: Axis
    """the axis of ranks that have different tokens: losses and counts are summed over it"""
    away: Away
    """which units' states live off the device"""
    boundary: Boundary | None = None
    """where tensor-parallel regions begin and end"""
    context: Context | None = None
    """how sequences are cut over cp"""
    folded: bool = False
    """some stage has experts that are folded over its ranks"""
    recomputed: Recomputed = field(default_factory=Recomputed)
    """what layers do about what backward needs"""

    def saving(self) -> AbstractContextManager[object]:
        """Around every forward pass: what it leaves for backward is kept as the options say."""
        kind = self.options.compress
        return saved_tensor_compression.compressed(kind) if kind != compression_cost.NONE else nullcontext()


@dataclass(frozen=True, kw_only=True)
class Held:
    """Which modules each rank of pp holds."""

    ranks: tuple[frozenset[str], ...]
    """by rank of pp"""
    stages: tuple[tuple[str, ...], ...]
    """by stage of this rank"""
    in_flight: tuple[tuple[int, ...], ...] = ()
    """microbatches of each stage of this rank that are between forward and backward, at every moment that may be the
    fullest"""


def apply(model: nn.Module, layout: Layout, options: Options, held: Held | None = None) -> Parallel:
    """Changes `model` in place. Parameters on the meta device are made here, slice by slice, by `model.initial`."""
    mesh = Mesh(layout)
    stream = rng.Stream(options.seed)
    exact = torch.promote_types(options.master, torch.float32)  # a short master is rounded from what a long one holds
    values = first_values(model, device=options.device, dtype=exact, seed=options.seed)
    entries = read_entries(model)
    if options.keep_fp32 and options.compute.itemsize < 4:
        entries = keep.widened(model, entries, options.keep_fp32)

    rng.attach(model, stream)
    policy = zero.policy(
        layout,
        reshard_after_forward=options.reshard_after_forward,
        prefetch=options.prefetch,
        own_loop=options.own_loop,
    )
    tokens = "*".join(tokens_of(layout))
    axes = Axes(mesh, world_rank(), axes_of(policy, tokens), leave_out=options.leave_out)
    boundary: Boundary | None = None
    if layout.tp > 1 and layout.tp_kind == "1d":
        entries, boundary = tensor_parallel.split(
            model, entries, split_of(model), axes["tp"], sequence_parallel=bool(layout.sp)
        )
    elif layout.tp > 1:
        entries = grid_parallel.split(model, entries, split_of(model), layout, axes)
    if layout.tp > 1:
        for name in sorted({axis for entry in entries for axis in entry.sum_over}):
            axes.add(name)
    context = spread(model, layout, axes, options.device) if layout.cp > 1 else None
    entries = expert_parallel.split(model, entries, layout, axes, boundary, context)
    folded = any(entry.folded for entry in entries)
    if layout.dp > 1:
        sync_batchnorm.synchronise(model, axes["dp"])
    if held is not None:
        for name in sorted({axis for pp in range(layout.pp) for axis in _tied(entries, held, pp)}):
            axes.add(name)
        entries = stage_modules.held_entries(entries, held.ranks, axes.at["pp"])
        stage_modules.prune(model, held.ranks[axes.at["pp"]])
    saved_tensor_compression.check(options.compress, layout.recompute, layout.offload)
    recomputed = _recompute(model, layout, options, stream, axes, held)
    if options.products != "same":
        grid_parallel.refuse_narrow(layout, options.products)
        fp8_linear.check(options.device, options.compute, options.kernels)
        # Whole weights would be kept that zero=3 and offload=params let go of.
        kept = layout.accumulate > 1 and layout.zero < 3 and not pages(layout.offload)
        fp8_linear.apply(model, zero.layers(model), options.products, keeps_weights=kept)
    wide = keep.holders(entries)
    keep.compute_in_float32(model, wide, options.compute)
    units = zero.choose_units(model, options.units, limit=options.buffer // options.compute.itemsize)
    experts = zero.experts_policy(layout, policy)
    moves = {
        folded: (found, axes.axis(found.axis), axes.axis(found.replica_axis))
        for folded, found in ((False, policy), (True, experts))
    }
    for found in (policy, experts):
        axes.axis(stage_axis(found))
    placement = Placement(
        units=units_of(entries, units, policy.shards, experts.shards), at=coordinates(axes, axes.rank, policy, experts)
    )
    away = away_of(layout, options, placement.units, policy, model, zero.layers(model))

    def moved(unit: Unit) -> Moved:
        how, *over = moves[unit.folded]
        return how.on_the_host() if away.pages(unit) else how, over[0], over[1]

    flat = Flat(
        model,
        placement,
        policy,
        moved,
        device=options.device,
        compute=options.compute,
        master=options.master,
        reduce=options.gradients,
        parts=held.stages if held is not None else (),
        host=away.host_of,
    )
    if away.stash is not None:
        away.stash.leave([unit.full for unit in flat.units])
    flat.fill(values)
    move_buffers(model, options.device, options.compute, wide)
    recomputed.tell(flat.make_whole)
    return Parallel(
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


def stage_axis(policy: zero.Policy) -> str:
    """The ranks of a stage that hold different elements of a parameter, shards of parts of it."""
    inside = "tp" if policy.axis not in (EXPERTS, ALONE) else "etp"
    return inside if policy.axis == ALONE else f"{policy.axis}*{inside}"


def coordinates(axes: Axes, rank: int, policy: zero.Policy, experts: zero.Policy) -> dict[str, int]:
    """Where a rank stands on every axis, and among the shards and replicas of the placement record."""
    places = {
        "shard": policy.axis,
        "replica": policy.replica_axis,
        "expert shard": experts.axis,
        "expert replica": experts.replica_axis,
    }
    found = axes.mesh.coordinates(rank)
    for name, axis in places.items():
        found[name] = 0
        if axis != ALONE:
            ranks = next(ranks for ranks in enumerate_groups(axes.mesh, axis) if rank in ranks)
            found[name] = ranks.index(rank)
    return found


def _recompute(
    model: nn.Module, layout: Layout, options: Options, stream: rng.Stream, axes: Axes, held: Held | None
) -> Recomputed:
    """Layers repeat what they do not keep."""
    names = zero.layers(model)
    stages = held.stages if held is not None else (names,)
    flights = held.in_flight if held is not None else ((1,),)
    parts, left = [], list(names)
    for stage, counts in zip(stages, zip(*flights, strict=True), strict=True):
        mine = [name for name in left if any(inside(name, other) or inside(other, name) for other in stage)]
        left = [name for name in left if name not in mine]
        parts.append(Part(tuple(mine), max(counts)))
    keep = _keep(layout, options, axes, parts)
    policy = Policy(model, stream, keep=keep, split=layout.tp > 1, spread=layout.cp > 1)
    if layout.recompute.startswith("budget"):
        axes.add(AGREEING)
        agree = partial(axes[AGREEING].all_reduce, op="max")
        return Budgeted(policy, layout.recompute, parts, flights, agree=agree, add_up=axes["pp"].all_reduce)
    return policy.apply(layout.recompute, parts)


def _keep(layout: Layout, options: Options, axes: Axes, parts: Sequence[Part]) -> Keep:
    """How inputs of layers that are repeated are kept."""
    reason = idle_reason(layout)
    for word in ("partition", "arena"):
        if getattr(options, word) and (why := reason.get(word)):
            raise ValueError(f"memory.{word} has no effect with {why}; leave it out")
    keep: Keep = Partition(axes["tp"]) if options.partition else whole
    if not options.arena:
        return keep
    lengths = (segment_length(layout.recompute, layers=len(p.names), in_flight=p.in_flight) for p in parts)
    places = sum(p.in_flight * -(-len(p.names) // length) for p, length in zip(parts, lengths, strict=True))
    return Arena(places, keep)


def tokens_of(layout: Layout) -> tuple[str, ...]:
    """The axes over which a step's tokens are divided."""
    context = ("cp",) if layout.cp > 1 else ()
    return ("dp", *context, *(grid_parallel.token_axes(layout) if layout.tp_kind != "1d" else ()))


def _tied(entries: list[Entry], held: Held, at_pp: int) -> set[str]:
    return {
        stage_modules.tied_axis(entry.holders)
        for entry in stage_modules.held_entries(entries, held.ranks, at_pp)
        if entry.holders
    }


def read_entries(model: nn.Module) -> list[Entry]:
    """Every logical parameter once, under the first of its names."""
    names: dict[int, list[str]] = {}
    found: dict[int, nn.Parameter] = {}
    filters = {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        found[id(parameter)] = parameter
    return [
        Entry(
            name=names[key][0],
            names=tuple(names[key]),
            shape=tuple(parameter.shape),
            decay=parameter.dim() >= 2,
            trainable=parameter.requires_grad,
            filters=key in filters,
        )
        for key, parameter in found.items()
    ]
