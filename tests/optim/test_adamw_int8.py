"""AdamW in 8 bits: the values that can be kept, one device, and every layout to what 8 bits can hold."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_engines import error, float64, tiny

from echelon import models
from echelon.config.sections import OptimizerConfig
from echelon.kernels.optim import fused_adamw
from echelon.kernels.optim.stochastic_round import ElementIndices
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.optim import cost
from echelon.optim.blockwise_quantization import BlockQuantizedState, code_boundaries, codebook, nearest_codes
from echelon.optim.cost import QUANTIZATION_BLOCK
from echelon.optim.rules import adamw_int8
from echelon.optim.rules.adamw_int8 import AdamWInt8
from echelon.training.engine import Engine
from tests.optim import references
from tests.optim.same_gradients import SCALE, fed, feed, gradient

CPU = torch.device("cpu")
RULE = OptimizerConfig(lr=0.05, states="int8")
MODEL = tiny("llama", width=64, ffn=80, vocab=67, layers=2)
LIVE = torch.tensor(True)


@pytest.mark.parametrize("signed", [True, False])
def test_the_codebook_is_the_papers(signed: bool) -> None:
    values = codebook(signed, CPU)
    assert len(values) == 256
    assert values.unique().numel() == 256
    assert values.max() == 1.0
    assert (values == 0).sum() == 1
    # The nearest to 0 but one is the middle of the only part (or the lower of two) of [0.1, 1] x 10^-6.
    assert float(values[values > 0].min()) == pytest.approx(0.55e-6 if signed else 0.325e-6)
    assert float(values[-2]) == pytest.approx(1 - 0.9 / (128 if signed else 256))


def half_gap(shares: torch.Tensor, signed: bool) -> torch.Tensor:
    """The most by which numbers of blocks whose largest is 1 may be off."""
    values = codebook(signed, CPU).double()
    above = torch.searchsorted(values, shares).clamp(1, 255)
    return (values[above] - values[above - 1]) / 2


@pytest.mark.parametrize("signed", [True, False])
def test_the_cpu_lookup_finds_the_nearest_codes(signed: bool) -> None:
    """Bit for bit as a search among all borders does: on them, beside them, and everywhere else."""
    borders = code_boundaries(signed, CPU)
    beside = [torch.nextafter(borders, torch.full_like(borders, towards)) for towards in (-2.0, 2.0)]
    drawn = [torch.rand(10000, generator=torch.Generator().manual_seed(0)) * size for size in (1, 1e-2, 1e-5, 1e-39)]
    shares = torch.cat([borders, *beside, *drawn, torch.tensor([0.0, 1.0, torch.inf, torch.nan])])
    shares = torch.cat([shares, -shares])
    assert torch.equal(nearest_codes(shares, signed), torch.bucketize(shares, borders).to(torch.uint8))


@pytest.mark.parametrize("signed", [True, False])
def test_quantization_error_is_half_an_interval(signed: bool) -> None:
    numbers = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).exp() * 1e-3
    numbers = numbers * torch.where(torch.arange(1000) % 2 == 0, 1, -1) if signed else numbers
    blocks = BlockQuantizedState(1000, signed=signed, device=CPU)
    assert blocks.read(slice(0, 1000), torch.float64).count_nonzero() == 0
    blocks.write(slice(0, 1000), numbers, LIVE)
    for start in range(0, 1000, 256):
        part = slice(start, min(start + 256, 1000))
        largest = numbers[part].abs().max()
        off = (blocks.read(part, torch.float64) - numbers[part]).abs() / largest
        assert (off <= half_gap(numbers[part] / largest, signed) + 1e-6).all()
    blocks.write(slice(0, 1000), numbers * 2, torch.tensor(False))
    assert torch.allclose(blocks.block_amax[0].double(), numbers[:256].abs().max())


def test_moments_are_used_unrounded_and_stored_to_half_an_interval() -> None:
    """The first update is AdamW's; then moments are off by no more than 8 bits are, and the second is of those."""
    engine = Engine(models.build(MODEL, "meta", dtype=torch.float64), "", RULE, options=float64())
    optimizer = engine.optimizer
    assert isinstance(optimizer, AdamWInt8)
    flat = engine.parallel.sharded_model
    before = [(u, p, flat.piece_view(u.master.values(), p).clone()) for u, p in flat.pieces()]
    feed(engine.parallel, optimizer, RULE.lr, 0)
    kept = {held.param.name: pair for held, pair in zip(optimizer._shards, optimizer._moments, strict=True)}
    assert 0 < len(kept) < len(before)
    states, weights = {}, {}
    for unit, piece, values in before:
        name, state = piece.param.name, {}
        g = gradient(name, piece.param.shape, 0).reshape(-1).numpy() * SCALE
        decay = 0.1 if piece.param.decay else 0.0
        wanted = references.adamw(values.numpy(), g, state, 1, RULE.lr, decay)
        assert error(flat.piece_view(unit.master.values(), piece), torch.from_numpy(wanted)) < 1e-10
        weights[name], states[name] = wanted, state
        if math.prod(piece.param.shape) < cost.MIN_QUANTIZED_NUMEL:
            assert name not in kept
            continue
        for blocks, key in zip(kept[name], "mv", strict=True):
            exact = torch.from_numpy(state[key])
            held = blocks.read(slice(0, len(exact)), torch.float64)
            largest = blocks.block_amax.double().repeat_interleave(cost.QUANTIZATION_BLOCK)[: len(exact)]
            assert ((held - exact).abs() <= largest * (half_gap(exact / largest, key == "m") + 1e-6)).all()
            state[key] = held.numpy()
    feed(engine.parallel, optimizer, RULE.lr, 1)
    for unit, piece, _ in before:
        name = piece.param.name
        g = gradient(name, piece.param.shape, 1).reshape(-1).numpy() * SCALE
        decay = 0.1 if piece.param.decay else 0.0
        wanted = references.adamw(weights[name], g, states[name], 2, RULE.lr / 2, decay)
        assert error(flat.piece_view(unit.master.values(), piece), torch.from_numpy(wanted)) < 1e-10


