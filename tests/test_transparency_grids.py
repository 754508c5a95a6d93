"""Grids of tensor parallelism equal one device: alone and with the rest, and with sizes that no side divides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.models import model_config
from echelon.models.model_config import ModelConfig
from echelon.verification.verifier import LayoutVerdict, Verifier, verify
from echelon.verification.verify_case import VerifyCase

SQUARE, LAYERS, CUBE = "tp=4,tp_kind=2d", "tp=8,tp_kind=2.5d,depth=2", "tp=8,tp_kind=3d"
GPT, LLAMA = model_config.find_model("gpt-tiny"), model_config.find_model("llama-tiny")
ODD = {"layers": 2, "heads": 2, "kv_heads": 1, "ffn": 45, "max_seq_len": 64, "dropout": 0.1}
ODD_GPT = replace(GPT, **ODD, width=30)
"""15 columns a side, which a cube divides once more; key-value heads fewer than the side; 45 and 257 of nothing"""
ODD_LLAMA = replace(LLAMA, **ODD, width=28, tied=True)


def judge(pool: RankPool, model: ModelConfig, layout: str, leave_out: str = "", **case: object) -> LayoutVerdict:
    prover = Verifier(pool, VerifyCase(model=model, **{"steps": 3, **case}), leave_out)  # type: ignore[arg-type]
    return prover.verify_layout(Layout.parse(layout))


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (f"{SQUARE},microbatch=3", ODD_GPT),
        (f"{SQUARE},microbatch=5,recompute=ops", ODD_LLAMA),
        (f"{LAYERS},microbatch=5,recompute=full", ODD_GPT),
        (f"{CUBE},microbatch=6,recompute=full", ODD_GPT),
        (f"{CUBE},microbatch=5", ODD_LLAMA),
        (f"dp=2,{SQUARE},zero=3,accumulate=2,recompute=full", replace(ODD_LLAMA, layers=1)),
        (f"dp=2,{SQUARE},zero=0,microbatch=3", replace(ODD_GPT, layers=1)),
        (f"pp=2,{SQUARE},microbatch=3,accumulate=2", ODD_GPT),
        (f"pp=2,{SQUARE},accumulate=2,schedule=zb-h1,recompute=full", ODD_LLAMA),
    ],
    ids=lambda value: value.name if isinstance(value, ModelConfig) else str(value),
)
def test_sizes_that_do_not_divide_are_padded(pool: RankPool, layout: str, model: ModelConfig) -> None:
    """Sequences, widths, feed-forward parts, vocabulary; packed documents, so that sequences see different things."""
    verdict = judge(pool, model, layout, packed=True)
    assert verdict.passed, f"{verdict.first_difference} {verdict.trouble}"


# -- a model of the user's own ----------------------------------------------------------------------------------------


class Gate(nn.Module):
    """What it makes of padding is not zero."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.sigmoid(self.up(x)))
        return out


class Head(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, width) * 0.1)

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x, self.weight).flatten(0, -2)
        return F.cross_entropy(logits, targets.flatten(), reduction="sum"), torch.tensor(targets.numel())


class Own(nn.Module):
    """Not even the columns of the stream divide: 7 over two ranks."""

    split = {  # noqa: RUF012
        "words": "vocabulary",
        "first": "sequence",
        "gate": "region",
        "gate.up": "column",
        "gate.down": "row",
        "second": "sequence",
        "third": "sequence",
        "head": "head",
    }

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first, self.gate = nn.Embedding(11, 7), nn.LayerNorm(7), Gate(7, 9)
        self.second, self.third, self.head = nn.RMSNorm(7), nn.LayerNorm(7, bias=False), Head(7, 11)

    def forward(self, words: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(words)
        x = self.second(x + self.gate(self.first(x)))
        total, count = self.head(self.third(x), targets)
        return total, count


def own() -> nn.Module:
    return Own()


def own_batch(rows: int, seed: int) -> dict[str, Tensor]:
    words = torch.randint(0, 11, (rows, 5), generator=torch.Generator().manual_seed(seed))
    return {"words": words, "targets": (words * 3 + 1) % 11}


def test_a_custom_model_uses_tensor_parallelism(pool: RankPool) -> None:
    report = verify(own, f"{SQUARE}; {LAYERS}; {CUBE}", batch=own_batch, pool=pool, steps=3)
    assert report.passed, report


# -- what is left out is missed ---------------------------------------------------------------------------------------

SMALL = {"layers": 1, "width": 16, "ffn": 24, "kv_heads": 1}
LEFT_OUT = [
    *((SQUARE, f"{axis}:{kind}", LLAMA) for axis in "xy" for kind in ("broadcast", "reduce")),
    (SQUARE, "x:all_reduce", LLAMA),  # of norms
    (SQUARE, "x:all_gather", GPT),  # of norms, and of the loss
    (SQUARE, "z*y:all_reduce", LLAMA),  # parts of gradients
    (SQUARE, "x/2:all_reduce", LLAMA),  # of copied heads
    (SQUARE, "dp*z*y:all_reduce", LLAMA),  # of the loss
    (LAYERS, "z:all_reduce", LLAMA),  # of copied weights
    *((CUBE, f"{axis}:{kind}", GPT) for axis in "xyz" for kind in ("all_gather", "reduce_scatter")),
    (CUBE, "z*x:all_reduce", GPT),  # of biases inside a region
    (CUBE, "y/2:all_reduce", LLAMA),
    (CUBE, "dp*z*x:all_reduce", LLAMA),
]


@pytest.mark.parametrize(
    ("layout", "leave_out", "model"),
    LEFT_OUT,
    ids=lambda value: value.name if isinstance(value, ModelConfig) else str(value),
)
def test_verify_detects_a_dropped_collective(pool: RankPool, layout: str, leave_out: str, model: ModelConfig) -> None:
    verdict = judge(pool, replace(model, **SMALL), f"{layout},microbatch=4", leave_out, steps=1, seq_len=5)
    assert not verdict.passed
    assert not verdict.trouble
    assert verdict.axis == "tp"
