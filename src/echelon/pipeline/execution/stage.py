"""Which links of a model's chain each stage runs, and which modules each rank of pp holds for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from echelon.models.pipeline_model import Chain, Link, chain_of
from echelon.parallel.apply import Held
from echelon.pipeline.partition import Split


@dataclass(frozen=True, kw_only=True)
class Stages:
    """A chain, cut."""

    chain: Chain
    split: Split

    def links(self, stage: int) -> tuple[Link, ...]:
        names = self.split.links[stage]
        return tuple(link for link in self.chain.links if link.name in names)

    def held(self, rank: int) -> Held:
        ranks = range(max(self.split.homes) + 1)
        return Held(
            ranks=tuple(
                frozenset(n for stage in self.split.of(other) for n in self._modules(stage)) for other in ranks
            ),
            stages=tuple(self._modules(stage) for stage in self.split.of(rank)),
        )

    def _modules(self, stage: int) -> tuple[str, ...]:
        return tuple(name for link in self.links(stage) for name in link.modules)


def cut(
    model: nn.Module, homes: Sequence[int], layers: Sequence[int] = (), profiled: Mapping[str, float] | None = None
) -> Stages:
    """The stages of a model on the ranks of a schedule, balanced, or with these numbers of layers.

    Without the costs of its links, by name, from a profile they are counted.
    """
    chain = chain_of(model)
    names = [link.name for link in chain.links]
    if profiled and list(profiled) != names:
        raise ValueError(
            f"the profile is of another model (links {_named(profiled)}; this one has {_named(names)}); "
            "measure it again (pipeline.profile=measure)"
        )
    costs = list((profiled or {}).values()) or [_cost(model, link) for link in chain.links]
    split = Split.by_hand(names, costs, homes, layers) if layers else Split.balanced(names, costs, homes)
    return Stages(chain=chain, split=split)


def _named(links: Iterable[str]) -> str:
    found = list(links)
    return f"{', '.join(found[:3])}{' ...' if len(found) > 3 else ''}, {len(found)} in all"


def _cost(model: nn.Module, link: Link) -> float:
    """Work goes with the parameters of products; looking up an embedding is next to nothing."""
    modules = dict(model.named_modules(remove_duplicate=False))
    used = [modules[name] for name in link.modules if name in modules]
    alone = [model.get_parameter(name) for name in link.modules if name not in modules]
    parts = [part for module in used for part in module.modules() if not isinstance(part, nn.Embedding)]
    inside = [p for part in parts for p in part.parameters(recurse=False)]
    return float(sum(p.numel() for p in [*inside, *alone]))
