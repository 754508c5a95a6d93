"""A custom training loop, as with DDP or FSDP: torchrun --nproc-per-node 2 examples/custom_loop.py

`ec.wrap(model, "dp=2")` replaces `DistributedDataParallel(model)`, and "dp=2,zero=3" replaces `fully_shard`.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import echelon as ec


def train(layout):
    """Train on ragged data and return the global loss of each step."""
    torch.manual_seed(0)
    model = ec.wrap(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 4)), layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(30):
        x, y = rows_of_this_rank(step)
        total = F.cross_entropy(model(x), y, reduction="sum")
        # Ranks have different numbers of samples, so the mean of their means is not the global mean. This is.
        loss = model.mean(total, torch.tensor(len(y)))
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.full_state_dict()


def rows_of_this_rank(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(24, 8, generator=generator)
    y = x[:, :4].argmax(-1)
    start, stop = ((0, 17), (17, 24))[dist.get_rank()]
    return x[start:stop], y[start:stop]


def main():
    dist.init_process_group("gloo")
    for name, layout in (("like DDP", "dp=2"), ("like FSDP", "dp=2,zero=3")):
        losses, state = train(layout)
        if dist.get_rank() == 0:
            print(f"{name:9}  {layout:11}  loss {losses[0]:.6f} -> {losses[-1]:.6f}, {len(state)} tensors to save")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
