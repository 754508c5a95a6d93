"""ZeRO 0 to 3, FSDP and HSDP: one mechanism, four policies.

The data-parallel ranks form `replicas` groups of `shards` ranks. Each unit's flat buffer (see layout/placement.py) is
cut into `shards` equal shards, and a rank's optimizer updates its own shard. Everything else is when to move what:

    zero  shards  gradients                                             parameters
    0     1       all-reduce over the replicas, once a step             whole, never move
    1     dp      reduce-scatter once a step                            all-gather once a step, before first use
    2     dp      reduce-scatter every microbatch, keep the shard       all-gather once a step, before first use
    3     dp      reduce-scatter every microbatch, keep the shard       all-gather before each use, freed after it

With `shard=` smaller than dp (HSDP) the shards of a group are all-reduced over the replicas once a step. Ranks of cp
hold the same parameters, and each has a part of every gradient: they divide the units too where all of dp does, and are
replicas otherwise. `flat.py` executes this.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from echelon.layout import Layout
from echelon.layout.collective import Collective
from echelon.layout.layout import ASYNC_SCHEDULES
from echelon.layout.placement import ParamGroupSpec

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class ShardingPolicy:
    """What a ZeRO stage asks of the flat units."""

    num_shards: int
    """ranks that divide a unit between them"""
    num_replicas: int
    """groups of such ranks that hold the same shards"""
    shard_axis: str = "shard"
    """the mesh axis of the ranks that divide a unit"""
    replica_axis: str = "replica"
    """the mesh axis of the ranks that hold the same shards"""
    reduce_scatter_every_microbatch: bool
    """gradients leave their full-size buffer after each microbatch (2, 3) or once a step (0, 1)"""
    reshards_params: bool
    """gathered parameters are freed after use (3)"""
    reshard_after_forward: bool = True
    """with `free_parameters`: free after forward and gather again for backward; otherwise once, after backward"""
    prefetch: int = 1
    """with `free_parameters`: how many units are gathered ahead of the one in use; otherwise all are, once a step"""

    params_on_host: bool = False
    """parameters and gradients live on the host: fetched before each use and freed after it, sent every microbatch"""
    has_weight_versions: bool = False
    """updates come while older versions of the parameters are in use (asynchronous schedules)"""
    accumulates_grads: bool = True
    """a gradient is added up before it is used: over microbatches, over ranks, or by the user's own loop"""
    user_loop: bool = False
    """the loop and the optimizer are the user's: they are given master values and gradients of one type"""

    @property
    def keeps_param_shard(self) -> bool:
        """A rank's own slice of the parameters lies where it is from step to step, for the optimizer to change."""
        return not self.reshards_params and not self.has_weight_versions

    def splits_master_weights(self, *, compute_bytes: int, master_bytes: int) -> bool:
        """Master values are kept as bfloat16 and the rest of their bits (master.py)."""
        return (compute_bytes, master_bytes) == (2, 4) and not self.user_loop

    def grads_are_final(self, group: ParamGroupSpec) -> bool:
        """Each gradient of a unit comes once a step, as it is used: nothing is gained by a longer type than its own."""
        return not self.accumulates_grads and not any(entry.partial_grad_axes for entry in group.params)

    def grads_stay_in_compute_dtype(self, group: ParamGroupSpec) -> bool:
        """Where a gradient lies on the device nothing is added to it: it is final, or it is added up on the host."""
        return self.grads_are_final(group) or (self.params_on_host and self.num_shards * self.num_replicas == 1)

    @property
    def finishes_reduce_scatter_early(self) -> bool:
        """A unit's reduction is taken in while later ones run: to free its buffer, or to start the replicas' sum."""
        return self.params_on_host or (
            self.num_shards > 1 and (self.reduce_scatter_every_microbatch or self.num_replicas > 1)
        )

    def with_params_on_host(self) -> ShardingPolicy:
        """The same for a unit whose parameters live on the host."""
        return replace(self, params_on_host=True, reduce_scatter_every_microbatch=True, reshards_params=True)


def sharding_policy(
    layout: Layout, *, reshard_after_forward: bool = True, prefetch: int = 1, user_loop: bool = False
) -> ShardingPolicy:
    spread = layout.cp > 1 and bool(layout.zero) and layout.shard == layout.dp
    shards = layout.num_shards * (layout.cp if spread else 1)
    return ShardingPolicy(
        num_shards=shards,
        num_replicas=layout.dp * layout.cp // shards,
        shard_axis="shard*cp" if spread else "shard",
        replica_axis="replica*cp" if layout.cp > 1 and not spread else "replica",
        reduce_scatter_every_microbatch=layout.zero >= 2 and shards > 1,
        reshards_params=layout.zero == 3 and shards > 1,
        reshard_after_forward=reshard_after_forward,
        prefetch=prefetch,
        has_weight_versions=layout.pp > 1 and layout.schedule in ASYNC_SCHEDULES,
        accumulates_grads=layout.dp * layout.cp * layout.pp * layout.accumulate > 1 or user_loop,
        user_loop=user_loop,
    )


