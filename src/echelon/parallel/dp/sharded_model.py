"""Flat units at work: a model whose parameters are gathered, freed and reduced unit by unit (flat_unit.py).

[Note: the order of collectives]

Units reduce in a fixed order (the reverse of forward), whatever order their gradients arrive in, so that a parameter
that some rank did not use cannot make ranks wait for different collectives. What did not arrive counts as zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from echelon.layout.placement import ParamGroupSpec, Piece, Placement
from echelon.parallel.comm.mesh_axis import MeshAxis
from echelon.parallel.dp.grad_buffer import ParamGradHook, grad_hook_of
from echelon.parallel.dp.offloaded_param_group import OffloadHost
from echelon.parallel.dp.param_group import ParamGroup
from echelon.parallel.dp.param_grouping import layer_names
from echelon.parallel.dp.zero import ShardingPolicy

GroupSharding = tuple[ShardingPolicy, MeshAxis, MeshAxis]
"""how a unit is moved: when, over which ranks it is divided, and on which it is copied"""


class ShardedModel:
    """All units of a model, driven by hooks on its modules and parameters.

    `parts` names the modules of each stage where a pipeline runs several microbatches at a time and reduces by itself
    (pipeline/execution/fsdp_hooks.py). What is kept then stays whole for the step, and gathering ahead stays inside a stage.
    """

    def __init__(
        self,
        model: nn.Module,
        placement: Placement,
        policy: ShardingPolicy,
        sharding_of: Callable[[ParamGroupSpec], GroupSharding],
        *,
        device: torch.device,
        compute_dtype: torch.dtype,
        master_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        stage_modules: Sequence[Sequence[str]] = (),
        host_for: Callable[[ParamGroupSpec], OffloadHost | None] = lambda _: None,
    ):
        self.model, self.placement, self.policy = model, placement, policy
        self.param_groups = [
            ParamGroup(
                unit,
                *sharding_of(unit),
                device=device,
                compute_dtype=compute_dtype,
                master_dtype=master_dtype,
                reduce_dtype=reduce_dtype,
                host=host_for(unit),
            )
            for unit in placement.param_groups
        ]
        self.pipelined = bool(stage_modules)
        self.stage_groups = [
            [unit for unit in self.param_groups if _is_used(unit, names)] for names in stage_modules
        ] or [self.param_groups]
        self._is_last_microbatch = True
        self._to_reduce: deque[ParamGroup] = deque()
        self._reducing: list[ParamGroup] = []
        self._scattering: list[ParamGroup] = []
        self.on_grad: Callable[[], None] = _no_op
        """called whenever a gradient has arrived"""
        self.on_grad_reduced: Callable[[ParamGroup], None] | None = None
        """called with each unit whose gradients of a step are reduced, while backward goes on (training/step_strategies.py)"""
        self._modules = dict(model.named_modules())
        for unit in self.param_groups:
            self.register_params(unit)
        # Where ranks gather together what the host updates, each layer is gathered when it is called: `_gather_host`.
        self._gathered_in_order = [unit for unit in self.param_groups if _waits_for_host(unit)]
        if any(unit.policy.num_shards > 1 for unit in self.param_groups) or not all(
            unit.master.in_place for unit in self.param_groups
        ):
            self._hook_model()
            for unit in self.param_groups:
                if not unit.spec.stays_unsharded:
                    self._hook_layer(unit)

    def register_params(self, group: ParamGroup) -> None:
        """Makes a unit's parameters those of the modules."""
        self._set_module_params(group, group.parameters)
        for entry in group.spec.params:
            if entry.trainable:
                ParamGradHook(self, group, entry).attach(group.parameters[entry.name])

    def swap_params(self, parameters: Sequence[Mapping[str, nn.Parameter]]) -> None:
        """The same with other parameters that units had before, which bring their hooks."""
        for unit, found in zip(self.param_groups, parameters, strict=True):
            self._set_module_params(unit, found)

    def _set_module_params(self, group: ParamGroup, parameters: Mapping[str, nn.Parameter]) -> None:
        for entry in group.spec.params:
            for name in entry.names:
                module, _, attribute = name.rpartition(".")
                self._modules[module].register_parameter(attribute, parameters[entry.name])

    def init_values(self, values: Callable[[Piece], Tensor]) -> None:
        """Sets every shard from a function that gives a piece's values."""
        with torch.no_grad():
            for unit in self.param_groups:
                for entry in unit.spec.params:
                    piece = self.placement.piece(unit.spec, entry)
                    if piece.start < piece.stop:
                        unit.master.set_values(piece.shard_offset, values(piece))
                unit.after_update()

    @staticmethod
    def piece_view(shard: Tensor, piece: Piece) -> Tensor:
        """A piece's elements in a unit's shard (of values, gradients, or optimizer states)."""
        return shard[piece.shard_offset : piece.shard_offset + piece.stop - piece.start]

    def pieces(self) -> Iterator[tuple[ParamGroup, Piece]]:
        for unit in self.param_groups:
            for entry in unit.spec.params:
                yield unit, self.placement.piece(unit.spec, entry)

    # -- one microbatch -----------------------------------------------------------------------------------------------

    def begin_microbatch(self, *, first: bool, last: bool) -> None:
        """Before a microbatch's forward. `first` and `last` are of the step."""
        self._is_last_microbatch = last
        self._to_reduce = deque(
            unit for unit in reversed(self.param_groups) if last or unit.policy.reduce_scatter_every_microbatch
        )
        self._reducing, self._scattering = [], []
        for unit in self.param_groups:
            if first:
                unit.begin_step()
            unit.begin_microbatch()

    def end_microbatch(self) -> None:
        """After a microbatch's backward: what has not been reduced is, and everything under way is waited for."""
        self._launch_reductions(flush=True)
        for unit in self._scattering:
            unit.finish_reduce_scatter(last=self._is_last_microbatch)
        self._scattering = []
        for unit in self._reducing[:] if self._is_last_microbatch else ():
            self._finish_reduction(unit)
        self._reducing = []
        for unit in self.param_groups:
            unit.reshard()

    def after_update(self) -> None:
        for unit in self.param_groups:
            unit.after_update()

    def free_grads(self) -> None:
        for unit in self.param_groups:
            unit.free_grads()

    def unshard_for_recompute(self, module: nn.Module) -> None:
        """Before a layer is repeated in backward, whose hooks then do not run. Backward through it frees it."""
        for unit in self.param_groups:
            if unit.policy.reshards_params and self._modules.get(unit.spec.name) is module:
                unit.unshard()

    @contextmanager
    def non_layer_params_unsharded(self) -> Iterator[None]:
        """All but the layers whole, for calls of the model's methods other than its forward, which no hook sees."""
        inside = layer_names(self.model)
        for unit in self.param_groups:
            if unit.spec.stays_unsharded or unit.spec.name not in inside:
                unit.unshard()
        yield
        for unit in self.param_groups:
            unit.reshard()

    def _unshard_early(self) -> None:
        # What stays whole is gathered at the model's start, in one order everywhere, so that ranks may call different
        # modules. Layers that are freed after use may not differ: their gathers come in the order of calls.
        early = [unit for unit in self.param_groups if unit.spec.stays_unsharded or not unit.policy.reshards_params]
        early = [unit for unit in early if unit not in self._gathered_in_order]
        for unit in early:
            unit.start_unshard()
        for unit in early:
            if unit.spec.stays_unsharded:
                unit.unshard()

    def _unshard_host_updated(self, until: ParamGroup | None = None) -> None:
        """What the host has updated, up to a unit: in one order on all ranks, whichever modules they call."""
        for unit in self._gathered_in_order:
            unit.unshard()
            if unit is until:
                return

    def _launch_reductions(self, *, flush: bool) -> None:
        while self._to_reduce and (flush or self._to_reduce[0].grads_ready):
            unit = self._to_reduce.popleft()
            unit.start_grad_reduction()
            if unit.sends_grad_early:
                unit.finish_grad_reduction()
            for other in [other for other in self._scattering if other.policy.finishes_reduce_scatter_early]:
                other.finish_reduce_scatter(
                    last=self._is_last_microbatch
                )  # one behind: its transfer had a unit's compute to hide in
                self._scattering.remove(other)
            self._reducing.append(unit)
            self._scattering.append(unit)
            if self.on_grad_reduced is not None and self._is_last_microbatch:
                for other in self._reducing[:-1]:  # one behind, too
                    self._finish_reduction(other)

    def _finish_reduction(self, group: ParamGroup) -> None:
        if group in self._scattering:
            group.finish_reduce_scatter(last=True)
            self._scattering.remove(group)
        group.finish_grad_reduction()
        self._reducing.remove(group)
        if self.on_grad_reduced is not None:
            self.on_grad_reduced(group)

    @torch.no_grad()
    def add_deferred_grad(self, parameter: Tensor, left: Tensor, right: Tensor) -> None:
        """A parameter's gradient, left x right, that was put off: into its place without a backward pass."""
        grad_hook_of(parameter).add_deferred_grad(left, right)

    def on_grads_ready(self, group: ParamGroup) -> None:
        """All gradients of a unit are there."""
        # Where something is frozen, backward may still have to pass through it.
        if group.all_trainable and not (self.pipelined and group.spec.stays_unsharded):
            group.reshard()
        self._launch_reductions(flush=False)

    # -- hooks on modules ---------------------------------------------------------------------------------------------

    def _hook_model(self) -> None:
        def before_forward(_module: nn.Module, _args: Any) -> None:
            self._unshard_early()

        def after_forward(_module: nn.Module, _args: Any, output: Any) -> None:
            self._unshard_host_updated()
            if not any(tensor.requires_grad for tensor in iter_tensors(output)):  # evaluation: no backward will free it
                for unit in self.param_groups:
                    unit.reshard()

        self.model.register_forward_pre_hook(before_forward)
        self.model.register_forward_hook(after_forward)

    def _hook_layer(self, group: ParamGroup) -> None:
        part = next(part for part in self.stage_groups if group in part)
        freed = [other for other in part if not other.spec.stays_unsharded]
        index, module = freed.index(group), self.model.get_submodule(group.spec.name)
        prefetch = group.policy.prefetch if group.policy.reshards_params else 0
        ahead = freed[index + 1 : index + 1 + prefetch]
        behind = freed[max(index - prefetch, 0) : index][::-1]
        is_last = index == len(freed) - 1 and not self.pipelined  # other microbatches come before its backward

        def gather_with(others: list[ParamGroup]) -> None:
            group.unshard()
            for other in others:
                other.start_unshard()

        def before_forward(_module: nn.Module, _args: Any) -> None:
            if group in self._gathered_in_order:
                self._unshard_host_updated(until=group)
            # In a repetition, what comes after this module may have gone backward already.
            gather_with([other for other in ahead if self.pipelined or not _backward_done(other)])

        def before_backward(_gradient: Tensor) -> None:
            if _backward_done(group):
                return  # another output of the module asked before, and its gradients are all there
            gather_with([other for other in behind if not other.grads_ready])

        def after_forward(_module: nn.Module, _args: Any, output: Any) -> None:
            outputs = [tensor for tensor in iter_tensors(output) if tensor.requires_grad]
            if not outputs and torch.is_grad_enabled():
                return  # backward may pass through something that we cannot see into: kept until the end
            if not outputs or ((self.policy.reshard_after_forward or self.pipelined) and not is_last):
                group.reshard()
            for tensor in outputs if group.policy.reshards_params else ():
                tensor.register_hook(before_backward)

        module.register_forward_pre_hook(before_forward)
        module.register_forward_hook(after_forward)


def _backward_done(group: ParamGroup) -> bool:
    """All gradients of the microbatch at hand are there."""
    return group.all_trainable and group.grads_ready


def _no_op() -> None:
    """Nobody asked to be told."""


def _waits_for_host(group: ParamGroup) -> bool:
    """A layer that stays whole, that ranks gather together, and whose values the host is still at work on."""
    return (
        group.offloaded is not None
        and group.policy.num_shards > 1
        and not group.policy.reshards_params
        and not group.spec.stays_unsharded
    )


def _is_used(group: ParamGroup, names: Sequence[str]) -> bool:
    mine = [name for entry in group.spec.params for name in entry.names]
    return any(name == other or name.startswith(other + ".") for name in mine for other in names)


@contextmanager
def explain_freed_params() -> Iterator[None]:
    """Says what it means when a parameter is read that is not there."""
    try:
        yield
    except RuntimeError as error:
        if "storage of size 0" not in str(error):
            raise
        raise ValueError(
            "a layer's parameters were used outside its own forward, where zero=3 or offload=params has freed them; "
            "set shard.units to patterns of the modules that are called, or use zero=2 and no offload=params"
        ) from error


def iter_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from iter_tensors(getattr(value, part.name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from iter_tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from iter_tensors(item)
