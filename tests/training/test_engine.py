from __future__ import annotations

import pytest
import torch
from tiny_engines import batch_of, engine_of, float64, largest_error, one_device, tiny, whole
from torch import nn

import echelon as ec
from echelon.layout import Layout
from echelon.parallel.parallel_options import ParallelOptions
from echelon.training.engine import Engine

SHAPE = tiny("gpt", dropout=0.1)


class Mean(nn.Module):
    """Rows are (x, y); a count may be given beside."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.seen = []

    def forward(self, x, y, ids=None):
        self.seen.append((x.dtype, None if ids is None else ids.dtype, len(x)))
        return (self.net(x).squeeze(-1) - y).square().sum(), torch.tensor(len(y))


def rows(count):
    x = torch.arange(3 * count, dtype=torch.float32).reshape(count, 3) / 10
    return {"x": x, "y": x.sum(-1), "ids": torch.arange(count)}


def test_one_process_needs_no_process_group():
    model = Mean()
    result = ec.Engine(model, "dp=1,accumulate=2").step(rows(4))
    assert result.count == 4
    assert not result.skipped
    assert model.seen == [(torch.float32, torch.int64, 2)] * 2


def test_only_floating_inputs_take_the_compute_dtype():
    model = Mean()
    Engine(model, options=ParallelOptions(compute_dtype=torch.bfloat16)).step(rows(2))
    assert model.seen == [(torch.bfloat16, torch.int64, 2)]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("dp=2", "does not fill the world"),
        ("offload=activations,recompute=budget:1GiB", "offloads the activations"),
    ],
)
def test_incompatible_options_are_refused(layout, message):
    with pytest.raises(ValueError, match=message):
        Engine(Mean(), Layout.parse(layout))


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"4 rows.*use a multiple of 3"):
        Engine(Mean(), "dp=1,accumulate=3").step(rows(4))


def miscounted(layout):
    found = []
    for given in (1, 3, 2):
        engine = engine_of(SHAPE, layout)
        several = [*engine.microbatches(batch_of(SHAPE, 4)), *engine.microbatches(batch_of(SHAPE, 4))]
        try:
            found.append(engine.step_microbatches(several[:given]).count)
        except ValueError as error:
            found.append(str(error))
    return found


def test_a_step_has_as_many_microbatches_as_the_layout(pool):
    for layout in ("dp=1", "pp=2,schedule=2bw", "pp=2"):
        for found in pool.run(miscounted, Layout.parse(layout).world, f"{layout},accumulate=2"):
            assert found[0].startswith("expected accumulate=2 microbatches per step and rank, got 1; give as many")
            assert "got more;" in found[1]
            assert found[2] == 36


def test_a_step_takes_another_learning_rate():
    still, moving = Mean(), Mean()
    before = [p.detach().clone() for p in still.parameters()]
    still, moving = Engine(still), Engine(moving)
    still.step(rows(4), lr=0.0)
    moving.step(rows(4), lr=0.1)
    assert all(torch.equal(a, b) for a, b in zip(before, still.model.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before, moving.model.parameters(), strict=True))


def rows_of(layout, batch):
    engine = engine_of(SHAPE, layout)
    return [list(part) for part in engine.row_ranges(batch)]


def test_every_row_belongs_to_one_rank(pool):
    found = pool.run(rows_of, 4, "dp=2,tp=2,accumulate=3", 12)
    assert found[0] == [[0, 1], [4, 5], [8, 9]]
    assert found[0] == found[1], "tp ranks work on the same rows"
    assert found[2] == found[3]
    assert sorted(row for part in (*found[0], *found[2]) for row in part) == list(range(12))


def evaluation(layout):
    engine = engine_of(SHAPE, layout)
    batch = batch_of(SHAPE, 4)
    batch["targets"][0, 2:] = -100
    loss = engine.evaluate(engine.microbatches(batch))
    training = engine.model.training
    first = whole(engine.parallel, "master")
    batch["targets"].fill_(-100)
    return loss, training, first, engine.evaluate(engine.microbatches(batch)), engine.step(batch_of(SHAPE, 4)).loss


def test_evaluation_is_without_dropout_and_changes_nothing(pool):
    model = one_device(SHAPE).eval()
    batch = batch_of(SHAPE, 4)
    batch["targets"][0, 2:] = -100
    with torch.no_grad():
        total, count = model(**batch)
    expected = (total / count).item()
    truth = {name: parameter.detach() for name, parameter in model.named_parameters()}
    steps = set()
    for layout in ("dp=1", "dp=2,zero=3,accumulate=2", "tp=2"):
        for loss, training, found, nothing, step in pool.run(evaluation, Layout.parse(layout).world, layout):
            assert loss == pytest.approx(expected, abs=1e-10)
            assert training, "the model trains on"
            assert largest_error(found, truth) == 0.0
            assert nothing is None, "without a target there is no loss, not a loss of 0"
            steps.add(round(step, 10))
    assert len(steps) == 1, "a step after an evaluation is as without"


def unused(layout):
    """A parameter that only some rows use: rank 1 has no gradient for it."""
    torch.manual_seed(0)
    engine = Engine(Sometimes().double(), layout, options=float64())
    x = torch.ones(4, 3, dtype=torch.float64)
    x[:2] *= -1
    result = engine.step({"x": x})
    return result.norm, whole(engine.parallel)


class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.often = nn.Linear(3, 40), nn.Linear(3, 40)

    def forward(self, x):
        total = self.always(x).square().sum()
        if bool((x > 0).all()):
            total = total + self.often(x).square().sum()
        return total, torch.tensor(len(x))


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=1", "dp=2,zero=3"])
def test_a_parameter_that_one_rank_did_not_use(pool, layout):
    # One device would see all rows at once; in two microbatches it takes the same branches as two ranks.
    ((norm, truth),) = pool.run(unused, 1, "dp=1,accumulate=2")
    for found_norm, found in pool.run(unused, 2, layout):
        assert found_norm == pytest.approx(norm, abs=1e-10)
        assert largest_error(found, truth) < 1e-10
