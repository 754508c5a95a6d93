"""Dropout and the noise of gates: which sites a model has, their rates, and that no two of them share a stream.

`verify` draws the truth's masks at the same sites, so that a missing site, or two sites with one mask, would pass. Here
sites are in a table written by hand, and masks are watched from outside while the engine trains: every site, layer,
step, row and position, at every shift against every other. The seed is fixed; bounds are 5 to 7 standard deviations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
import torch
from tiny_engines import SGD, float64, tiny
from torch import Tensor, nn

from echelon import models, rng
from echelon.models.attention_config import MLAConfig
from echelon.models.model_config import ModelConfig
from echelon.models.moe_config import MoEConfig
from echelon.models.vision import cnn
from echelon.moe.experts import ExpertDropout
from echelon.training.engine import Engine

P, EXPERT_P = 0.25, 0.4
ROWS, LENGTH, WIDTH, STEPS = 4, 24, 48, 2
RESIDUAL = "drop blocks.0.drop1 blocks.0.drop2 blocks.1.drop1 blocks.1.drop2"
ATTENTION = "blocks.0.attn.core.dropout blocks.1.attn.core.dropout"
TABLE: Mapping[str, str] = {
    # Behind the embedding, of attention's probabilities, and of what attention and MLP add to the residual stream.
    "gpt": f"{RESIDUAL} {ATTENTION}",
    "llama": f"{RESIDUAL} {ATTENTION}",
    "latent": f"{RESIDUAL} blocks.0.attn.heads.core.dropout blocks.1.attn.heads.core.dropout",
    # Of the hidden units of experts, in MoE layers.
    "mixtral": f"{RESIDUAL} {ATTENTION} blocks.0.mlp.experts.drop blocks.1.mlp.experts.drop",
    "one MoE layer": f"{RESIDUAL} {ATTENTION} blocks.1.mlp.experts.drop",
    # The noise of gates.
    "switch": f"{RESIDUAL} {ATTENTION} blocks.0.mlp.gate.noise blocks.1.mlp.gate.noise",
    "gshard": f"{RESIDUAL} {ATTENTION} blocks.0.mlp.gate.random blocks.1.mlp.gate.random",
    "noisy-top-k": f"{RESIDUAL} {ATTENTION} blocks.0.mlp.gate.noise blocks.1.mlp.gate.noise",
    "hierarchical": f"{RESIDUAL} {ATTENTION} blocks.0.mlp.gate.noise blocks.1.mlp.gate.noise",
    "no dropout": "",
    "conv": "drop",
    "alexnet": "head.3 head.6",
    "custom": "net.1 net.3",
}


def _transformer(family: str = "llama", **changes: object) -> ModelConfig:
    return tiny(family, **{"width": WIDTH, "dropout": P, **changes})


def _moe(gate: str, **changes: Any) -> MoEConfig:
    # Every token goes to both experts: the order of assignments does not depend on the weights.
    return MoEConfig(**{"experts": 2, "k": 2, "ffn": 32, "gate": gate, **changes})


MLA = MLAConfig(kv_rank=8, rope_dim=4, nope_dim=4, value_dim=4)
CONFIGS: Mapping[str, Callable[[], ModelConfig]] = {
    "gpt": lambda: _transformer("gpt"),
    "llama": _transformer,
    "latent": lambda: _transformer(kv_heads=4, mla=MLA),
    "mixtral": lambda: _transformer(moe=_moe("mixtral", dropout=EXPERT_P)),
    "one MoE layer": lambda: _transformer(moe=_moe("mixtral", dropout=EXPERT_P, dense_layers=1)),
    "switch": lambda: _transformer(moe=_moe("switch", k=1)),
    "gshard": lambda: _transformer(moe=_moe("gshard", options=(("order", "tokens"),))),
    "noisy-top-k": lambda: _transformer(moe=_moe("noisy-top-k", experts=16)),
    "hierarchical": lambda: _transformer(moe=_moe("hierarchical", experts=16)),
    "no dropout": lambda: _transformer(dropout=0.0),
    "conv": lambda: ModelConfig(name="c", family="conv", layers=2, width=4, vocab=5, max_seq_len=8, dropout=P),
}


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 512), nn.Dropout(P), nn.Linear(512, 512), nn.Dropout(P), nn.Linear(512, 1)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return self.net(x).square().sum(), len(x)


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "custom":
        return Custom().double()
    if name == "alexnet":
        return cnn.alexnet(5, 64, 0.05, P).double()
    return models.build(CONFIGS[name](), dtype=torch.float64)


def batch(name: str, step: int) -> dict[str, Tensor]:
    """The same inputs in each row and step: only the masks differ."""
    source = torch.Generator().manual_seed(9)
    if name == "custom":
        return {"x": torch.randn(1, 8, dtype=torch.float64, generator=source).expand(ROWS, -1)}
    if name in ("conv", "alexnet"):
        images = torch.randn(1, 3, *[8 if name == "conv" else 64] * 2, dtype=torch.float64, generator=source)
        return {"images": images.expand(ROWS, -1, -1, -1), "labels": torch.zeros(ROWS, dtype=torch.int64)}
    ids = torch.randint(257, (1, LENGTH), generator=source).expand(ROWS, -1)
    return {"tokens": ids, "targets": ids}


@dataclass(frozen=True)
class Stream:
    """The random choices of one site for one row of one step."""

    site: str
    step: int
    row: int
    choice: Tensor
    """[...]: standardised, 0 where it cannot be seen"""
    seen: Tensor
    """[...] bool"""


class Watcher:
    """Records what the sites of an engine's model do, from their inputs and outputs."""

    def __init__(self, engine: Engine) -> None:
        self.streams: list[Stream] = []
        self.step, self._rows = 0, {}
        for name, module in engine.model.named_modules():
            if isinstance(module, ExpertDropout):
                module.keep_factors = self._watch_experts(name, module)
            elif isinstance(module, rng.Dropout):
                module.register_forward_hook(self._watch_dropout(name))
            elif isinstance(module, rng.RandomDraws):
                module.register_forward_hook(self._watch_draws(name))

    def _watch_dropout(self, name: str) -> Callable[..., None]:
        def watch(module: rng.Dropout, args: Any, out: Tensor) -> None:
            x, out = args[0].detach(), out.detach()
            if out is not args[0] and not torch.equal(out, x):
                kept = out != 0
                assert torch.allclose(out[kept], x[kept] / (1 - P), rtol=1e-12, atol=0)
                self._add(name, kept, x != 0, P)

        return watch

    def _watch_draws(self, name: str) -> Callable[..., None]:
        def watch(module: rng.RandomDraws, args: Any, out: Tensor) -> None:
            high = out.detach() > (0.5 if args[1] is rng.uniform else 0.0)
            self._add(name, high, torch.ones_like(high), 0.5)

        return watch

    def _watch_experts(self, name: str, module: ExpertDropout) -> Callable[..., Tensor]:
        draw = module.keep_factors

        def watch(keys: Tensor, first_unit: int, like: Tensor) -> Tensor:
            factors = draw(keys, first_unit, like)
            kept = factors != 0
            assert torch.equal(factors[kept], torch.full_like(factors[kept], 1 / (1 - EXPERT_P)))
            # Assignments are sorted by expert, then by row and token.
            by_row = kept.unflatten(0, (2, -1, LENGTH)).transpose(0, 1)
            self._add(name, by_row, torch.ones_like(by_row), EXPERT_P)
            return factors

        return watch

    def _add(self, site: str, kept: Tensor, seen: Tensor, p: float) -> None:
        choice = (kept.double() - (1 - p)) / (p * (1 - p)) ** 0.5 * seen
        for one, where in zip(choice, seen, strict=True):
            row = self._rows.get((site, self.step), 0)
            self._rows[site, self.step] = row + 1
            self.streams.append(Stream(site, self.step, row, one, where))


