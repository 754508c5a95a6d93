"""Vocabulary 50257 on tp 1, 2, 4: equal losses; tensors say 50257; padded ids get no probability, no gradient."""

from __future__ import annotations

import pytest
import torch
from tiny_engines import batch_of, engine_of, largest_error, tiny, whole

VOCABULARY = 50257
SHAPE = tiny("gpt", vocab=VOCABULARY, width=8, ffn=8, layers=1, tied=False)


def train(layout):
    """Two steps, the logits after them, and the values of this rank's padded rows and their effect on the loss."""
    engine = engine_of(SHAPE, layout)
    batch = batch_of(SHAPE, 2)
    losses = [engine.step(batch).loss for _ in range(2)]
    with torch.no_grad():
        logits = engine.model.logits(batch["tokens"])
    padding = []
    for unit, piece in engine.parallel.sharded_model.pieces():
        if piece.param.shape[0] == VOCABULARY:
            real = piece.box[0][1] - piece.box[0][0]
            for held in (unit.grad, unit.master.values()):
                rows = engine.parallel.sharded_model.piece_view(held, piece).view(piece.param.local_shape)
                padding.append(rows[real:].abs().sum().item())
                assert rows[:real].abs().sum() > 0
    state = whole(engine.parallel, "master") if layout != "tp=1" else {}
    with_poison = poisoned(engine, batch)
    return losses, logits[0, -1], with_poison, padding, {k: v for k, v in state.items() if v.shape[0] == VOCABULARY}


@torch.no_grad()
def poisoned(engine, batch):
    """The number of padded rows, and the loss before and after they would win every softmax that they took part in."""
    weight, rank = engine.model.head.weight, engine.parallel.axes.coordinates["tp"]
    padded = weight[max(0, VOCABULARY - rank * len(weight)) :] if engine.layout.tp > 1 else weight[:0]
    before = engine.model(**batch)[0].item()
    padded[:, 0] = 1e3
    return len(padded), before, engine.model(**batch)[0].item()


@pytest.fixture(scope="module")
def runs(pool):
    return {tp: pool.run(train, tp, f"tp={tp}") for tp in (1, 2, 4)}


def test_losses_are_equal(runs):
    expected = runs[1][0][0]
    assert expected[1] < expected[0]
    for ranks in runs.values():
        for losses, *_ in ranks:
            assert losses == pytest.approx(expected, abs=1e-10)


def test_logical_tensors_have_the_true_size(runs):
    for tp in (2, 4):
        *_, state = runs[tp][0]
        assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
            "embed.weight": (VOCABULARY, 8),
            "head.weight": (VOCABULARY, 8),
        }
        assert largest_error(state, runs[2][0][-1]) < 1e-10


def test_padded_ids_have_no_probability(runs):
    expected = runs[1][0][1]
    assert expected.shape == (VOCABULARY,)
    for tp, count in ((2, 1), (4, 3)):
        for _, logits, *_ in runs[tp]:
            assert torch.allclose(logits, expected, rtol=0, atol=1e-10)
            assert float(logits.softmax(-1).sum()) == pytest.approx(1.0, abs=1e-12)
        poisons = [poison for _, _, poison, *_ in runs[tp]]
        assert [num_rows for num_rows, _, _ in poisons] == [0] * (tp - 1) + [count]
        assert all(before == after for _, before, after in poisons)


def test_padded_rows_have_no_gradient_and_stay_zero(runs):
    for tp in (2, 4):
        for *_, padding, _ in runs[tp]:
            assert padding == [0.0] * 4
