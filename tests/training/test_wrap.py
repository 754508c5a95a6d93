"""`wrap` in a loop of one's own equals a plain loop on one device: the same loop, given all ranks' rows at once."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from tiny_engines import batch_of, largest_error, one_device, tiny
from torch import nn
from torch.nn import functional as F

import echelon as ec
from echelon.launch.rank_failure import RankError
from echelon.layout import Layout
from echelon.models.moe_config import MoEConfig
from echelon.moe.moe_layer import MoELayer

ROWS, STEPS = 12, 4


class Tied(nn.Module):
    """A user's module: an embedding used twice, a frozen scale, layers of odd sizes, no loss inside."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(6, 11)
        self.out.weight = self.embed.weight
        self.scale = nn.Parameter(torch.full((1,), 0.5), requires_grad=False)
        self.register_buffer("shift", torch.tensor([0.25]))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + self.drop(torch.tanh(layer(x))) * self.scale + self.shift
        return self.out(x)


def build(seed=0, dropout=0.0):
    torch.manual_seed(seed)
    return Tied(dropout).double()


def data(step):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 11, (ROWS, 2), generator=generator)
    return ids[:, 0], ids[:, 1]


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def plain(limit=None):
    """The truth: one device, the whole batch."""
    model = build()
    optimizer, losses = adamw(model), []
    for step in range(STEPS):
        ids, targets = data(step)
        loss = F.cross_entropy(model(ids), targets)
        loss.backward()
        if limit is not None:
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def my_rows(count=ROWS):
    size = count // dist.get_world_size()
    return slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)


def loop(layout, accumulate=1, limit=None):
    """As with DDP: the mean of this rank's rows, equal numbers on all ranks."""
    model = ec.wrap(build(), layout)
    optimizer, losses = adamw(model), []
    for step in range(STEPS):
        ids, targets = (t[my_rows()] for t in data(step))
        parts = list(zip(ids.chunk(accumulate), targets.chunk(accumulate), strict=True))
        for some_ids, some_targets in parts[:-1]:
            with model.no_sync():
                (F.cross_entropy(model(some_ids), some_targets) / accumulate).backward()
            assert all(p.grad is None for p in model.parameters())
        some_ids, some_targets = parts[-1]
        (F.cross_entropy(model(some_ids), some_targets) / accumulate).backward()
        if limit is not None:
            model.clip_grad_norm_(limit)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():  # an evaluation between steps, as everybody has one
            losses.append(F.cross_entropy(model(data(step + 1)[0]), data(step + 1)[1]).item())
        model.train()
    return losses, model.full_state_dict()