def expert_sharding_policy(layout: Layout, dense: ShardingPolicy) -> ShardingPolicy:
    """The same for experts, of which ep x etp ranks have different ones: the others divide them, or copy them."""
    copies = layout.dp * layout.cp * layout.tp // (layout.ep * layout.etp)
    shards = copies if layout.zero else 1
    return replace(
        dense,
        num_shards=shards,
        num_replicas=copies // shards,
        shard_axis="edp" if layout.zero else "alone",
        replica_axis="alone" if layout.zero else "edp",
        reduce_scatter_every_microbatch=layout.zero >= 2 and shards > 1,
        reshards_params=layout.zero == 3 and shards > 1,
        accumulates_grads=dense.accumulates_grads or copies > 1,
    )


def layer_names(model: nn.Module) -> tuple[str, ...]:
    """The model's layers: the elements of its outermost lists of modules, or where there is no list its children."""
    return _listed_layers(model) or tuple(name for name, _ in model.named_children())


def _listed_layers(model: nn.Module) -> tuple[str, ...]:
    found = [
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        if type(module).__name__ in ("ModuleList", "Sequential")
        for key, _ in module.named_children()
    ]
    return tuple(name for name in found if not any(name.startswith(other + ".") for other in found))


def choose_param_groups(model: nn.Module, patterns: Sequence[str] = (), *, max_numel: int = 0) -> dict[str, bool]:
    """The modules that form units of their own, each with whether it is kept whole from forward to backward.

    Those that the patterns name; or without patterns the elements of lists of layers, and what is as large as one. What
    is in no list is kept, as the root is: only a list's elements are sure to be used through their own forward, where
    hooks gather them (`F.linear(x, self.embed.weight)` calls no module). What is small rides in the root's unit, since
    a small collective is all latency. A pattern that matches nothing is an error.

    With a `limit`, a layer of more elements is no unit, but its parts are, and so on, down to modules that own their
    parameters themselves.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    if patterns:
        return dict.fromkeys(_outermost(_matching_modules(modules, patterns)), False)
    listed = _listed_layers(model)
    children = [name for name, _ in model.named_children() if not any(_inside(layer, name) for layer in listed)]
    sizes = {name: sum(p.numel() for p in modules[name].parameters()) for name in [*listed, *children]}
    enough = max(max((sizes[name] for name in listed or children), default=0) / 2, 1)
    chosen = {name: name not in listed for name in _outermost(n for n in modules if sizes.get(n, 0) >= enough)}
    if not max_numel:
        return chosen
    return {
        part: kept
        for name, kept in chosen.items()
        for part in ([name] if kept else _split_module(modules, name, max_numel))
    }


def _split_module(modules: Mapping[str, nn.Module], name: str, limit: int) -> list[str]:
    """The largest parts of a module of no more than `limit` elements, or that own parameters themselves.

    What is a hundred times smaller rides in the root's unit."""
    module = modules[name]
    size = sum(p.numel() for p in module.parameters())
    own = any(True for _ in module.parameters(recurse=False))
    if size <= limit or own:
        return [name] if 100 * size >= limit else []
    if type(module).__name__ in ("ModuleList", "ModuleDict") or any(True for _ in module.children()):
        return [
            part for child, _ in module.named_children() for part in _split_module(modules, f"{name}.{child}", limit)
        ]
    return [name]


def _matching_modules(modules: Mapping[str, nn.Module], patterns: Sequence[str]) -> list[str]:
    missed = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in modules)]
    if missed:
        known = ", ".join(list(modules)[:9])
        raise ValueError(f"no module matches the unit pattern ({', '.join(missed)}); the model has {known}")
    chosen = [name for name in modules if any(fnmatchcase(name, pattern) for pattern in patterns)]
    lists = [name for name in chosen if type(modules[name]).__name__ in ("ModuleList", "ModuleDict")]
    if lists:
        raise ValueError(f"a list of modules is never called, so it cannot be a unit ({lists[0]}); use {lists[0]}.*")
    return chosen


def _outermost(names: Iterable[str]) -> list[str]:
    found = list(names)
    return [name for name in found if not any(_inside(name, other) and name != other for other in found)]


def _inside(name: str, other: str) -> bool:
    return name == other or name.startswith(other + ".")


