"""Chains of users' own that do what ours do not: every class is a model, built by its name."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import echelon as ec

WIDTH = 8


class Plain(nn.Module):
    """A tensor from link to link."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.make(i) for i in range(4))
        self.last = nn.Linear(WIDTH, 1)

    def make(self, _index):
        return nn.Linear(WIDTH, WIDTH)

    def start(self, _carried, _shared, *, x, y):
        return self.first(x)

    def block(self, index, h, _shared, *, x, y):
        return h + torch.tanh(self.blocks[index](h))

    def end(self, h, _shared, *, x, y):
        return (self.last(h).squeeze(-1) - y).square().sum(), torch.tensor(y.numel())

    def pipeline_model(self):
        blocks = (
            ec.PipelineLayer(f"blocks.{i}", (f"blocks.{i}",), partial(self.block, i)) for i in range(len(self.blocks))
        )
        return ec.PipelineModel(
            layers=(
                ec.PipelineLayer("first", ("first",), self.start),
                *blocks,
                ec.PipelineLayer("last", ("last",), self.end),
            )
        )

    def forward(self, **inputs):
        carried = None
        for link in self.pipeline_model().layers:
            carried = link.run(carried, None, **inputs)
        return carried


def batch(rows, seed):
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    return {"x": x, "y": x.sum(-1)}


def step(model, layout):
    ec.Engine(globals()[model](), layout).step(batch(4, 0))


class HalfFrozen(Plain):
    """The first stage learns nothing, and of the second a parameter is never used."""

    def __init__(self):
        super().__init__()
        for module in (self.first, self.blocks[0], self.blocks[1]):
            module.requires_grad_(False)
        self.blocks[3].unused = nn.Parameter(torch.ones(2))


class TupleOfOne(Plain):
    """h[0] is the tensor of a tuple, and the first row of a tensor."""

    def start(self, _carried, _shared, *, x, y):
        return (self.first(x),)

    def block(self, index, h, _shared, *, x, y):
        return (h[0] + torch.tanh(self.blocks[index](h[0])),)

    def end(self, h, _shared, *, x, y):
        return super().end(h[0], None, x=x, y=y)


class ListOfTwo(Plain):
    """With bytes among what travels."""

    def start(self, _carried, _shared, *, x, y):
        return [self.first(x), (x > 0).to(torch.uint8)]

    def block(self, index, h, _shared, *, x, y):
        h[0] = h[0] + torch.tanh(self.blocks[index](h[0])) * h[1]
        return h

    def end(self, h, _shared, *, x, y):
        return super().end(h[0], None, x=x, y=y)


class Checkpointed(Plain):
    """Recomputes by itself."""

    def make(self, index):
        layer = nn.Linear(WIDTH, WIDTH, bias=index != 1)
        return nn.Sequential(layer, nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))

    def block(self, index, h, _shared, *, x, y):
        return h + checkpoint(self.blocks[index], h, use_reentrant=False)


class CheckpointedWhole(Checkpointed):
    """A checkpoint of the older kind."""

    def block(self, index, h, _shared, *, x, y):
        return h + checkpoint(self.blocks[index], h, use_reentrant=True)


class InPlace(Plain):
    """Changes what it is given."""

    def make(self, _index):
        return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))

    def block(self, index, h, _shared, *, x, y):
        return self.blocks[index](h)


class Bare(Plain):
    """Stages in the middle have no parameter."""

    def make(self, index):
        return nn.Tanh() if index in (1, 2) else nn.Linear(WIDTH, WIDTH)


class Computed(Plain):
    """Weights are made of other parameters."""

    def make(self, _index):
        return nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


class OneRow(Plain):
    """A product of a vector."""

    def make(self, _index):
        layer = nn.Linear(WIDTH, WIDTH)
        layer.scale = nn.Parameter(torch.ones(WIDTH))
        return layer

    def block(self, index, h, _shared, *, x, y):
        layer = self.blocks[index]
        return h + torch.tanh(layer(h)) * F.linear(layer.scale, layer.weight, layer.bias)


class Outside(Plain):
    """Uses a layer's parameters without calling the layer."""

    def block(self, index, h, _shared, *, x, y):
        return h + F.linear(h, self.blocks[index].weight)


class Mapped(Plain):
    """Hands on a dict."""

    def block(self, index, h, _shared, *, x, y):
        return {"h": h} if index == 1 else h


class Nothing(Plain):
    """Hands on a tensor and none."""

    def block(self, index, h, _shared, *, x, y):
        return (h, None) if index == 1 else h


class Short(Plain):
    """Hands on a type that no message carries."""

    def block(self, index, h, _shared, *, x, y):
        return (h, torch.ones(2, dtype=torch.int16)) if index == 1 else super().block(index, h, None, x=x, y=y)