def evaluated():
    model, losses = build(), []
    optimizer = adamw(model)
    for step in range(STEPS):
        F.cross_entropy(model(data(step)[0]), data(step)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(F.cross_entropy(model(data(step + 1)[0]), data(step + 1)[1]).item())
    return losses


LAYOUTS = ("dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=3,zero=3", "dp=4,zero=3,shard=2")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_user_loop_equals_one_process(pool, layout):
    _, state = plain()
    for losses, found in pool.run(loop, Layout.parse(layout).world, layout):
        assert losses == pytest.approx(evaluated(), abs=1e-10)
        assert largest_error(found, state) < 1e-10
        assert torch.equal(found["embed.weight"], found["out.weight"])


@pytest.mark.parametrize("layout", ["dp=2", "dp=3,zero=1", "dp=2,zero=2", "dp=2,zero=3"])
def test_no_sync_accumulates_microbatches(pool, layout):
    _, state = plain()
    for _, found in pool.run(loop, Layout.parse(layout).world, layout, 2):
        assert largest_error(found, state) < 1e-10


@pytest.mark.parametrize("layout", ["dp=2", "dp=3,zero=3"])
def test_clipping_is_by_the_norm_over_all_ranks(pool, layout):
    _, state = plain(limit=0.05)
    for _, found in pool.run(loop, Layout.parse(layout).world, layout, 1, 0.05):
        assert largest_error(found, state) < 1e-6  # torch adds 1e-6 to the norm, too


def ragged(layout):
    """`mean` with 7, 5, 0 rows: rank 2 has nothing at all."""
    model = ec.wrap(build(), layout)
    optimizer, losses = adamw(model), []
    start, stop = ((0, 7), (7, 12), (12, 12))[dist.get_rank()]
    for step in range(STEPS):
        ids, targets = (t[start:stop] for t in data(step))
        loss = model.mean(F.cross_entropy(model(ids), targets, reduction="sum"), torch.tensor(len(ids)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.full_state_dict()


@pytest.mark.parametrize("layout", ["dp=3", "dp=3,zero=1", "dp=3,zero=3"])
def test_mean_is_exact_with_uneven_counts(pool, layout):
    truth, state = plain()
    for losses, found in pool.run(ragged, 3, layout):
        assert losses == pytest.approx(truth, abs=1e-10)
        assert largest_error(found, state) < 1e-10


def different_starts(layout):
    model = ec.wrap(build(seed=dist.get_rank() + 5), layout)
    return model.full_state_dict()


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=3"])
def test_every_rank_starts_from_the_first_ranks_values(pool, layout):
    expected = {name: value.detach() for name, value in build(seed=5).state_dict().items()}
    for found in pool.run(different_starts, 2, layout):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def forgets_zero_grad(layout):
    model = ec.wrap(build(), layout)
    for step in range(2):
        F.cross_entropy(model(data(step)[0]), data(step)[1]).backward()


def backward_twice(layout):
    model = ec.wrap(build(), layout)
    first, second = (F.cross_entropy(model(data(step)[0]), data(step)[1]) for step in range(2))
    first.backward()
    second.backward()


def plain_state_dict(layout):
    return list(ec.wrap(build(), layout).state_dict())


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=3"])
def test_a_forgotten_zero_grad_is_an_error(pool, layout):
    with pytest.raises(RankError, match=r"call optimizer.zero_grad\(\) before the next step"):
        pool.run(forgets_zero_grad, 2, layout)


def test_a_second_backward_is_an_error(pool):
    with pytest.raises(RankError, match="a second backward pass follows the last one"):
        pool.run(backward_twice, 2, "dp=2")


def test_state_dict_of_shards_is_refused(pool):
    assert pool.run(plain_state_dict, 2, "dp=2")[0][0] == "module.scale"
    with pytest.raises(RankError, match=r"full_state_dict\(\) on every rank"):
        pool.run(plain_state_dict, 2, "dp=2,zero=1")


def loaded(layout, dtype=torch.float64):
    """Another model's state, taken in after a forward pass and given out again; then one step from it."""
    model = ec.wrap(build(seed=1).to(dtype), layout)
    model(data(0)[0])
    model.load_full_state_dict(build(seed=2).to(dtype).state_dict())
    state = model.full_state_dict()
    F.cross_entropy(model(data(0)[0][my_rows()]), data(0)[1][my_rows()]).backward()
    return state, stepped(model)


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=1", "dp=2,zero=3"])
def test_a_full_state_dict_round_trips(pool, layout):
    truth = build(seed=2).state_dict()
    for state, after in pool.run(loaded, 2, layout):
        assert state.keys() == truth.keys()
        assert all(torch.equal(state[name], value) for name, value in truth.items())
        assert largest_error(after, one_step(seed=2)) < 1e-10
    for state, _ in pool.run(loaded, 2, layout, torch.bfloat16):
        assert all(torch.equal(state[name], value.bfloat16().to(state[name].dtype)) for name, value in truth.items())


def reloaded(layout):
    torch.manual_seed(0)
    model, other = ec.wrap(FeedForward().double(), layout), FeedForward().double()
    model.load_full_state_dict(other.state_dict())
    return largest_error(model.full_state_dict(), other.state_dict())


def test_a_full_state_dict_round_trips_with_tp(pool):
    assert pool.run(reloaded, 2, "tp=2,sp=0") == [0.0, 0.0]


def test_a_state_of_another_model_is_refused_with_every_name():
    model, state = ec.wrap(build()), build().state_dict()
    state["embed.weight"] = state["embed.weight"][:3]
    state["extra"] = state.pop("scale")
    with pytest.raises(
        ValueError, match=r"scale is missing; extra is not in the model; .*embed.weight has shape \(3, 6"
    ):
        model.load_full_state_dict(state)
    with pytest.raises(ValueError, match=r"embed.weight and out.weight differ but are one"):
        model.load_full_state_dict(build().state_dict() | {"out.weight": torch.zeros(11, 6)})


def stepped(model):
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0).step()
    return model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()


def one_step(seed=0):
    model = build(seed)
    F.cross_entropy(model(data(0)[0]), data(0)[1]).backward()
    return stepped(model)


def losses_added(layout):
    model = ec.wrap(build(), layout)
    (ids, targets), rows = data(0), my_rows()
    a = F.cross_entropy(model(ids[rows][:3]), targets[rows][:3])
    b = F.cross_entropy(model(ids[rows][3:]), targets[rows][3:])
    ((a + b) / 2).backward()
    return stepped(model)


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=3"])
def test_two_forward_passes_and_one_backward(pool, layout):
    for found in pool.run(losses_added, 2, layout):
        assert largest_error(found, one_step()) < 1e-10


def left_no_sync(layout):
    model = ec.wrap(build(), layout)
    (ids, targets), rows = data(0), my_rows()
    with model.no_sync():
        loss = F.cross_entropy(model(ids[rows][:3]), targets[rows][:3]) / 2
    loss.backward()
    (F.cross_entropy(model(ids[rows][3:]), targets[rows][3:]) / 2).backward()
    return stepped(model)


def test_no_sync_is_decided_by_the_forward_pass(pool):
    for found in pool.run(left_no_sync, 2, "dp=2"):
        assert largest_error(found, one_step()) < 1e-10


def with_dropout(layout):
    model = ec.wrap(build(dropout=0.5), layout)
    outs = [model(torch.zeros(4, dtype=torch.int64)) for _ in range(2)]
    model.eval()
    return [out.detach() for out in outs], model(torch.zeros(4, dtype=torch.int64)).detach()


def test_dropout_draws_other_masks_on_every_rank_and_call(pool):
    ranks = pool.run(with_dropout, 2, "dp=2")
    rows = [row for outs, _ in ranks for out in outs for row in out]
    assert len({tuple(row.tolist()) for row in rows}) == len(rows) == 16
    assert torch.equal(ranks[0][1], ranks[1][1])
    ((whole, _),) = pool.run(with_dropout, 1, "dp=1")
    assert torch.equal(whole[0], ranks[0][0][0]), "the masks are those of one device"


class FeedForward(nn.Module):
    split = {"blocks.*": "region", "blocks.*.up": "column", "blocks.*.down": "row"}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def divided(layout):
    torch.manual_seed(0)
    model = ec.wrap(FeedForward().double(), layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.arange(24, dtype=torch.float64).reshape(2, 3, 4) / 24
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.full_state_dict()


@pytest.mark.parametrize("layout", ["tp=2,sp=0", "dp=2,tp=2,sp=0,zero=3"])
def test_tensor_parallelism_in_a_user_loop(pool, layout):
    (truth,) = pool.run(divided, 1, "dp=1")
    for found in pool.run(divided, Layout.parse(layout).world, layout):
        assert largest_error(found, truth) < 1e-10


def from_gpt(layout):
    """Under sequence parallelism each tp rank has a part of the norms' gradients."""
    model = ec.wrap(one_device(tiny("gpt", tied=True)), layout)
    total, count = model(**batch_of(tiny("gpt", tied=True), 2))
    model.mean(total, count).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return model.full_state_dict()


def test_sequence_parallelism_in_a_user_loop(pool):
    (truth,) = pool.run(from_gpt, 1, "dp=1")
    for found in pool.run(from_gpt, 2, "tp=2"):
        assert largest_error(found, truth) < 1e-10


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("dp=1,pp=1,accumulate=2", "leave microbatch and accumulate out of the layout"),
        ("dp=2", "world"),
        ("dp=1,zerro=1", 'did you mean "zero"?'),
    ],
)
def test_layouts_that_require_the_engine_are_refused(layout, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        ec.wrap(build(), layout)


# -- experts ----------------------------------------------------------------------------------------------------------

MIXTURE = MoEConfig(
    experts=4,
    k=2,
    ffn=6,
    gate="deepseek-v3",
    options=(("num_groups", 2), ("group_limit", 2), ("speed", 0.05), ("balance", 0.01)),
)
EXPERTS = tiny(layers=1, moe=MIXTURE)
"""a load-balance loss, and a bias that moves by the load of a step, far enough to change the next one's routing"""


def train_experts(layout, accumulate=1):
    """Three steps of four sequences; without a layout the truth, where the loop moves the bias itself."""
    model = one_device(EXPERTS)
    model = ec.wrap(model, layout) if layout else model
    size = 4 // Layout.parse(layout or "dp=1").dp
    rows = slice(model._parallel.axes["dp"].index * size, None) if layout else slice(None)
    optimizer = adamw(model)
    for step in range(3):
        batch = {key: value[rows][:size] for key, value in batch_of(EXPERTS, 4, seed=step).items()}
        parts = [{key: value.chunk(accumulate)[i] for key, value in batch.items()} for i in range(accumulate)]
        for part in parts:
            last = part is parts[-1]
            with nullcontext() if last or not layout else model.no_sync():
                total, count = model(**part)
                mean = model.mean(total, count) if layout else total / count
                (mean / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
        if not layout:
            for layer in (part for part in model.modules() if isinstance(part, MoELayer)):
                layer.end_step(layer.expert_load[:-1])
        else:
            with torch.no_grad():  # in training mode, and no part of a step: it must not move a bias
                model(**parts[0])
    return model.full_state_dict() if layout else {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("layout", "accumulate"),
    [
        ("dp=2", 1),
        ("dp=2,ep=2", 2),
        ("dp=4,ep=2,zero=3", 1),
        ("dp=4,shard=2,ep=2,etp=2", 1),
        ("dp=2,tp=2,ep=4,zero=1", 2),
        ("tp=2,zero=1", 1),
    ],
)
def test_experts_and_their_load_bias_in_a_user_loop(pool, layout, accumulate):
    """Both were refused. Under tp=2,zero=1 experts are sharded and nothing else is: the optimizer got all of them."""
    truth = train_experts("", accumulate)
    assert truth["blocks.0.mlp.gate.bias"].abs().max() > 0.04
    for found in pool.run(train_experts, Layout.parse(layout).world, layout, accumulate):
        assert largest_error(found, truth) < 1e-10
