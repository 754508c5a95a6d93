"""A custom model on two ranks: python examples/custom_model.py

The model returns (sum of losses, number of targets); Echelon reduces both over all ranks and divides once. To prove it:
`echelon verify --model examples/custom_model.py:build --layouts "dp=2; dp=3,zero=3"`.
"""

import torch
from torch import nn

import echelon as ec


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def forward(self, x, y):
        return (self.net(x).squeeze(-1) - y).square().sum(), torch.tensor(len(y))


def build():
    return Regression()


def batch(rows, step):
    """Return the global batch of a step; each rank takes its share."""
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(step))
    return {"x": x, "y": x.sum(-1).tanh()}


if __name__ == "__main__":
    run = ec.train(build, layout="dp=2,zero=1", batch=32, steps=60, optimizer_lr=1e-2)
    print([round(record["loss"], 3) for record in run.records("step")][::10])