LAYOUTS = ("dp=2", "dp=2,zero=1", "dp=3,zero=3", "tp=2", "pp=2")


def test_layouts_differ_by_the_quantization_error(pool: RankPool) -> None:
    """Gradients of one size make blocks of one size, wherever they are cut: equal. Of any size: to the quantum."""
    long = OptimizerConfig(lr=0.05)
    (even,), ((anyhow, exact),) = pool.run(fed, 1, MODEL, "", [RULE], True), pool.run(fed, 1, MODEL, "", [RULE, long])
    first = dict(models.build(MODEL, "cpu", dtype=torch.float64).named_parameters())
    for layout in LAYOUTS:
        world = Layout.parse(layout).world
        for rank in pool.run(fed, world, MODEL, layout, [RULE], True):
            assert rank[0].bytes == rank[0].claimed
            worst = max(error(rank[0].values[key], value) for key, value in even[0].values.items())
            assert worst < 1e-10, layout
        found = pool.run(fed, world, MODEL, layout, [RULE])[0][0]
        for key, value in anyhow.values.items():
            if value.numel() < cost.MIN_QUANTIZED_NUMEL or layout in ("dp=2", "pp=2"):  # no block is cut elsewhere
                assert error(found.values[key], value) < 1e-10, (layout, key)
            # A step is a ratio of two numbers that are each kept to a part of a power of ten: a tenth off, at the most.
            quantum = 0.1 * (value - first[key]).norm()
            assert (found.values[key] - value).norm() < quantum, (layout, key)
            assert (exact.values[key] - value).norm() < quantum, (layout, key)


def test_int8_moments_take_two_bytes_per_element() -> None:
    assert cost.state_bytes(RULE, (1024, 1024)) == 2 * (1 + 4 / 256) * 1024**2
    assert cost.state_bytes(RULE, (64, 63)) == 8 * 64 * 63
    assert cost.state_bytes_per_element(RULE) == pytest.approx(2.03, abs=0.01)


def test_maxima_that_differ_in_a_later_block_requantize_all() -> None:
    """A checkpoint of another sharding has other blocks: none of ours needs to be the first that they cut."""
    size = 3 * QUANTIZATION_BLOCK
    state = BlockQuantizedState(size, signed=True, device=torch.device("cpu"))
    codes = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    amax = torch.ones(size)
    amax[QUANTIZATION_BLOCK + 100 :] = 0.25
    state.write_codes(codes)
    state.write_amax(amax)
    written = codebook(True, torch.device("cpu"))[codes.long()] * amax
    read = state.read(slice(0, size), torch.float32)
    torch.testing.assert_close(read, written, rtol=0.04, atol=0.004)
    assert torch.equal(read[:QUANTIZATION_BLOCK], written[:QUANTIZATION_BLOCK])


def test_weights_are_rounded_alike_in_chunks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The random bits of an element do not depend on the chunk that it is in."""
    size, step = 4 * QUANTIZATION_BLOCK, torch.tensor(1)
    number = torch.ones((), dtype=torch.float64)
    betas_and_eps = torch.tensor([0.9, 0.999, 1e-8], dtype=torch.float64)
    constants = fused_adamw.step_constants(betas_and_eps, 1e-3, 0.0, step, number, number, torch.float32)
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(0))

    def updated() -> torch.Tensor:
        weights = torch.ones(size, dtype=torch.bfloat16)
        moments = [BlockQuantizedState(size, signed=signed, device=CPU) for signed in (True, False)]
        adamw_int8.update(weights, None, *moments, gradient, constants, step, ElementIndices(key=1))
        return weights

    at_once = updated()
    monkeypatch.setattr(adamw_int8, "CHUNK_NUMEL", QUANTIZATION_BLOCK)
    assert torch.equal(updated(), at_once)
    assert len(at_once.unique()) > 2
