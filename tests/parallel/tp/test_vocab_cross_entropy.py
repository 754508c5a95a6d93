"""Vocab-parallel embedding and cross-entropy equal torch's, and padded ids have no probability."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.kernels.layers.cross_entropy import IGNORE_INDEX
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout, Mesh
from echelon.parallel.comm.mesh_axis import MeshAxes, MeshAxis
from echelon.parallel.tp.parallel_layers import VocabParallelEmbedding, VocabParallelHead
from echelon.parallel.tp.tp_collectives import (
    FullSequenceBoundary,
    RegionBoundary,
    SequenceParallelBoundary,
    local_sequence_slice,
)
from echelon.parallel.tp.vocab_cross_entropy import vocab_parallel_cross_entropy

BATCH, LENGTH, WIDTH = 2, 5, 4
SPLITS = [(2, 257), (2, 256), (3, 257), (4, 257), (4, 5), (3, 3), (4, 3), (1, 7)]


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ids(vocabulary: int, seed: int) -> Tensor:
    found = torch.randint(0, vocabulary, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))
    found[0, :2] = torch.tensor([0, vocabulary - 1])  # the edges
    return found


def targets(vocabulary: int) -> Tensor:
    found = ids(vocabulary, 3)
    found[1, 1:3] = IGNORE_INDEX
    return found


def my_rows(weight: Tensor, rank: int, world: int, padding: float = 0.0) -> Tensor:
    """This rank's rows."""
    size = -(-len(weight) // world)
    padded = F.pad(weight, (0, 0, 0, size * world - len(weight)), value=padding)
    return padded[rank * size : (rank + 1) * size].clone()


def boundary_of(sequence_parallel: bool) -> RegionBoundary:
    axis = MeshAxes(Mesh(Layout.parse(f"tp={dist.get_world_size()}")), dist.get_rank(), ["tp"])["tp"]
    return SequenceParallelBoundary(axis) if sequence_parallel else FullSequenceBoundary(axis)


@dataclass(frozen=True)
class Outcome:
    loss: Tensor
    count: Tensor
    of_hidden: Tensor
    of_weight: Tensor
    logits: Tensor


def head(vocabulary: int, sequence_parallel: bool, scale: float = 1.0, padding: float = 0.0) -> Outcome:
    """On a rank: the divided head; the hidden states are whole, or this rank's slice of them."""
    boundary, rank = boundary_of(sequence_parallel), dist.get_rank()
    weight = nn.Parameter(my_rows(numbers(vocabulary, WIDTH, seed=1) * scale, rank, dist.get_world_size(), padding))
    module = VocabParallelHead(weight, boundary, vocabulary)
    hidden = numbers(BATCH, LENGTH, WIDTH, seed=2)
    if isinstance(boundary, SequenceParallelBoundary):
        boundary.length = LENGTH
        hidden = local_sequence_slice(hidden, boundary.axis)
    hidden.requires_grad_()
    loss, count = module(hidden, targets(vocabulary))
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    with torch.no_grad():
        logits = module.logits(hidden)
    return Outcome(loss.detach(), count, hidden.grad, weight.grad, logits)


def whole_head(vocabulary: int, scale: float = 1.0) -> Outcome:
    """The same on one device, with torch's own loss."""
    weight = (numbers(vocabulary, WIDTH, seed=1) * scale).requires_grad_()
    hidden = numbers(BATCH, LENGTH, WIDTH, seed=2).requires_grad_()
    logits, wanted = F.linear(hidden, weight), targets(vocabulary)
    loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    count = (wanted != IGNORE_INDEX).sum()
    return Outcome(loss.detach(), count, hidden.grad, weight.grad, logits.detach())


@pytest.mark.parametrize("scale", [1.0, 1e3], ids=["plain", "large logits"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["sp=0", "sp=1"])
@pytest.mark.parametrize(("world", "vocabulary"), SPLITS)
def test_the_vocab_parallel_loss_and_gradients_equal_one_device(
    pool: RankPool, world: int, vocabulary: int, sequence_parallel: bool, scale: float
) -> None:
    truth = whole_head(vocabulary, scale)
    found = pool.run(head, world, vocabulary, sequence_parallel, scale)
    for outcome in found:
        torch.testing.assert_close(outcome.loss, truth.loss, rtol=1e-12, atol=1e-12)
        assert outcome.count == truth.count
        torch.testing.assert_close(outcome.logits, truth.logits, rtol=1e-12, atol=1e-12)
    of_weight = torch.cat([outcome.of_weight for outcome in found])
    torch.testing.assert_close(of_weight[:vocabulary], truth.of_weight, rtol=1e-10, atol=1e-12)
    assert not of_weight[vocabulary:].any()
    if sequence_parallel:
        of_hidden = torch.cat([outcome.of_hidden for outcome in found], dim=1)
        assert not of_hidden[:, LENGTH:].any()
        torch.testing.assert_close(of_hidden[:, :LENGTH], truth.of_hidden, rtol=1e-10, atol=1e-10)
    else:
        for outcome in found:
            torch.testing.assert_close(outcome.of_hidden, truth.of_hidden, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("world", "vocabulary"), [(4, 257), (4, 5)])
def test_padded_ids_get_no_probability(pool: RankPool, world: int, vocabulary: int) -> None:
    """Whatever their rows hold: here numbers that would win every softmax."""
    truth = whole_head(vocabulary)
    found = pool.run(head, world, vocabulary, False, padding=100.0)
    for outcome in found:
        torch.testing.assert_close(outcome.loss, truth.loss, rtol=1e-12, atol=1e-12)
        assert outcome.logits.shape[-1] == vocabulary
    of_weight = torch.cat([outcome.of_weight for outcome in found])
    assert len(of_weight) > vocabulary
    assert not of_weight[vocabulary:].any()


def all_ignored(vocabulary: int) -> tuple[float, int, bool]:
    weight = nn.Parameter(my_rows(numbers(vocabulary, WIDTH, seed=1), dist.get_rank(), dist.get_world_size()))
    hidden = numbers(BATCH, LENGTH, WIDTH, seed=2).requires_grad_()
    module = VocabParallelHead(weight, boundary_of(False), vocabulary)
    loss, count = module(hidden, torch.full((BATCH, LENGTH), IGNORE_INDEX))
    loss.backward()
    assert weight.grad is not None
    assert hidden.grad is not None
    return loss.item(), int(count), bool(weight.grad.any()) or bool(hidden.grad.any())


def test_without_a_valid_target_loss_and_gradients_are_zero(pool: RankPool) -> None:
    assert pool.run(all_ignored, 2, 7) == [(0.0, 0, False)] * 2


@pytest.mark.parametrize("target", [-1, 7, 8])
def test_a_target_outside_the_vocabulary_is_an_error(target: int) -> None:
    """As on one device, although the logits have a padded column after seven ids."""
    logits, axis = numbers(1, 1, 8, seed=1), MeshAxis("tp", (0,), 0, None)
    assert vocab_parallel_cross_entropy(logits, torch.tensor([[6]]), axis, vocab_size=7) > 0
    with pytest.raises(RuntimeError, match="out of bounds"):
        vocab_parallel_cross_entropy(logits, torch.tensor([[target]]), axis, vocab_size=7)


def embedding(vocabulary: int, sequence_parallel: bool) -> tuple[Tensor, Tensor]:
    """On a rank: (output, gradient of this rank's rows)."""
    boundary, rank = boundary_of(sequence_parallel), dist.get_rank()
    weight = nn.Parameter(my_rows(numbers(vocabulary, WIDTH, seed=1), rank, dist.get_world_size()))
    out = VocabParallelEmbedding(weight, boundary, vocabulary)(ids(vocabulary, 4))
    factor = numbers(BATCH, LENGTH, WIDTH, seed=5)
    if isinstance(boundary, SequenceParallelBoundary):
        size = out.shape[1]
        factor = F.pad(factor, (0, 0, 0, size * boundary.axis.size - LENGTH))[:, rank * size : (rank + 1) * size]
    (out * factor).sum().backward()
    assert weight.grad is not None
    return out.detach(), weight.grad


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["sp=0", "sp=1"])
@pytest.mark.parametrize(("world", "vocabulary"), SPLITS)
def test_the_vocab_parallel_embedding_equals_one_device(
    pool: RankPool, world: int, vocabulary: int, sequence_parallel: bool
) -> None:
    weight = numbers(vocabulary, WIDTH, seed=1).requires_grad_()
    truth = F.embedding(ids(vocabulary, 4), weight)
    (truth * numbers(BATCH, LENGTH, WIDTH, seed=5)).sum().backward()
    assert weight.grad is not None
    found = pool.run(embedding, world, vocabulary, sequence_parallel)
    outputs = [torch.cat([out for out, _ in found], 1)[:, :LENGTH]] if sequence_parallel else [out for out, _ in found]
    for out in outputs:
        torch.testing.assert_close(out, truth.detach())
    gradient = torch.cat([grad for _, grad in found])
    torch.testing.assert_close(gradient[:vocabulary], weight.grad)
    assert not gradient[vocabulary:].any()
