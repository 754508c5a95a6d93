"""Assign the layers of a model to pipeline stages, and their modules to pp ranks, before the model is laid out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from torch import nn

from echelon.layout import Layout, Mesh
from echelon.layout.layout import ASYNC_SCHEDULES
from echelon.models.pipeline_model import PipelineLayer, PipelineModel, get_pipeline_model
from echelon.parallel.comm.mesh_axis import world_rank
from echelon.parallel.parallel_options import ParallelOptions
from echelon.parallel.stage_modules import StageModules
from echelon.pipeline.actions import ActionKind
from echelon.pipeline.lower import lower
from echelon.pipeline.partition import StageSplit
from echelon.pipeline.schedule import Schedule
from echelon.pipeline.schedules import schedule_for_layout


@dataclass(frozen=True, kw_only=True)
class PipelineStages:
    """A model's layers, split into stages."""

    pipeline_model: PipelineModel
    split: StageSplit

    def layers(self, stage: int) -> tuple[PipelineLayer, ...]:
        names = self.split.layers[stage]
        return tuple(layer for layer in self.pipeline_model.layers if layer.name in names)

    def stage_modules(self, rank: int) -> StageModules:
        """The modules that every pp rank holds, and those of this rank's stages."""
        split, ranks = self.split, range(max(self.split.rank_of_stage) + 1)
        of_rank = [[self._module_names(stage) for stage in split.stages_on(pp_rank)] for pp_rank in ranks]
        return StageModules(
            by_pp_rank=tuple(frozenset(chain.from_iterable(names)) for names in of_rank), by_stage=tuple(of_rank[rank])
        )

    def _module_names(self, stage: int) -> tuple[str, ...]:
        return tuple(name for layer in self.layers(stage) for name in layer.modules)


@dataclass(frozen=True, kw_only=True)
class StageAssignment:
    """What `apply` and `Pipeline` need to know of a layout's pipeline."""

    schedule: Schedule
    """with its sends and receives"""
    stages: PipelineStages
    modules: StageModules


def assign_stages(model: nn.Module, layout: Layout, options: ParallelOptions) -> StageAssignment:
    """Choose the schedule of a layout and the layers of its stages."""
    schedule = lower(schedule_for_layout(layout))
    stages = cut_into_stages(model, schedule.rank_of_stage, options.stage_layers, options.layer_costs)
    rank = Mesh(layout, options.rank_order).coordinates(world_rank())["pp"]
    modules = replace(stages.stage_modules(rank), in_flight=peak_in_flight(schedule, rank, layout))
    return StageAssignment(schedule=schedule, stages=stages, modules=modules)


def cut_into_stages(
    model: nn.Module,
    rank_of_stage: Sequence[int],
    block_counts: Sequence[int] = (),
    layer_costs: Mapping[str, float] | None = None,
) -> PipelineStages:
    """Split a model into the stages of a schedule: balanced by cost, or with these numbers of blocks.

    `layer_costs` come from a profile, by layer name. Without them the cost of a layer is its number of parameters.
    """
    pipeline_model = get_pipeline_model(model)
    names = [layer.name for layer in pipeline_model.layers]
    if layer_costs and list(layer_costs) != names:
        raise ValueError(
            f"the profile is of another model (layers {_list_names(layer_costs)}; this one has {_list_names(names)}); "
            "measure it again (pipeline.profile=measure)"
        )
    costs = list((layer_costs or {}).values()) or [_parameter_cost(model, layer) for layer in pipeline_model.layers]
    if block_counts:
        split = StageSplit.from_block_counts(names, costs, rank_of_stage, block_counts)
    else:
        split = StageSplit.balanced(names, costs, rank_of_stage)
    return PipelineStages(pipeline_model=pipeline_model, split=split)


def peak_in_flight(schedule: Schedule, rank: int, layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Microbatches in flight on each stage of a rank, at every moment that may be the peak of its memory.

    A moment at which no stage has more than at another moment is left out. An asynchronous pipeline is always full:
    a stage then has as many microbatches in flight as there are stages from it to the last.
    """
    stages = schedule.stages_on(rank)
    if layout.schedule in ASYNC_SCHEDULES:
        return (tuple(schedule.stages - stage for stage in stages),)
    slices_in_flight, moments = Counter[int](), set()
    for action in schedule.rank_actions[rank]:
        if action.kind is ActionKind.FORWARD:
            slices_in_flight[action.stage] += 1
            moments.add(tuple(-(-slices_in_flight[stage] // schedule.slices) for stage in stages))
        elif action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD):
            slices_in_flight[action.stage] -= 1

    def is_exceeded(moment: tuple[int, ...], other: tuple[int, ...]) -> bool:
        return other != moment and all(a <= b for a, b in zip(moment, other, strict=True))

    return tuple(sorted(m for m in moments if not any(is_exceeded(m, other) for other in moments)))


def _list_names(names: Iterable[str]) -> str:
    listed = list(names)
    return f"{', '.join(listed[:3])}{' ...' if len(listed) > 3 else ''}, {len(listed)} in all"


def _parameter_cost(model: nn.Module, layer: PipelineLayer) -> float:
    """The number of parameters of a layer's matmuls: an embedding lookup costs next to nothing."""
    modules = dict(model.named_modules(remove_duplicate=False))
    used = [modules[name] for name in layer.modules if name in modules]
    bare = [model.get_parameter(name) for name in layer.modules if name not in modules]
    submodules = [sub for module in used for sub in module.modules() if not isinstance(sub, nn.Embedding)]
    inside = [p for sub in submodules for p in sub.parameters(recurse=False)]
    return float(sum(p.numel() for p in [*inside, *bare]))