def watched(name: str, seed: int = 0) -> tuple[Engine, Watcher]:
    """Two steps of two microbatches of two rows."""
    engine = Engine(build(name), "accumulate=2", SGD, options=float64(seed=seed))
    engine.model.train()
    watcher = Watcher(engine)
    for step in range(STEPS):
        watcher.step = step
        engine.step(batch(name, step))
    return engine, watcher


@pytest.mark.parametrize("name", TABLE)
def test_a_model_draws_at_the_sites_of_the_table(name: str) -> None:
    engine, watcher = watched(name)
    drawn = [(stream.site, stream.step, stream.row) for stream in watcher.streams]
    sites = TABLE[name].split()
    assert sorted(drawn) == sorted((s, step, row) for s in sites for step in range(STEPS) for row in range(ROWS))
    # In evaluation nothing is random.
    watcher.streams.clear()
    losses = {engine.evaluate(engine.microbatches(batch(name, 0), step)) for step in range(2)}
    assert watcher.streams == []
    assert len(losses) == 1


def _rate(stream: Stream) -> float:
    return float(stream.choice.sum() / stream.seen.sum().sqrt())


def _unevenness(streams: list[Stream]) -> Iterator[float]:
    """For each dim of a site's choices, how far chi-square of the rates along it is from its mean, in deviations."""
    choice, seen = (torch.stack(x) for x in ([s.choice for s in streams], [s.seen for s in streams]))
    for dim in range(choice.dim()):
        others = [d for d in range(choice.dim()) if d != dim]
        count = seen.sum(others)
        z = (choice.sum(others) / count.clamp(min=1).sqrt())[count > 0]
        if len(z) > 3:
            yield float((z.square().sum() - len(z)) / (2 * len(z)) ** 0.5)


