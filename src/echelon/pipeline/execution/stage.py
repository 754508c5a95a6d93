"""Which links of a model's chain each stage runs, and which modules each rank of pp holds for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from echelon.models.pipeline_model import PipelineLayer, PipelineModel, get_pipeline_model
from echelon.parallel.apply import StageModules
from echelon.pipeline.partition import StageSplit


@dataclass(frozen=True, kw_only=True)
class PipelineStages:
    """A chain, cut."""

    pipeline_model: PipelineModel
    split: StageSplit

    def layers(self, stage: int) -> tuple[PipelineLayer, ...]:
        names = self.split.layers[stage]
        return tuple(link for link in self.pipeline_model.layers if link.name in names)

    def stage_modules(self, rank: int) -> StageModules:
        ranks = range(max(self.split.rank_of_stage) + 1)
        return StageModules(
            by_pp_rank=tuple(
                frozenset(n for stage in self.split.stages_on(other) for n in self._module_names(stage))
                for other in ranks
            ),
            by_stage=tuple(self._module_names(stage) for stage in self.split.stages_on(rank)),
        )

    def _module_names(self, stage: int) -> tuple[str, ...]:
        return tuple(name for link in self.layers(stage) for name in link.modules)


def cut_into_stages(
    model: nn.Module,
    rank_of_stage: Sequence[int],
    block_counts: Sequence[int] = (),
    layer_costs: Mapping[str, float] | None = None,
) -> PipelineStages:
    """The stages of a model on the ranks of a schedule, balanced, or with these numbers of layers.

    Without the costs of its links, by name, from a profile they are counted.
    """
    chain = get_pipeline_model(model)
    names = [link.name for link in chain.layers]
    if layer_costs and list(layer_costs) != names:
        raise ValueError(
            f"the profile is of another model (links {_list_names(layer_costs)}; this one has {_list_names(names)}); "
            "measure it again (pipeline.profile=measure)"
        )
    costs = list((layer_costs or {}).values()) or [_parameter_cost(model, link) for link in chain.layers]
    split = (
        StageSplit.from_block_counts(names, costs, rank_of_stage, block_counts)
        if block_counts
        else StageSplit.balanced(names, costs, rank_of_stage)
    )
    return PipelineStages(pipeline_model=chain, split=split)


def _list_names(names: Iterable[str]) -> str:
    found = list(names)
    return f"{', '.join(found[:3])}{' ...' if len(found) > 3 else ''}, {len(found)} in all"


def _parameter_cost(model: nn.Module, layer: PipelineLayer) -> float:
    """Work goes with the parameters of products; looking up an embedding is next to nothing."""
    modules = dict(model.named_modules(remove_duplicate=False))
    used = [modules[name] for name in layer.modules if name in modules]
    alone = [model.get_parameter(name) for name in layer.modules if name not in modules]
    parts = [part for module in used for part in module.modules() if not isinstance(part, nn.Embedding)]
    inside = [p for part in parts for p in part.parameters(recurse=False)]
    return float(sum(p.numel() for p in [*inside, *alone]))
