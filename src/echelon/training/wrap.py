"""`wrap`: a drop-in replacement for DDP and FSDP in a user's training loop.

    model = ec.wrap(model, "dp=4,zero=3")
    optimizer = torch.optim.AdamW(model.parameters())
    loss = loss_fn(model(x), y); loss.backward(); optimizer.step(); optimizer.zero_grad()

Gradients are averaged over dp, as in DDP. That is the gradient of the global mean only if every rank has as many
targets; `model.mean(total, count)` returns the exact mean over all ranks, with its exact gradient.

A gate that balances by the expert load of a step moves its bias when the step's last backward ends, by the load of all
ranks: the optimizer does not read the bias, so that is as good as after `optimizer.step()`, and needs no call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from echelon import compat
from echelon.layout import Layout, ValidationError, check_layout, rules
from echelon.layout.placement import Piece
from echelon.memory.checkpointing.checkpoint_wrapper import recompute_context
from echelon.memory.checkpointing.memory_budget import MemoryBudget
from echelon.models.foreign.causal_lm import adapt_if_foreign
from echelon.models.traced.trace_on_demand import trace_if_needed
from echelon.parallel.apply import apply
from echelon.parallel.comm.axis_names import WORLD_AXIS
from echelon.parallel.comm.mesh_axis import MeshAxis, world_size
from echelon.parallel.dp.sharded_model import iter_tensors
from echelon.parallel.parallel_options import ParallelOptions
from echelon.parallel.partial_gradients import PartialGradients
from echelon.training.grad_norm import GradientNorm, clip_factor
from echelon.training.logging.expert_load_counter import ExpertLoadCounter, experts_per_moe_layer


class WrappedModel(nn.Module):
    """A model in a layout, whose forward and backward communicate.

    `parameters()` are what this rank's optimizer updates: the model's parameters (zero=0), or flat shards of them.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, options: ParallelOptions, inputs: Mapping[str, Tensor] | None = None
    ):
        super().__init__()
        self.layout = layout
        model = trace_if_needed(adapt_if_foreign(model), layout, inputs, options.compute_dtype)
        num_experts = experts_per_moe_layer(model, layout)
        self._parallel = apply(model, layout, options)
        self.module = self._parallel.model
        self._shards = dict(self._local_parameters())
        self._grad_norm = GradientNorm(self._parallel)
        self._partial_gradients = PartialGradients(self._parallel)
        self._expert_loads = ExpertLoadCounter(self._parallel, num_experts)
        self._is_last_microbatch, self._starts_step, self._callback_queued = True, True, False
        self._ends_step: bool | None = None
        """whether the current microbatch ends a step, as set when its forward began; None between microbatches"""
        self._samples = 0
        self.module.register_state_dict_pre_hook(self._before_state_dict)
        self.module.register_load_state_dict_pre_hook(self._before_load)
        # Before the hooks of parameter groups, which must all-gather the weights after the optimizer's step.
        self.module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
        self._parallel.sharded_model.on_grad = self._during_backward
        for group in self._parallel.sharded_model.param_groups:
            group.grads.scale = 1.0 / layout.dp

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        budget = self._parallel.checkpointing
        if isinstance(budget, MemoryBudget) and budget.is_undecided and self.training and torch.is_grad_enabled():
            self._rehearse_memory_budget(budget, args, kwargs)
        with self._parallel.saved_tensor_context():
            return self.module(*args, **kwargs)

    @torch.no_grad()
    def _rehearse_memory_budget(self, budget: MemoryBudget, args: Any, kwargs: Any) -> None:
        """Decide what each layer recomputes, by a forward pass that changes nothing."""
        samples, stream = self._samples, self._parallel.rng_stream
        with recompute_context(self.module, stream, stream.samples), budget.rehearsal(self._parallel.options.device):
            self.module(*args, **kwargs)
        self._samples = samples

    def mean(self, total: Tensor, count: Tensor) -> Tensor:
        """Return the mean over all ranks' targets, from this rank's sum of losses and number of targets."""
        out: Tensor = _GlobalMean.apply(total, count, self._parallel.axes["dp"])
        return out

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank, for all but the last microbatch of a step."""
        self._is_last_microbatch = False
        try:
            yield
        finally:
            self._is_last_microbatch = True

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        lead = prefix + "." if prefix else ""
        for name, parameter in self._shards.items():
            yield lead + name, parameter

    def clip_grad_norm_(self, limit: float) -> Tensor:
        """Scale all gradients to a norm over all ranks of at most `limit`; return the norm before."""
        norm = self._grad_norm()
        factor = clip_factor(norm, limit)
        for parameter in self._shards.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.dtype))
        return norm

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the one-device model's `state_dict`, unsharded, on every rank. All ranks must call it."""
        state: dict[str, Tensor] = {}
        sharded_model = self._parallel.sharded_model
        for group, piece in sharded_model.pieces():
            param, values = piece.param, group.master.values()
            local = values.new_zeros(param.local_numel)
            if piece.is_owner and piece.is_first_replica:
                local[piece.start : piece.stop] = sharded_model.piece_view(values, piece)
            full = values.new_zeros(param.shape)
            box = tuple(slice(low, high) for low, high in piece.box)
            unpadded = tuple(slice(0, high - low) for low, high in piece.box)
            full[box] = local.view(param.local_shape)[unpadded]
            self._parallel.axes[WORLD_AXIS].all_reduce(full)
            state.update(dict.fromkeys(param.names, full))
        return state | {name: buffer.clone() for name, buffer in self._persistent_buffers()}

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `full_state_dict`, or a one-device model's `state_dict`; every rank passes all of it."""
        self._check_full(state)
        sharded_model = self._parallel.sharded_model
        for group in sharded_model.param_groups:
            group.reshard()  # a forward without backward leaves old weights unsharded

        def values(piece: Piece) -> Tensor:
            part = state[piece.param.name][tuple(slice(low, high) for low, high in piece.box)]
            padded = part.new_zeros(piece.param.local_shape)
            padded[tuple(slice(0, size) for size in part.shape)] = part
            return padded.reshape(-1)[piece.start : piece.stop]

        sharded_model.init_values(values)
        for name, buffer in self._persistent_buffers():
            buffer.copy_(state[name])

    def _check_full(self, state: Mapping[str, Tensor]) -> None:
        params = self._parallel.placement.params.values()
        shapes = {name: tuple(buffer.shape) for name, buffer in self._persistent_buffers()}
        shapes |= {name: param.shape for param in params for name in param.names}
        wrong = [f"{name} is missing" for name in shapes if name not in state]
        wrong += [f"{name} is not in the model" for name in state if name not in shapes]
        both = [name for name in shapes if name in state and tuple(state[name].shape) != shapes[name]]
        wrong += [f"{name} has shape {tuple(state[name].shape)}, not {shapes[name]}" for name in both]
        if not wrong:
            tied = [(param.name, other) for param in params for other in param.names[1:]]
            wrong = [f"{a} and {b} differ but are one" for a, b in tied if not torch.equal(state[a], state[b])]
        if wrong:
            raise ValueError(
                f"the state is not this model's ({'; '.join(wrong)}); give what full_state_dict() gave, "
                "or the state_dict() of the model before wrap"
            )

    def _persistent_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the persistent buffers, which a `state_dict` contains."""
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                if name not in module._non_persistent_buffers_set:
                    yield f"{prefix}.{name}" if prefix else name, buffer

    @property
    def _is_sharded(self) -> bool:
        groups = self._parallel.placement.param_groups
        params = self._parallel.placement.params.values()
        return any(g.num_shards > 1 for g in groups) or any(param.local_shape != param.shape for param in params)

    def _before_state_dict(self, _module: nn.Module, _prefix: str, _keep_vars: bool) -> None:
        """Refuse `state_dict` of sharded parameters: a file of shards would look like the model."""
        if self._is_sharded:
            raise ValueError(
                f"this rank holds shards of the parameters ({self.layout}); "
                "call model.full_state_dict() on every rank, which returns full tensors"
            )
        for group in self._parallel.sharded_model.param_groups:
            # With separate master weights, the module's weights are cast from them on their next use: now.
            group.after_update()
            group.unshard()

    def _before_load(self, _module: nn.Module, _state: Any, _prefix: str, metadata: Any, *_rest: Any) -> None:
        """Refuse to load into parameters that are sharded, or that have separate master weights."""
        groups = self._parallel.sharded_model.param_groups
        replaced = bool(metadata.get("assign_to_params_buffers"))
        if replaced or self._is_sharded or not all(group.master.in_place for group in groups):
            why = "assign=True" if replaced else f"{self.layout}, {groups[0].unsharded_param.dtype}"
            raise ValueError(
                f"the parameters are sharded, or have separate master weights ({why}); "
                "call model.load_full_state_dict(state) on every rank, with full tensors"
            )

    def _local_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        sharded_model = self._parallel.sharded_model
        for group, piece in sharded_model.pieces():
            if group.master.in_place and group.policy.num_shards == 1:
                yield piece.param.name, group.parameters[piece.param.name]
            elif piece.start < piece.stop:
                values = sharded_model.piece_view(group.master.values(), piece)
                yield piece.param.name, nn.Parameter(values, requires_grad=piece.param.trainable)

    def _before_forward(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        sharded_model = self._parallel.sharded_model
        if self._starts_step:
            # An optimizer or the user may have changed the parameters without notice.
            sharded_model.after_update()
        if self.training:
            self._number_samples(args, kwargs)
        # A forward pass that no backward follows belongs to no step, and a gate must not balance by it.
        for layer in self._expert_loads.local_layers.values():
            layer.counts_load = torch.is_grad_enabled()
        if torch.is_grad_enabled():
            if self._starts_step and any(p.grad is not None for p in self._shards.values()):
                raise ValueError(
                    "the last step's gradients are still there; call optimizer.zero_grad() before the next step, "
                    "and put all but the last microbatch of a step inside model.no_sync()"
                )
            if self._starts_step:
                sharded_model.free_grads()
            sharded_model.begin_microbatch(first=self._starts_step, last=self._is_last_microbatch)
            self._ends_step = self._is_last_microbatch

    def _number_samples(self, args: Any, kwargs: Any) -> None:
        """Number the samples over calls and ranks, so that no two have the same dropout mask."""
        rows = next((len(tensor) for tensor in iter_tensors([args, kwargs]) if tensor.dim()), 0)
        axis, options = self._parallel.axes["dp"], self._parallel.options
        start = self._samples + axis.index * rows
        self._parallel.rng_stream.samples = torch.arange(start, start + rows, device=options.device)
        self._samples += axis.size * rows

    def _during_backward(self) -> None:
        if self._ends_step is None:
            raise ValueError(
                "a second backward pass follows the last one of this step, and its gradients would not be reduced; "
                "add the losses and call backward once, or put all but the last pass inside model.no_sync()"
            )
        if not self._callback_queued:
            self._callback_queued = True
            compat.on_backward_end(self._after_backward)

    def _after_backward(self) -> None:
        assert self._ends_step is not None
        last, self._ends_step, self._callback_queued = self._ends_step, None, False
        sharded_model = self._parallel.sharded_model
        sharded_model.end_microbatch()
        self._starts_step = last
        if not last:
            return
        self._partial_gradients.all_reduce()
        self._expert_loads.end_step(torch.ones((), dtype=torch.int64, device=self._parallel.options.device))
        for group, piece in sharded_model.pieces():
            if piece.param.trainable and piece.param.name in self._shards:
                parameter = self._shards[piece.param.name]
                parameter.grad = sharded_model.piece_view(group.grad, piece).view(parameter.shape)


class _GlobalMean(Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor, axis: MeshAxis) -> Tensor:
        sums = axis.all_reduce(torch.stack([total.detach().double(), count.detach().double()]))
        ctx.factor = float(axis.size / sums[1].clamp(min=1.0))
        return (sums[0] / sums[1].clamp(min=1.0)).to(total.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # Times dp, because the average over dp divides by it.
        return gradients[0] * ctx.factor, None, None


def wrap(
    model: nn.Module, layout: Layout | str = "", *, inputs: Mapping[str, Tensor] | None = None, **options: Any
) -> WrappedModel:
    """Apply a layout to a model in place, over the default process group; its device and dtype stay.

    Every rank starts from the values of rank 0, as in DDP. With tp, a module without a table `split` is traced with
    `inputs`, keyword arguments of its forward. Options: `reshard_after_forward`, `prefetch`, `units`, `seed`.

    >>> model = ec.wrap(torch.nn.Linear(4, 2), "dp=1")
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()
    """
    if isinstance(layout, str):
        layout = check_layout(layout, world=world_size())
    elif issues := rules.find_issues(layout, world=world_size()):
        raise ValidationError(issues)
    _refuse_without_engine(layout, kernels=options.get("kernels", "auto"))
    first = next(model.parameters(), None)
    if first is None:
        raise ValueError(f"the model has no parameters ({type(model).__name__})")
    master = torch.promote_types(first.dtype, torch.float32)
    device = torch.device("cpu") if first.is_meta else first.device
    chosen = ParallelOptions(device=device, compute_dtype=first.dtype, master_dtype=master, user_loop=True, **options)
    if not first.is_meta:
        _broadcast_from_first_rank(model)
    return WrappedModel(model, layout, chosen, inputs)


def _refuse_without_engine(layout: Layout, *, kernels: str) -> None:
    """Raise ValueError for what only the engine's loop can do."""
    use_engine = "use ec.Engine(model, layout, optimizer).step(batch)"
    sharding = f"cp={layout.cp}" if layout.cp > 1 else f"tp_kind={layout.tp_kind}" if layout.tp_kind != "1d" else ""
    refusals = [
        (layout.pp > 1, f"a pipeline needs the engine's loop (pp={layout.pp}); {use_engine}"),
        (sharding, f"this layout shards every batch ({sharding}), which requires the engine; {use_engine}"),
        (layout.offload != "none", f"offload requires the engine's optimizer (offload={layout.offload}); {use_engine}"),
        (
            layout.accumulate > 1 or layout.microbatch > 1,
            "your loop makes the microbatches; leave microbatch and accumulate out of the layout, "
            "and use model.no_sync()",
        ),
        (
            kernels != "auto",
            "kernels=plain requires the engine, since your loop calls backward; put "
            "`with echelon.kernels.dispatch.plain_torch():` around forward and backward, or use echelon.Engine",
        ),
    ]
    for is_refused, message in refusals:
        if is_refused:
            raise ValueError(message)


@torch.no_grad()
def _broadcast_from_first_rank(model: nn.Module) -> None:
    if world_size() == 1:
        return
    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    world_axis = MeshAxis("world", range(world_size()), rank, group, frozenset())
    for tensor in [*model.parameters(), *model.buffers()]:
        world_axis.broadcast(tensor.data)