def collectives(
    groups: Sequence[ParamGroupSpec],
    policy: ShardingPolicy,
    *,
    accumulate: int,
    compute_bytes: int,
    reduce_bytes: int,
    stage_uses: Mapping[str, int] | None = None,
    expert_policy: ShardingPolicy | None = None,
    recomputed: Collection[str] = (),
    paged: Container[str] = (),
) -> Iterable[Collective]:
    """What one step issues, unit by unit. `compute_bytes` and `reduce_bytes` are the sizes of one element.

    `experts` is the policy of their units. Units in `repeated` lie inside layers that are repeated, which gathers and
    frees them once more; those in `paged` live on the host.

    In a pipeline `stages` says how many of a rank's stages use each unit. There a unit is reduced after each of them,
    what is kept is gathered once a step, and layers are freed after every use.
    """
    last = max(
        (index for index, unit in enumerate(groups) if not unit.stays_unsharded and stage_uses is None), default=-1
    )
    dense = policy
    for index, unit in enumerate(groups):
        policy = expert_policy if unit.is_expert and expert_policy is not None else dense
        policy = policy.with_params_on_host() if unit.name in paged else policy
        whole, part = unit.num_shards * unit.shard_numel, unit.shard_numel
        if policy.num_shards > 1:
            # The last layer is not freed in between: backward needs it first.
            again = (
                (policy.reshard_after_forward or stage_uses is not None) and not unit.stays_unsharded and index != last
            )
            gathers = (2 if again else 1) * accumulate if policy.reshards_params else 1
            if policy.reshards_params and again and unit.name in recomputed:
                gathers += accumulate
            if stage_uses is not None and unit.stays_unsharded:
                gathers = 1
            scatters = (
                accumulate * (stage_uses[unit.name] if stage_uses else 1)
                if policy.reduce_scatter_every_microbatch
                else 1
            )
            yield Collective(
                op="all_gather",
                axis=policy.shard_axis,
                bytes=whole * unit.element_bytes(compute_bytes),
                count=gathers,
                overlapped=index > 0,
                purpose="parameters",
            )
            yield Collective(
                op="reduce_scatter",
                axis=policy.shard_axis,
                bytes=whole * unit.element_bytes(reduce_bytes),
                count=scatters,
                overlapped=index > 0,
                purpose="gradients",
            )
        if policy.num_replicas > 1:
            yield Collective(
                op="all_reduce",
                axis=policy.replica_axis,
                bytes=part * unit.element_bytes(reduce_bytes),
                count=accumulate * (stage_uses[unit.name] if stage_uses else 1) if policy.params_on_host else 1,
                overlapped=index > 0,
                purpose="gradients",
            )


def state_bytes(
    groups: Sequence[ParamGroupSpec],
    policy: ShardingPolicy,
    *,
    compute_bytes: int,
    master_bytes: int,
    moments: int = 0,
    moment_bytes: float | None = None,
    reduce_bytes: int = 0,
    num_versions: int = 1,
    float16: bool = False,
) -> dict[str, int]:
    """Bytes a rank holds between steps, by category; `moments` is the number of optimizer values per element.

    Moments, and gradients that are added up, are of the master's size where none is given. An asynchronous pipeline
    holds several `versions` of its parameters at once, the newest among them. No value is kept twice: a master of the
    compute type is a slice of the whole, and float32 beside bfloat16 (four bytes beside two) keeps what bfloat16 left
    out; `float16` has other bits, and its master stands whole beside it. Where gradients are lazy (flat_unit.py) theirs
    are not between steps, but at the end of backward.
    """
    found = dict.fromkeys(("parameters", "master", "gradients", "optimizer", "versions"), 0)
    for unit in groups:
        compute, master = unit.element_bytes(compute_bytes), unit.element_bytes(master_bytes)
        whole, part = unit.num_shards * unit.shard_numel, unit.shard_numel
        split = policy.splits_master_weights(compute_bytes=compute, master_bytes=master) and not float16
        beside = compute == master or split
        held = part if policy.reduce_scatter_every_microbatch else whole
        reduced = unit.element_bytes(reduce_bytes or master_bytes)
        found["parameters"] += 0 if policy.reshards_params else whole * compute
        found["master"] += part * (master - compute if beside and policy.keeps_param_shard else master)
        found["gradients"] += held * (compute if policy.grads_are_final(unit) else reduced)
        found["versions"] += (num_versions - 1) * whole * compute
    trainable = sum(unit.shard_numel for unit in groups)
    if not all(entry.trainable for unit in groups for entry in unit.params):
        trainable = _trainable_numel(groups)
    found["optimizer"] = round(moments * trainable * (master_bytes if moment_bytes is None else moment_bytes))
    return found


def _trainable_numel(units: Sequence[ParamGroupSpec]) -> int:
    return max(
        sum(stop - start for unit in units for start, stop in unit.decay_ranges(shard))
        for shard in range(units[0].num_shards)
    )
