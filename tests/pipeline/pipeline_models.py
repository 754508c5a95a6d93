"""A model of a user's own that a pipeline can cut: two tensors and numbers travel, a weight is used by two stages."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import echelon as ec

WIDTH = 8


class Residual(nn.Module):
    """Two streams: x is changed by every layer, y only sees x pass by. `ids` are whole numbers, with no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.layers[1].weight.requires_grad_(False)
        self.layers[4].weight = self.layers[0].weight
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.out = nn.Linear(WIDTH, 11, bias=False)

    def forward(self, words, tags):
        carried = None
        for link in self.pipeline_model().layers:
            carried = link.run(carried, None, words=words, tags=tags)
        return carried

    def pipeline_model(self):
        layers = (ec.PipelineLayer(f"layers.{i}", (f"layers.{i}",), self._layer(i)) for i in range(len(self.layers)))
        first = ec.PipelineLayer("embed", ("embed", "scale"), self._first)
        return ec.PipelineModel(layers=(first, *layers, ec.PipelineLayer("out", ("out",), self._last)))

    def _first(self, _carried, _shared, words, **_):
        x = self.embed(words) * self.scale
        return x, torch.zeros_like(x), words

    def _layer(self, index):
        def run(carried, _shared, **_):
            x, y, ids = carried
            return x + torch.tanh(self.layers[index](x)), y + x * x, ids

        return run

    def _last(self, carried, _shared, tags, **_):
        x, y, ids = carried
        total = F.cross_entropy((self.out(x + y)).flatten(0, 1), (tags + ids - ids).flatten(), reduction="sum")
        return total, torch.tensor(tags.numel())


def build():
    return Residual()


def batch(rows, seed):
    words = torch.randint(0, 11, (rows, 5), generator=torch.Generator().manual_seed(seed))
    return {"words": words, "tags": (words * 3 + 1) % 11}


class Raises(Residual):
    """Its third layer fails."""

    def _layer(self, index):
        if index == 3:
            return self._raise
        return super()._layer(index)

    def _raise(self, carried, _shared, **_):
        raise ArithmeticError("the third layer cannot go on")


def raises():
    torch.manual_seed(0)
    engine = ec.Engine(Raises(), "pp=2,accumulate=3")
    engine.step(batch(3, 0))


class Unfit(Residual):
    def pipeline_model(self):
        chain = super().pipeline_model()
        links = (ec.PipelineLayer("embed", ("embed", "nothing"), self._first), *chain.layers[1:])
        return ec.PipelineModel(layers=links)


class Named(Residual):
    def pipeline_model(self):
        return ec.PipelineModel(
            layers=tuple(ec.PipelineLayer("same", link.modules, link.run) for link in super().pipeline_model().layers)
        )
