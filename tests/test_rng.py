"""Counter-based random numbers: good numbers, the same for every slicing, and dropout built on them."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from echelon import rng

N = 200_000


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a.double(), b.double())))[0, 1])


def kolmogorov(x: Tensor, cdf: Tensor) -> float:
    """The largest distance between the sorted sample's distribution and the true one, times sqrt(n)."""
    steps = torch.arange(1, len(x) + 1, dtype=torch.float64) / len(x)
    return float((steps - cdf).abs().max()) * math.sqrt(len(x))


# --- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 10**12])
def test_uniform_is_uniform(start: int) -> None:
    u = rng.uniform(rng.key(3, "blocks.0.attn.q.weight"), torch.arange(start, start + N), torch.float64)
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(float(u.mean()) - 0.5) < 4 * math.sqrt(1 / 12 / N)
    assert abs(float(u.var()) - 1 / 12) < 0.001
    assert kolmogorov(u.sort().values, u.sort().values) < 1.95  # p = 0.001


def test_normal_is_normal() -> None:
    x = rng.normal(rng.key(3, "w"), torch.arange(N), torch.float64)
    assert abs(float(x.mean())) < 4 / math.sqrt(N)
    assert abs(float(x.var()) - 1) < 0.02
    assert abs(float((x**3).mean())) < 0.05
    assert abs(float((x**4).mean()) - 3) < 0.1
    assert kolmogorov(x.sort().values, torch.special.ndtr(x.sort().values)) < 1.95


def test_truncated_normal_is_within_two() -> None:
    x = rng.truncated_normal(rng.key(3, "w"), torch.arange(N), torch.float64)
    outside = math.erfc(math.sqrt(2))
    assert float(x.abs().max()) <= 2
    assert abs(float(x.mean())) < 4 / math.sqrt(N)
    cdf = (torch.special.ndtr(x.sort().values) - outside / 2) / (1 - outside)
    assert kolmogorov(x.sort().values, cdf) < 1.95
    whole = torch.empty(6, 5)
    rng.truncated_normal_init(0.5).fill(whole, 7, "w")
    assert torch.equal(whole.flatten(), rng.truncated_normal_init(0.5).values(7, "w", torch.arange(30), torch.float32))
    assert torch.equal(whole.flatten(), 0.5 * rng.truncated_normal(rng.key(7, "w"), torch.arange(30)))


def test_every_bit_is_fair_and_independent_of_its_neighbour() -> None:
    z = rng.bits(rng.key(0, "w"), torch.arange(N))
    ones = torch.stack([(z >> bit) & 1 for bit in range(64)]).double()
    assert float((ones.mean(1) - 0.5).abs().max()) < 5 * 0.5 / math.sqrt(N)
    table = torch.corrcoef(ones) - torch.eye(64)
    assert float(table.abs().max()) < 5.5 / math.sqrt(N)


@pytest.mark.parametrize("lag", [1, 2, 3, 64, 257, 4096])
def test_neighbouring_indices_are_uncorrelated(lag: int) -> None:
    u = rng.uniform(rng.key(1, "w"), torch.arange(N))
    x = rng.normal(rng.key(1, "w"), torch.arange(N))
    assert abs(correlation(u[:-lag], u[lag:])) < 5 / math.sqrt(N)
    assert abs(correlation(x[:-lag], x[lag:])) < 5 / math.sqrt(N)


def test_keys_are_uncorrelated() -> None:
    index = torch.arange(N)
    names = [(0, "w"), (1, "w"), (0, "x"), (0, "w.0"), (10, "w")]
    streams = [rng.uniform(rng.key(*name), index) for name in names] + [rng.uniform(key, index) for key in (0, 1, 2)]
    for i, a in enumerate(streams):
        for b in streams[:i]:
            # Keys 0, 1, 2 permute one set of numbers: nearness of keys shows as equality of sets, never as correlation.
            assert abs(correlation(a, b)) < 5 / math.sqrt(N)


def test_names_and_seeds_do_not_collide() -> None:
    names = [f"blocks.{i}.{m}" for i in range(500) for m in ("q.weight", "k.weight", "q.bias", "drop1", "drop2")]
    keys = {rng.key(seed, name) for seed in range(20) for name in names}
    assert len(keys) == 20 * len(names)
    assert all(0 <= key < 1 << 63 for key in keys)
    assert rng.key(1, "1") != rng.key(11, "")


def test_numbers_of_a_key_and_its_meaning_never_change() -> None:
    """Checkpoints and published losses depend on them: a change here changes every run's initial weights."""
    assert rng.key(0, "embed.weight") == 1312293857145811348
    assert rng.bits(rng.key(0, "embed.weight"), torch.arange(3)).tolist() == [
        -2361425389590458388,
        -5976391876962430077,
        -2063905709147173728,
    ]
    values = rng.normal(rng.key(0, "embed.weight"), torch.arange(3)).tolist()
    assert values == [-0.4213848412036896, -0.824640154838562, -0.1457744538784027]