def strongest_correlation(streams: list[Stream]) -> tuple[float, str]:
    """Of any two streams at any shift, in standard deviations; of a stream with itself at any shift but 0.

    Linear cross-correlations by FFT, of what both show at a shift.
    """
    size = 2 * max(stream.choice.numel() for stream in streams)
    values = torch.zeros(2, len(streams), size, dtype=torch.float64)
    for number, stream in enumerate(streams):
        values[0, number, : stream.choice.numel()] = stream.choice.flatten()
        values[1, number, : stream.seen.numel()] = stream.seen.flatten()
    spectra = torch.fft.rfft(values)
    worst = (0.0, "")
    for number, stream in enumerate(streams):
        sums, counts = torch.fft.irfft(spectra[:, number : number + 1].conj() * spectra[:, number:], n=size)
        deviations = torch.where(counts > 100, sums / counts.clamp(min=1).sqrt(), 0).abs()
        deviations[0, 0] = 0
        value, at = deviations.max().item(), int(deviations.max(1).values.argmax())
        other = streams[number + at]
        names = [f"{s.site} of row {s.row} in step {s.step}" for s in (stream, other)]
        worst = max(worst, (value, " and ".join(names)))
    return worst


STATISTICS = ("gpt", "latent", "mixtral", "switch", "gshard", "noisy-top-k", "hierarchical", "custom")


@pytest.mark.parametrize("name", STATISTICS)
def test_every_site_has_its_rate_everywhere_and_a_stream_of_its_own(name: str) -> None:
    """No two sites, layers, steps, rows or positions draw the same numbers, shifted or not."""
    _, watcher = watched(name)
    value, names = strongest_correlation(watcher.streams)
    assert 3 < value < 7, names  # the largest of a million normal numbers is about 5
    for site in TABLE[name].split():
        streams = [stream for stream in watcher.streams if stream.site == site]
        assert max(abs(_rate(stream)) for stream in streams) < 5, site
        assert max(map(abs, _unevenness(streams))) < 6, site


def test_seeds_share_no_stream() -> None:
    streams = [*chain.from_iterable(watched("gpt", seed)[1].streams for seed in (0, 1))]
    value, names = strongest_correlation(streams)
    assert value < 7, names


def constant_draws(like: Tensor, draw: Callable[..., Tensor]) -> Tensor:
    """The mean of the numbers that a gate would draw."""
    return torch.full_like(like, 0.5 if draw is rng.uniform else 0.0)


@pytest.mark.parametrize("name", [name for name in TABLE if TABLE[name]])
def test_every_site_changes_the_loss_by_itself(name: str) -> None:
    """A mask that is drawn and not used would pass all of the above."""

    def loss(site: str) -> float:
        engine = Engine(build(name), "", SGD, options=float64())
        for key, module in engine.model.named_modules():
            if isinstance(module, rng.Dropout | ExpertDropout):
                module.p = module.p if key == site else 0.0
            elif isinstance(module, rng.RandomDraws) and key != site:
                module.forward = constant_draws
        engine.model.train()
        return engine.step(batch(name, 0)).loss

    losses = [loss(site) for site in ("", *TABLE[name].split())]
    assert len({round(value, 12) for value in losses}) == len(losses)
