"""`TransformContext`: the model under construction, which every transform of `apply` reads and extends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor, nn

from echelon import rng
from echelon.layout import Layout, Mesh
from echelon.layout.placement import LogicalParam, Piece, Placement
from echelon.memory.checkpointing.checkpoint_policy import CheckpointedLayers
from echelon.parallel.comm.axis_names import mesh_axis_names, token_axes
from echelon.parallel.comm.mesh_axis import MeshAxes, MeshAxis, world_rank
from echelon.parallel.dp.zero import ShardingPolicy, sharding_policy
from echelon.parallel.init_weights import initial_values
from echelon.parallel.parallel_options import ParallelOptions

if TYPE_CHECKING:
    from echelon.faults.flight_recorder import FlightRecorder
    from echelon.parallel.cp.context_parallel import ContextParallel
    from echelon.parallel.dp.offload_policy import StateOffload
    from echelon.parallel.dp.sharded_model import ShardedModel
    from echelon.parallel.stage_modules import StageModules
    from echelon.parallel.tp.tp_collectives import RegionBoundary


@dataclass(kw_only=True)
class TransformContext:
    """A model, its layout, its mesh axes, and what the transforms so far have made of its parameters."""

    model: nn.Module
    layout: Layout
    options: ParallelOptions
    stage_modules: StageModules | None
    """the modules of each pp rank; None without a pipeline"""
    recorder: InitVar[FlightRecorder | None]
    axes: MeshAxes = field(init=False)
    policy: ShardingPolicy = field(init=False)
    rng_stream: rng.RandomStream = field(init=False)
    params: list[LogicalParam] = field(init=False)
    """how each logical parameter is split; transforms replace it"""
    initial_values: Callable[[Piece], Tensor] = field(init=False)
    tp_boundary: RegionBoundary | None = None
    cp_context: ContextParallel | None = None
    has_expert_params: bool = False
    """some stage has experts that ep, etp or edp ranks divide"""
    checkpointing: CheckpointedLayers = field(default_factory=CheckpointedLayers)
    placement: Placement = field(init=False)
    offload: StateOffload = field(init=False)
    sharded_model: ShardedModel = field(init=False)

    def __post_init__(self, recorder: FlightRecorder | None) -> None:
        """Create the mesh axes and read the model's parameters, before any transform changes the model."""
        layout, options = self.layout, self.options
        self.initial_values = initial_values(self.model, options)
        self.params = logical_params(self.model)
        self.rng_stream = rng.RandomStream(options.seed)
        rng.attach_stream(self.model, self.rng_stream)
        self.policy = sharding_policy(
            layout,
            reshard_after_forward=options.reshard_after_forward,
            prefetch=options.prefetch,
            user_loop=options.user_loop,
        )
        self.axes = MeshAxes(
            Mesh(layout, options.rank_order),
            world_rank(),
            mesh_axis_names(self.policy, "*".join(token_axes(layout))),
            drop_collective=options.drop_collective,
            recorder=recorder,
        )

    @property
    def token_axis(self) -> MeshAxis:
        """The axis of ranks with different tokens."""
        return self.axes["*".join(token_axes(self.layout))]

    def add_partial_grad_axes(self) -> None:
        """Create the axes over which partial gradients are summed, in one order on all ranks."""
        for name in sorted({axis for param in self.params for axis in param.partial_grad_axes}):
            self.axes.add(name)


def logical_params(model: nn.Module) -> list[LogicalParam]:
    """Return every logical parameter once, under the first of its names."""
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    filters = {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    return [
        LogicalParam(
            name=names[key][0],
            names=tuple(names[key]),
            shape=tuple(parameter.shape),
            decay=parameter.dim() >= 2,
            trainable=parameter.requires_grad,
            is_conv=key in filters,
        )
        for key, parameter in parameters.items()
    ]
