"""A module that knows nothing of layouts, under tensor and pipeline parallelism: python examples/any_module.py

It has no table of splits and no list of stages. Its forward is traced once, an integer program shards every operator,
and pipeline stages are cut between its layers. `echelon split examples/any_module.py:build --tp 2` shows the sharding,
and `ec.verify` proves that it computes what one device computes.
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import echelon as ec

WIDTH, LENGTH = 64, 8


class MixerBlock(nn.Module):
    """Mixes positions, then channels (MLP-Mixer)."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.positions = nn.Sequential(nn.Linear(LENGTH, 4 * LENGTH), nn.GELU(), nn.Linear(4 * LENGTH, LENGTH))
        self.gate_up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.positions(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.blocks = nn.ModuleList(MixerBlock() for _ in range(4))
        self.drop, self.tags = nn.Dropout(0.1), nn.Linear(WIDTH, 20)

    def forward(self, words, tags):
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        logits = self.tags(self.drop(x)).flatten(0, 1)
        return F.cross_entropy(logits, tags.flatten(), reduction="sum"), torch.tensor(tags.numel())


def build():
    return Mixer()


def batch(rows, step):
    words = torch.randint(0, 100, (rows, LENGTH), generator=torch.Generator().manual_seed(step))
    return {"words": words, "tags": (words + words.roll(1, dims=1)) % 20}


if __name__ == "__main__":
    report = ec.verify(build, "tp=2; pp=2,accumulate=2")
    for verdict in report.verdicts:
        print("PASS" if verdict.passed else "FAIL", verdict.layout, f"{verdict.max_error:.1e}")
    if not report.passed:
        sys.exit(1)
    run = ec.train(build, layout="tp=2", batch=16, steps=30, optimizer_lr=1e-2, quiet=True)
    losses = [record["loss"] for record in run.records("step")]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
