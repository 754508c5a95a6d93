"""The cross entropy of a custom model's head needs no logits, and is what it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_engines import SGD
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.kernels.layers.cross_entropy import linear_cross_entropy
from echelon.models import deferred_logits
from echelon.models.deferred_logits import DeferredLogits, find_head
from echelon.parallel import user_head
from echelon.parallel.parallel_options import ParallelOptions
from echelon.training.engine import Engine
from echelon.training.wrap import wrap

WORDS = 96


class UserModel(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Any], bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, WORDS, bias=bias)
        self.loss = loss
        if not bias:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.loss(self.head(x), targets)


def counted(total: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return total, torch.tensor(targets.numel())


def flattened(logits: Tensor, targets: Tensor) -> Any:
    return counted(F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum"), targets)


def viewed(logits: Tensor, targets: Tensor) -> Any:
    rows, length, words = logits.shape
    mean = F.cross_entropy(logits.view(rows * length, words), targets.view(-1), ignore_index=5)
    return counted(mean * targets.numel(), targets)


def shifted(logits: Tensor, targets: Tensor) -> Any:
    logits, targets = logits[..., :-1, :].contiguous(), targets[:, 1:].contiguous()
    loss = nn.CrossEntropyLoss(reduction="sum")
    return counted(loss(logits.view(-1, logits.size(-1)), targets.view(-1)), targets)


def capped(logits: Tensor, targets: Tensor) -> Any:
    logits = 30 * torch.tanh(logits / 30)
    return counted(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets)


def transposed(logits: Tensor, targets: Tensor) -> Any:
    return counted(F.cross_entropy(logits.transpose(1, 2), targets, reduction="sum"), targets)


def smoothed(logits: Tensor, targets: Tensor) -> Any:
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", label_smoothing=0.1)
    return counted(loss, targets)


BATCH = {
    "tokens": torch.randint(0, WORDS, (4, 6), generator=torch.Generator().manual_seed(1)),
    "targets": torch.randint(0, WORDS, (4, 6), generator=torch.Generator().manual_seed(2)),
}
BATCH["targets"][:, 2] = 5  # which a loss ignores


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Defer logits without a GPU and without compiled layers; the shapes of what the fused loss was given."""
    given: list[torch.Size] = []

    def spy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        given.append(hidden.shape)
        return linear_cross_entropy(hidden, weight, targets)

    monkeypatch.setattr(user_head, "is_asked_for", lambda _options: True)
    monkeypatch.setattr(deferred_logits, "has_kernel", lambda *_args: True)
    monkeypatch.setattr(deferred_logits, "MIN_WORDS", 64)
    monkeypatch.setattr(deferred_logits, "linear_cross_entropy", spy)
    return given


def train(loss: Callable[[Tensor, Tensor], Any]) -> dict[Any, Tensor]:
    options = ParallelOptions(compute_dtype=torch.float64, master_dtype=torch.float64)
    engine = Engine(UserModel(loss).double(), "dp=1,microbatch=2,accumulate=2", SGD, options=options)
    losses = [torch.tensor(engine.step(BATCH).loss) for _ in range(2)]
    return {**dict(enumerate(losses)), **{name: p.detach().clone() for name, p in engine.model.named_parameters()}}


@pytest.mark.parametrize(("loss", "calls"), [(viewed, 4), (shifted, 4), (capped, 0), (transposed, 0), (smoothed, 0)])
def test_the_loss_of_a_custom_model_is_what_it_was(
    loss: Callable[[Tensor, Tensor], Any], calls: int, fused: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = train(loss)
    assert len(fused) == calls
    monkeypatch.setattr(deferred_logits, "has_kernel", lambda *_args: False)
    for name, values in train(loss).items():
        torch.testing.assert_close(found[name], values, rtol=1e-10, atol=1e-12)
    assert len(fused) == calls


def test_a_user_loop_gets_logits(fused: list[torch.Size]) -> None:
    """What the forward returns is computed, under autocast in its dtype."""
    model = wrap(UserModel(lambda logits, targets: (logits, *flattened(logits, targets))), "dp=1")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, total, _ = model(**BATCH)
    assert type(logits) is Tensor
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(total, flattened(logits, BATCH["targets"])[0], rtol=1e-2, atol=0.1)
    total.backward()
    assert fused == [torch.Size([24, 8])]


def test_what_deferred_logits_tell_without_being_computed() -> None:
    hidden, weight = torch.randn(2, 3, 8), torch.randn(WORDS, 8)
    logits = DeferredLogits.of(hidden, weight, torch.float32)
    whole = F.linear(hidden, weight)
    assert logits.shape == whole.shape
    assert (logits.dtype, logits.device, logits.ndim, logits.size(-1)) == (whole.dtype, whole.device, 3, WORDS)
    assert isinstance(logits.view(-1, WORDS)[2:], DeferredLogits)
    for read in (lambda x: x + 1, lambda x: x[0], lambda x: x[..., 3:], lambda x: x.view(-1), lambda x: x.argmax(-1)):
        assert torch.equal(read(logits), read(whole))
    assert repr(logits) == f"DeferredLogits(2, 3, {WORDS})"


def test_which_linear_is_a_head(fused: list[torch.Size]) -> None:
    assert isinstance(find_head(UserModel(flattened)), nn.Linear)
    assert find_head(UserModel(flattened, bias=True)) is None
    two = UserModel(flattened)
    two.other = nn.Linear(8, WORDS, bias=False)
    assert find_head(two) is None
