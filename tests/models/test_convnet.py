"""The convolutional network: the loss contract, first values, and batch statistics."""

import pytest
import torch

from echelon.models import build, find_model


def test_loss_and_count() -> None:
    model = build(find_model("conv-tiny"), dtype=torch.float64)
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([1, 9, -100, 0])
    total, count = model(images, labels)
    total.backward()
    assert (total.dtype, int(count)) == (torch.float64, 3)
    assert model.logits(images).shape == (4, 10)
    assert abs(float(total.detach() / 3) - 2.3) < 0.3
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("seed", [0, 1])
def test_first_values(seed: int) -> None:
    model = build(find_model("conv-tiny"), seed=seed)
    for key, p in model.named_parameters():
        assert torch.equal(p.flatten(), model.initial(key).values(seed, key, torch.arange(p.numel()), p.dtype))
    norm = model.blocks[2].norm
    assert not norm.running_mean.any()
    assert (norm.running_var == 1).all()
    assert int(norm.num_batches_tracked) == 0
    assert abs(float(model.blocks[2].conv.weight.detach().std()) - (2 / (9 * 16)) ** 0.5) < 0.01


def test_it_learns_a_batch() -> None:
    model = build(find_model("conv-tiny"))
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(16, 3, 16, 16, generator=generator), torch.randint(10, (16,), generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for _ in range(30):
        total, count = model(images, labels)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append(float(total.detach() / count))
    assert losses[-1] < 0.5 * losses[0]
