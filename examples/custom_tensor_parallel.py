"""Tensor parallelism for a custom model: python examples/custom_tensor_parallel.py

The table `split` gives each module its role in tensor parallelism; docs/tensor-parallelism.md explains the roles.
Nothing else in the model depends on ranks, and `ec.verify` proves that the split computes what one device computes.
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import echelon as ec


class FeedForward(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Tagger(nn.Module):
    """Predicts one of five tags for each position of a sequence."""

    split = {  # noqa: RUF012
        "blocks.*": "region",  # its input is replicated on both ranks ...
        "blocks.*.up": "column",  # ... each rank computes half of the hidden units ...
        "blocks.*.down": "row",  # ... and an all-reduce adds the two partial outputs
    }

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.blocks = nn.ModuleList(FeedForward(32, 128) for _ in range(2))
        self.tags = nn.Linear(32, 5)

    def forward(self, words, tags):
        x = self.embed(words)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.tags(x).flatten(0, 1), tags.flatten(), reduction="sum"), torch.tensor(tags.numel())


def build():
    return Tagger()


def batch(rows, step):
    words = torch.randint(0, 100, (rows, 12), generator=torch.Generator().manual_seed(step))
    return {"words": words, "tags": words % 5}


if __name__ == "__main__":
    # sp=0: between the blocks every rank holds the full sequence, since the rest of this model is not split.
    report = ec.verify(build, "tp=2,sp=0; dp=2,tp=2,sp=0,zero=3")
    for verdict in report.verdicts:
        print("PASS" if verdict.passed else "FAIL", verdict.layout, f"{verdict.max_error:.1e}")
    if not report.passed:
        sys.exit(1)
    run = ec.train(build, layout="tp=2,sp=0", batch=16, steps=40, optimizer_lr=1e-2, quiet=True)
    losses = [record["loss"] for record in run.records("step")]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
