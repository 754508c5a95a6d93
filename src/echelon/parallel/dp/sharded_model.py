"""`ShardedModel`: a model whose parameters are gathered, freed and reduced group by group (param_group.py).

[Note: the order of collectives]

Groups are reduced in a fixed order (the reverse of forward), whatever the order in which their gradients arrive, so
that ranks that did not use a parameter issue the same collectives. A gradient that did not arrive counts as zero.

[Note: frozen groups]

A module's frozen parameters form a group beside its trainable ones. It is gathered with them and never reduced. When
its gradients are complete does not tell when backward has left the module, so under zero=3 it is freed when the
gradients of the module's inputs arrive, of all its calls, or at the end of the microbatch if some have none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from echelon.kernels.gemm.fused_linear import ComputeGradient
from echelon.layout.placement import Piece
from echelon.models.layer_lists import layer_names
from echelon.models.pipeline_model import is_within
from echelon.parallel.dp.grad_hook import ParamGradHook, grad_hook_of
from echelon.parallel.dp.param_group import ParamGroup

if TYPE_CHECKING:
    from echelon.parallel.transform_context import TransformContext


class ShardedModel:
    """All parameter groups of a model, driven by hooks on its modules and parameters.

    A pipeline runs several microbatches at a time and reduces gradients itself (stage_param_groups.py).
    Groups that stay unsharded then do so for the step, and prefetching stays inside a stage.
    """

    def __init__(self, context: TransformContext, param_groups: Sequence[ParamGroup]):
        self.model, self.placement, self.policy = context.model, context.placement, context.policy
        self.param_groups = list(param_groups)
        self.pipelined = context.stage_modules is not None
        self.stage_groups = [self.param_groups]
        if context.stage_modules is not None:
            by_stage = context.stage_modules.by_stage
            self.stage_groups = [[g for g in self.param_groups if _is_used(g, names)] for names in by_stage]
        self._is_last_microbatch = True
        self._to_reduce: deque[ParamGroup] = deque()
        self._reducing: list[ParamGroup] = []
        self._scattering: list[ParamGroup] = []
        self.on_grad: Callable[[], None] = lambda: None
        """called whenever a gradient has arrived"""
        self.on_grad_reduced: Callable[[ParamGroup], None] | None = None
        """called during backward with each group whose gradients of a step are reduced"""
        self._modules = dict(self.model.named_modules())
        for group in self.param_groups:
            self.register_params(group)
        # Ranks gather groups that the host updates when their layer is called.
        self._gathered_in_order = [group for group in self.param_groups if _waits_for_host(group)]
        if any(group.policy.num_shards > 1 or not group.master.in_place for group in self.param_groups):
            self._hook_model()
            for group in self.param_groups:
                if not group.spec.stays_unsharded:
                    self._hook_layer(group)

    def register_params(self, group: ParamGroup) -> None:
        """Register a group's parameters in the modules, and hook their gradients."""
        self._set_module_params(group, group.parameters)
        for param in group.spec.params if group.spec.trainable else ():
            ParamGradHook(self, group, param).attach(group.parameters[param.name])

    @property
    def trainable_groups(self) -> list[ParamGroup]:
        """The groups that have gradients."""
        return [group for group in self.param_groups if group.spec.trainable]

    def swap_params(self, parameters: Sequence[Mapping[str, nn.Parameter]]) -> None:
        """Register parameters that groups had before, with their hooks."""
        for group, named in zip(self.param_groups, parameters, strict=True):
            self._set_module_params(group, named)

    def _set_module_params(self, group: ParamGroup, parameters: Mapping[str, nn.Parameter]) -> None:
        for param in group.spec.params:
            for name in param.names:
                module, _, attribute = name.rpartition(".")
                self._modules[module].register_parameter(attribute, parameters[param.name])

    def init_values(self, values: Callable[[Piece], Tensor]) -> None:
        """Set every shard from a function of the piece."""
        with torch.no_grad():
            for group in self.param_groups:
                for param in group.spec.params:
                    piece = self.placement.piece(group.spec, param)
                    if piece.start < piece.stop:
                        group.master.set_values(piece.shard_offset, values(piece))
                group.after_update()

    @staticmethod
    def piece_view(shard: Tensor, piece: Piece) -> Tensor:
        """Return a piece's elements in a group's shard (of values, gradients, or optimizer states)."""
        return shard[piece.shard_offset : piece.shard_offset + piece.stop - piece.start]

    def pieces(self) -> Iterator[tuple[ParamGroup, Piece]]:
        for group in self.param_groups:
            for param in group.spec.params:
                yield group, self.placement.piece(group.spec, param)

    # -- one microbatch -----------------------------------------------------------------------------------------------

    def begin_microbatch(self, *, first: bool, last: bool) -> None:
        """Prepare a microbatch, before its forward; `first` and `last` are of the step."""
        self._is_last_microbatch = last
        self._to_reduce = deque(
            group for group in reversed(self.trainable_groups) if last or group.policy.reduce_scatter_every_microbatch
        )
        self._reducing, self._scattering = [], []
        for group in self.param_groups:
            if first:
                group.reduction.begin_step()
            group.begin_microbatch()

    def end_microbatch(self) -> None:
        """Finish a microbatch, after its backward: launch the remaining reductions and wait for all."""
        self._launch_reductions(flush=True)
        for group in self._scattering:
            group.reduction.finish_reduce_scatter(last=self._is_last_microbatch)
        self._scattering = []
        for group in self._reducing[:] if self._is_last_microbatch else ():
            self._finish_reduction(group)
        self._reducing = []
        for group in self.param_groups:
            group.reshard()

    def after_update(self) -> None:
        for group in self.param_groups:
            group.after_update()

    def free_grads(self) -> None:
        for group in self.param_groups:
            group.free_grads()

    def unshard_for_recompute(self, module: nn.Module) -> None:
        """Unshard a layer before it is recomputed, when its hooks do not run. Its backward reshards it."""
        for group in self.param_groups:
            if group.policy.reshards_params and self._modules.get(group.spec.module) is module:
                group.unshard()

    @contextmanager
    def non_layer_params_unsharded(self) -> Iterator[None]:
        """Unshard all groups but the layers, for calls of model methods other than forward, which no hook sees."""
        inside = layer_names(self.model)
        for group in self.param_groups:
            if group.spec.stays_unsharded or group.spec.module not in inside:
                group.unshard()
        yield
        for group in self.param_groups:
            group.reshard()

    def _unshard_early(self) -> None:
        # Groups that stay unsharded are gathered at the start of forward, in one order everywhere, so that ranks may
        # call different modules. Layers that are freed after use are gathered in the order of calls.
        early = [group for group in self.param_groups if group.spec.stays_unsharded or not group.policy.reshards_params]
        early = [group for group in early if group not in self._gathered_in_order]
        for group in early:
            group.start_unshard()
        for group in early:
            if group.spec.stays_unsharded:
                group.unshard()

    def _unshard_host_updated(self, until: ParamGroup | None = None) -> None:
        """Unshard the groups that the host has updated, up to one: in one order on all ranks, whatever they call."""
        for group in self._gathered_in_order:
            group.unshard()
            if group is until:
                return

    def _launch_reductions(self, *, flush: bool) -> None:
        while self._to_reduce and (flush or self._to_reduce[0].grads.is_ready):
            group = self._to_reduce.popleft()
            group.reduction.start(group)
            if group.reduction.sends_early:
                group.reduction.finish()
            # One group behind: compute has overlapped its reduce-scatter.
            for other in [other for other in self._scattering if other.policy.finishes_reduce_scatter_early]:
                other.reduction.finish_reduce_scatter(last=self._is_last_microbatch)
                self._scattering.remove(other)
            self._reducing.append(group)
            self._scattering.append(group)
            if self.on_grad_reduced is not None and self._is_last_microbatch:
                for other in self._reducing[:-1]:  # one group behind, too
                    self._finish_reduction(other)

    def _finish_reduction(self, group: ParamGroup) -> None:
        if group in self._scattering:
            group.reduction.finish_reduce_scatter(last=True)
            self._scattering.remove(group)
        group.reduction.finish()
        self._reducing.remove(group)
        if self.on_grad_reduced is not None:
            self.on_grad_reduced(group)

    @torch.no_grad()
    def add_deferred_grad(self, parameter: Tensor, left: Tensor, right: Tensor) -> None:
        """Accumulate a parameter's deferred gradient, left x right, without a backward pass."""
        grad_hook_of(parameter).add_deferred_grad(left, right)

    @torch.no_grad()
    def add_deferred_gemm(self, parameters: Sequence[Tensor], compute: ComputeGradient) -> None:
        """Accumulate the deferred gradients of adjacent parameters, which one GEMM computes."""
        grad_hook_of(parameters[0]).receive(parameters, compute)
        for parameter in parameters:
            if parameter.requires_grad:
                grad_hook_of(parameter).mark_ready()

    def on_grads_ready(self, group: ParamGroup) -> None:
        """Reshard a group whose gradients are complete, and launch reductions."""
        if not (self.pipelined and group.spec.stays_unsharded):
            group.reshard()
        self._launch_reductions(flush=False)

    # -- hooks on modules ---------------------------------------------------------------------------------------------

    def _hook_model(self) -> None:
        def before_forward(_module: nn.Module, _args: Any) -> None:
            self._unshard_early()

        def after_forward(_module: nn.Module, _args: Any, output: Any) -> None:
            self._unshard_host_updated()
            if not any(tensor.requires_grad for tensor in iter_tensors(output)):
                for group in self.param_groups:  # evaluation: no backward will reshard them
                    group.reshard()

        self.model.register_forward_pre_hook(before_forward)
        self.model.register_forward_hook(after_forward)

    def _leave_call(self, group: ParamGroup) -> None:
        """Free a frozen group when backward has left all calls of its module."""
        group.num_calls_in_forward -= 1
        if self.pipelined or not group.num_calls_in_forward:  # a pipeline has forwards of other microbatches, too
            group.backward_has_passed = True
            group.reshard()

    def _hook_layer(self, group: ParamGroup) -> None:
        part = next(part for part in self.stage_groups if group in part)
        freed = [other for other in part if not other.spec.stays_unsharded]
        layers = list(dict.fromkeys(other.spec.module for other in freed))
        index, module = layers.index(group.spec.module), self.model.get_submodule(group.spec.module)
        prefetch = group.policy.prefetch if group.policy.reshards_params else 0

        def groups_of(names: Sequence[str]) -> list[ParamGroup]:
            return [other for name in names for other in freed if other.spec.module == name]

        ahead = groups_of(layers[index + 1 : index + 1 + prefetch])
        behind = groups_of(layers[max(index - prefetch, 0) : index][::-1])
        is_last = index == len(layers) - 1 and not self.pipelined  # other microbatches run before its backward

        def gather_with(others: list[ParamGroup]) -> None:
            group.unshard()
            for other in others:
                other.start_unshard()

        def before_forward(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if not group.spec.trainable and group.policy.reshards_params:
                group.num_calls_in_forward += 1
                _after_gradients([*iter_tensors(args), *iter_tensors(kwargs)], partial(self._leave_call, group))
            if group in self._gathered_in_order:
                self._unshard_host_updated(until=group)
            # In a recomputation, later modules may have run backward already.
            gather_with([other for other in ahead if self.pipelined or not other.is_backward_done])

        def before_backward(_gradient: Tensor) -> None:
            if group.is_backward_done:
                return  # another output of the module was first, and all gradients have arrived
            gather_with([other for other in behind if not other.is_backward_done])

        def after_forward(_module: nn.Module, _args: Any, output: Any) -> None:
            outputs = [tensor for tensor in iter_tensors(output) if tensor.requires_grad]
            if not outputs and torch.is_grad_enabled():
                return  # backward may pass through a structure we cannot see into: unsharded until the end
            if not outputs or ((self.policy.reshard_after_forward or self.pipelined) and not is_last):
                group.reshard()
            for tensor in outputs if group.policy.reshards_params else ():
                tensor.register_hook(before_backward)

        module.register_forward_pre_hook(before_forward, with_kwargs=True)
        module.register_forward_hook(after_forward)


def _after_gradients(tensors: Sequence[Tensor], call: Callable[[], None]) -> None:
    """Call a function when the gradients of all tensors that require one have arrived."""
    awaited = {id(tensor): tensor for tensor in tensors if tensor.requires_grad}

    def arrived(_gradient: Tensor, key: int) -> None:
        if awaited.pop(key, None) is not None and not awaited:
            call()

    for key, tensor in list(awaited.items()):
        tensor.register_hook(partial(arrived, key=key))


def _waits_for_host(group: ParamGroup) -> bool:
    """A layer that stays unsharded, that ranks gather together, and that the host updates."""
    gathered_once = group.policy.num_shards > 1 and not group.policy.reshards_params
    return group.offloaded is not None and gathered_once and not group.spec.stays_unsharded


def _is_used(group: ParamGroup, names: Sequence[str]) -> bool:
    names_in_group = [name for param in group.spec.params for name in param.names]
    return any(is_within(name, module) for name in names_in_group for module in names)


@contextmanager
def explain_freed_params() -> Iterator[None]:
    """Explain the error of reading a parameter whose storage is freed."""
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