# --- slices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_any_slicing_is_bit_equal(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    key, index = rng.key(5, "w"), torch.arange(5000)
    for draw in (rng.uniform, rng.normal):
        whole = draw(key, index, dtype)
        for part in (slice(1, 2), slice(3, 4999), slice(0, None, 7), slice(17, 1000, 3)):
            assert torch.equal(draw(key, index[part], dtype), whole[part])
        assert torch.equal(draw(key, index.view(50, 100).t(), dtype), whole.view(50, 100).t())
        with monkeypatch.context() as patch:
            patch.setattr(rng, "CHUNK", 333)
            assert torch.equal(draw(key, index, dtype), whole)
        assert whole.dtype == dtype
    assert float(rng.uniform(key, index, dtype).max()) < 1


def test_a_tensor_of_keys_gives_a_row_each(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, index = torch.tensor([3, -7, 1 << 60]), torch.arange(40).view(5, 8)
    whole = rng.bits(keys, index)
    assert whole.shape == (3, 5, 8)
    for row, key in zip(whole, keys.tolist(), strict=True):
        assert torch.equal(row, rng.bits(key, index))
    for chunk in (1, 16, 40, 80):
        monkeypatch.setattr(rng, "CHUNK", chunk)
        assert torch.equal(rng.bits(keys, index), whole)


def test_fp64_starts_from_the_fp32_weights() -> None:
    index = torch.arange(1000)
    wide = rng.normal_init(0.02).values(0, "w", index, torch.float64)
    assert torch.equal(wide, rng.normal_init(0.02).values(0, "w", index, torch.float32).double())


@pytest.mark.parametrize(
    ("window", "part"),
    [
        ({}, (slice(None), slice(None), slice(None))),
        ({0: (2, 6)}, (slice(2, 5), slice(None), slice(None))),
        ({1: (1, 5)}, (slice(None), slice(1, 4), slice(None))),
        ({2: (3, 4)}, (slice(None), slice(None), slice(3, 4))),
        ({0: (4, 6), 2: (0, 4)}, (slice(4, 6), slice(None), slice(0, 2))),
        ({1: (0, 5)}, (slice(None), slice(0, 5), slice(None))),
    ],
)
def test_a_window_is_a_slice_of_the_full_tensor(
    window: dict[int, tuple[int, int]], part: tuple[slice, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, init = torch.empty(6, 5, 4), rng.normal_init(0.5)
    init.fill(whole, 7, "w")
    assert torch.equal(whole.flatten(), init.values(7, "w", torch.arange(120), torch.float32))
    expected = torch.arange(120).view(6, 5, 4)[part]
    sizes = expected.shape
    assert torch.equal(rng.logical_index(sizes, window, 0, expected.numel()), expected.flatten())
    assert torch.equal(rng.logical_index(sizes, window, 3, 6), expected.flatten()[3:6])
    for chunk in (1, 7, 1 << 15):
        monkeypatch.setattr(rng, "CHUNK", chunk)
        piece = torch.empty(sizes)
        init.fill(piece, 7, "w", window)
        assert torch.equal(piece, whole[part])


def test_fill_of_constants_scalars_and_nothing() -> None:
    x = torch.empty(3)
    rng.ONES.fill(x, 0, "w")
    assert x.tolist() == [1, 1, 1]
    rng.ZEROS.fill(x, 0, "w")
    assert x.tolist() == [0, 0, 0]
    assert rng.ONES.values(0, "w", torch.arange(2), torch.float64).tolist() == [1, 1]
    scalar = torch.empty(())
    rng.normal_init(1.0).fill(scalar, 0, "w")
    assert float(scalar) == float(rng.normal(rng.key(0, "w"), torch.tensor(0)))
    rng.normal_init(1.0).fill(torch.empty(0, 4), 0, "w")


# --- dropout ----------------------------------------------------------------------------------------------------------


def dropout(p: float, samples: list[int], site: str = "drop", seed: int = 0) -> rng.Dropout:
    stream = rng.RandomStream(seed)
    stream.samples = torch.tensor(samples)
    return rng.Dropout(p, site, stream)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_right_share_and_the_mean(p: float) -> None:
    y = dropout(p, list(range(100)))(torch.ones(100, 2000))
    kept = float((y != 0).double().mean())
    assert abs(kept - (1 - p)) < 5 * math.sqrt(p * (1 - p) / y.numel())
    assert torch.allclose(y[y != 0], torch.tensor(1 / (1 - p)))


def test_dropout_edges() -> None:
    x = torch.randn(2, 3)
    assert dropout(0.0, [0, 1])(x) is x
    assert dropout(0.5, [0, 1]).eval()(x) is x
    assert not dropout(1.0, [0, 1])(x).any()
    with pytest.raises(ValueError, match=r"requires the global sample index .*samples none"):
        rng.Dropout(0.5, "drop", rng.RandomStream(0))(x)
    with pytest.raises(ValueError, match=r"samples \(3,\)"):
        dropout(0.5, [0, 1, 2])(x)


def test_masks_differ_by_sample_site_and_seed() -> None:
    x = torch.ones(1, 4000)
    first = dropout(0.5, [0])(x)
    for other in (dropout(0.5, [1]), dropout(0.5, [0], site="other"), dropout(0.5, [0], seed=1)):
        assert abs(correlation(first[0], other(x)[0])) < 5 / math.sqrt(4000)
    changed = dropout(0.5, [0])
    changed.stream.seed = 1
    assert torch.equal(changed(x), dropout(0.5, [0], seed=1)(x))


def test_dropout_of_rows_equals_rows_of_dropout() -> None:
    x = torch.randn(6, 5, 8)
    whole = dropout(0.3, [10, 11, 12, 13, 14, 15])(x)
    assert torch.equal(dropout(0.3, [12, 13])(x[2:4]), whole[2:4])
    assert torch.equal(dropout(0.3, [15, 10])(x[[5, 0]]), whole[[5, 0]])


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_dropout_of_a_window_equals_the_window_of_dropout(dim: int) -> None:
    x = torch.randn(2, 4, 6, 6)
    whole, half = dropout(0.3, [4, 9])(x), x.shape[dim] // 2
    module = dropout(0.3, [4, 9])
    module.window[dim] = (half, x.shape[dim])
    assert torch.equal(module(x.narrow(dim, half, half)), whole.narrow(dim, half, half))


def test_dropout_of_a_padded_last_part() -> None:
    """Sequence 33 on two ranks: the second holds 17 positions from 17 on, the last of them padding."""
    x = torch.randn(2, 33, 8)
    module = dropout(0.3, [0, 1])
    whole = module(x)
    module.window[1] = (17, 33)
    assert torch.equal(module(nn.functional.pad(x, (0, 0, 0, 1))[:, 17:])[:, :16], whole[:, 17:])


def test_recomputation_draws_the_same_mask() -> None:
    layer = nn.Sequential(nn.Linear(8, 8), dropout(0.5, [3, 4]), nn.Linear(8, 8)).double()
    x = torch.randn(2, 8, dtype=torch.float64)
    gradients = []
    for recompute in (False, True):
        layer.zero_grad()
        y = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False) if recompute else layer(x)
        y.square().sum().backward()
        gradients.append(layer[0].weight.grad.clone())
    assert torch.equal(*gradients)
    assert gradients[0].abs().max() > 0


def test_dropout_is_one_graph_for_a_compiler() -> None:
    module = dropout(0.3, [3, 4])
    module.window[1] = (2, 8)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for samples in ([3, 4], [9, 1 << 40]):
        module.stream.samples = torch.tensor(samples)
        x = torch.randn(2, 4, 16)
        assert torch.equal(compiled(x), module(x))


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler warns about torch
def test_compiled_numbers_are_bit_equal() -> None:
    key, index = rng.key(1, "a"), torch.arange(100_000)

    def draw(index: Tensor) -> tuple[Tensor, ...]:
        return rng.bits(key, index), rng.normal(key, index), rng.keep_mask(key, index, 0.1), rng.uniform(key, index)

    for compiled, eager in zip(torch.compile(draw)(index), draw(index), strict=True):
        assert torch.equal(compiled, eager)


def test_gradients_flow_through_kept_elements() -> None:
    x = torch.ones(2, 50, requires_grad=True)
    y = dropout(0.5, [0, 1])(x)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_attach_replaces_every_dropout() -> None:
    shared = nn.Dropout(0.1)
    model = nn.ModuleDict(
        {"a": nn.Sequential(nn.Linear(2, 2), shared), "b": nn.Sequential(shared), "c": nn.Dropout(0.2)}
    )
    model["c"].eval()
    stream = rng.RandomStream(0)
    assert rng.attach_stream(model, stream) == 3
    found = {name: m for name, m in model.named_modules() if isinstance(m, rng.Dropout)}
    assert {name: (m.site, m.p, m.stream is stream, m.training) for name, m in found.items()} == {
        "a.1": ("a.1", 0.1, True, True),
        "b.0": ("b.0", 0.1, True, True),
        "c": ("c", 0.2, True, False),
    }
    assert rng.attach_stream(model, stream) == 0


@pytest.mark.parametrize(
    "module",
    [nn.Dropout2d(0.1), nn.AlphaDropout(0.1), nn.MultiheadAttention(4, 2, dropout=0.1), nn.LSTM(2, 2, 2, dropout=0.1)],
)
def test_attach_rejects_other_dropouts(module: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), module)
    with pytest.raises(ValueError, match=rf"would change with the layout \(2 \({type(module).__name__}\)\)"):
        rng.attach_stream(model, rng.RandomStream(0))
    assert type(model[1]) is nn.Dropout


def test_attach_accepts_them_at_zero() -> None:
    assert rng.attach_stream(nn.Sequential(nn.MultiheadAttention(4, 2), nn.Dropout2d(0.0)), rng.RandomStream(0)) == 0


# --- draws ------------------------------------------------------------------------------------------------------------


def draws(samples: list[int], site: str = "gate.noise", seed: int = 0) -> rng.RandomDraws:
    stream = rng.RandomStream(seed)
    stream.samples = torch.tensor(samples)
    return rng.RandomDraws(site, stream)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_draws_are_uniform_and_normal(dtype: torch.dtype) -> None:
    like = torch.empty(20, 100, 50, dtype=dtype)
    u, x = (
        draw.flatten().sort().values.double()
        for draw in (draws([*range(20)]).uniform(like), draws([*range(20)]).normal(like))
    )
    assert kolmogorov(u, u) < 1.95
    assert kolmogorov(x, torch.special.ndtr(x)) < 1.95
    assert draws([*range(20)]).uniform(like).dtype == draws([*range(20)]).normal(like).dtype == dtype
    assert float(u.max()) < 1


def test_a_slice_draws_its_slice_of_the_full_tensor() -> None:
    like = torch.empty(4, 6, 5)
    for kind in ("uniform", "normal"):
        whole = getattr(draws([7, 8, 9, 10]), kind)(like)
        assert torch.equal(getattr(draws([9, 7]), kind)(like[:2]), whole[[2, 0]])
        module = draws([7, 8, 9, 10])
        module.rows, module.window = slice(1, 3), {1: (torch.tensor([5, 0]), 6), 2: (3, 5)}
        assert torch.equal(getattr(module, kind)(like[:2, :2, :2]), whole[1:3, [5, 0], 3:])


def test_draws_differ_by_sample_site_and_seed() -> None:
    like = torch.empty(1, 4000)
    first = draws([0]).normal(like)
    for other in (draws([1]), draws([0], site="other"), draws([0], seed=1)):
        assert abs(correlation(first[0], other.normal(like)[0])) < 5 / math.sqrt(4000)
    changed = draws([0])
    changed.stream.seed = 1
    assert torch.equal(changed.normal(like), draws([0], seed=1).normal(like))
    with pytest.raises(ValueError, match=r"draws 'gate.noise' requires the global sample index .*samples \(2,\)"):
        draws([0, 1]).normal(like)


def test_hooks_of_draws_see_their_inputs() -> None:
    """Hooks set the slice of the sequence, as for a dropout."""
    module, seen = draws([0]), []
    module.register_forward_pre_hook(lambda _m, args: seen.append(args[0].shape))
    module.uniform(torch.empty(1, 3, 2))
    module.normal(torch.empty(1, 4))
    assert seen == [(1, 3, 2), (1, 4)]


def test_attach_binds_draws_to_their_site() -> None:
    model = nn.ModuleDict({"a": nn.Sequential(nn.Dropout(0.1), rng.RandomDraws()), "b": rng.RandomDraws()})
    like = torch.empty(2, 3)
    torch.manual_seed(5)
    before = model["b"].normal(like)
    torch.manual_seed(5)
    assert torch.equal(before, torch.randn(2, 3))
    stream = rng.RandomStream(0)
    assert rng.attach_stream(model, stream) == 3
    assert {name: m.site for name, m in model.named_modules() if isinstance(m, rng.RandomDraws)} == {
        "a.1": "a.1",
        "b": "b",
    }
    stream.samples = torch.tensor([3, 4])
    assert torch.equal(model["b"].normal(like), draws([3, 4], site="b").normal(like))
    assert rng.attach_stream(model, rng.RandomStream(1)) == 0
    assert model["b"].stream is stream


def test_draws_are_one_graph_for_a_compiler() -> None:
    module = draws([3, 4])
    compiled = torch.compile(module.uniform, fullgraph=True, backend="aot_eager")
    for samples in ([3, 4], [9, 1 << 40]):
        module.stream.samples = torch.tensor(samples)
        x = torch.randn(2, 4, 16)
        assert torch.equal(compiled(x), module.uniform(x))
