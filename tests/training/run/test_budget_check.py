"""A memory budget that cannot hold the least is refused before any rank starts, with the smallest that can."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from echelon import models
from echelon.cli import app
from echelon.config.run_config import Config
from echelon.layout import ValidationError
from echelon.models import user_model
from echelon.parallel.parallel_options import ParallelOptions
from echelon.training import start_training
from echelon.training.elastic import supervisor
from echelon.training.engine import Engine
from echelon.training.run.budget_check import run_budget_issues
from echelon.verification.verify_request import VerifyRequest

CUSTOM = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(96, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="sum")
        return loss, torch.tensor(targets.numel())

def batch(rows, step):
    tokens = torch.arange(rows * 13).view(rows, 13) % 50
    return {"tokens": tokens, "targets": tokens}
"""


def config_of(model: str, budget: str, *settings: str, layout: str = "dp=1") -> Config:
    text = f"layout={layout},recompute=budget:{budget}GiB"
    length = [] if ":" in model else ["seq_len=24"]
    return Config.load(None, [f"model={model}", "batch=4", text, "device=cpu", *length, *settings])


def named_minimum(config: Config, ranks: int = 1) -> float:
    """The smallest legal budget that the issue names, in GiB."""
    (issue,) = run_budget_issues(config, ranks)
    assert issue.key == "layout"
    assert "too small to recompute every layer" in issue.message
    return float(re.match(r"budget:([\d.]+)GiB or more", issue.legal).group(1))  # type: ignore[union-attr]


@pytest.mark.parametrize("model", ["llama-tiny", "gpt-tiny", "moe-tiny", "custom"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_named_budget_is_the_one_that_a_run_measures(tmp_path: Path, model: str, dtype: str) -> None:
    (tmp_path / "net.py").write_text(CUSTOM)
    spec = f"{tmp_path}/net.py:Net" if model == "custom" else model
    config = config_of(spec, "0.0000001", f"dtype={dtype}")
    minimum, element = named_minimum(config), getattr(torch, dtype)
    if model == "custom":
        module, batch = user_model.load_factory(spec)(), user_model.load_factory(f"{tmp_path}/net.py:batch")(4, 0)
    else:
        module = models.build(config.override_model(models.find_model(model), seq_len=24), "meta")
        batch = {name: torch.zeros(4, 24, dtype=torch.int64) for name in ("tokens", "targets")}
    options = ParallelOptions(compute_dtype=element, master_dtype=element)
    with pytest.raises(ValueError, match="too small to recompute every layer") as refused:
        Engine(module, config.layout, options=options).step(batch)
    measured = float(re.search(r"\(([\d.e-]+) GiB", str(refused.value)).group(1))  # type: ignore[union-attr]
    assert minimum == pytest.approx(measured, rel=0.02)
    assert run_budget_issues(config_of(spec, f"{minimum:.9f}", f"dtype={dtype}"), 1) == []


def test_training_refuses_it_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(supervisor, "supervise", started)
    for layout, ranks in (("dp=2", 2), ("tp=2,microbatch=2", 2), ("pp=2,accumulate=4", 2)):
        config = config_of("llama-tiny", "0.00001", layout=layout)
        with pytest.raises(ValidationError, match="too small to recompute every layer"):
            start_training.run_training(config, procs=ranks)
        minimum = named_minimum(config, ranks)
        with pytest.raises(AssertionError, match="ranks were started"):
            start_training.run_training(config_of("llama-tiny", f"{minimum:.9f}", layout=layout), procs=ranks)


def test_verification_refuses_it() -> None:
    """By the sizes of the model that is trained, not of the reduced one."""
    settings = ("model=llama-8b", "layout=dp=2,recompute=budget:0.01GiB", "batch=2", "seq_len=4096", "device=cpu")
    with pytest.raises(ValidationError, match=r"too small to recompute every layer \(\d"):
        VerifyRequest(settings=settings).resolve()


def test_plans_refuse_it() -> None:
    def priced(budget: str) -> str:
        layout = f"dp=8,zero=3,microbatch=1,accumulate=8,recompute=budget:{budget}"
        arguments = ["plan", "llama-8b", "--cluster", "8xh100", "--batch", "64", "--seq-len", "4096"]
        return CliRunner().invoke(app, [*arguments, "--layout", layout]).output

    answer = " ".join(priced("0.01GiB").split())
    assert "too small to recompute every layer" in answer
    minimum = re.search(r"budget:[\d.]+GiB or more", answer)
    assert minimum is not None
    assert "too small" not in priced(minimum[0].removeprefix("budget:").removesuffix(" or more"))
