"""The replay check names the rank, layer and pass of a wrong result, and reports nothing without one."""

from __future__ import annotations

import os
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_runs import small

from echelon.checkpoint.load import open_index
from echelon.checkpoint.storage import LocalStorage
from echelon.config.run_config import Config
from echelon.config.sections import ReplayConfig
from echelon.faults import injection_spec
from echelon.launch.rank_failure import RankError
from echelon.layout import Layout, ValidationError
from echelon.training.guard import deterministic as replay_kernels
from echelon.training.guard import replay_check
from echelon.training.guard.deterministic import deterministic_kernels, set_cublas_workspace
from echelon.training.guard.replay_check import ReplayCheck
from echelon.training.guard.step_checksums import bit_checksum, first_difference
from echelon.training.loop import train_on_rank
from echelon.training.run.run_dir import Run

STEPS = 4


def config(folder: Path, layout: str, name: str = "run", **changes: object) -> Config:
    usual = {"steps": STEPS, "checkpoint.every": STEPS, "schedule.warmup": 2, "dropout": 0.1, "replay.every": 2}
    return small(folder, layout, name=name, **{**usual, **changes})


def train(config: Config, inject: tuple[str, ...] = ()) -> str:
    return train_on_rank(config, True, injection_spec.parse_injections(inject)).run


def found(run: str | Path) -> list[dict[str, object]]:
    return list(Run.open(run).records("corruption"))


def state(run: str | Path) -> str:
    return open_index(LocalStorage(Path(run) / "checkpoints"), STEPS).hash


CASES = {
    "dp=2": ("blocks.1.mlp", "blocks.1.mlp"),
    "dp=2,zero=3": ("blocks.0.attn.q.weight", "blocks.0.attn.q.weight"),
    "tp=2": ("blocks.2.attn", "blocks.2.attn"),
    "tp=2,sp=0": ("blocks.1.mlp.down.weight", "blocks.1.mlp.down.weight"),
    "pp=2,accumulate=2": ("blocks.3", "blocks.3"),
}
"""what is wrong on the last rank, and where the check says that it began"""


@pytest.mark.parametrize("layout", CASES)
def test_the_corrupt_rank_is_named_and_the_run_is_bit_equal(pool, tmp_path, layout):
    where, layer = CASES[layout]
    world = Layout.parse(layout).world
    struck = pool.run(train, world, config(tmp_path, layout, "struck"), (f"flip:rank=1,step=2,layer={where}",))[0]
    plain = config(tmp_path, layout, "plain", **{"replay.every": 0})
    assert state(struck) == state(pool.run(train, world, plain)[0])
    (one,) = found(struck)
    (began,) = one["began"]
    assert (one["step"], began["rank"], began["layer"], began["own"], began["wrong"]) == (2, 1, layer, True, 1)
    assert began["at"] == f"{layout[:2]} 1"


@pytest.mark.parametrize("layout", ["pp=2,schedule=zb-v,accumulate=2", "tp=2", "dp=2,zero=2,accumulate=2", "cp=2"])
def test_corruption_on_rank_0_is_named(pool, tmp_path, layout):
    """Of a pipeline, whose second stage goes wrong from the first action on. Also where a pass would do less than the
    first: it finds parameters gathered, and sends no shapes."""
    asked = config(tmp_path, layout, **{"replay.every": 1})
    struck = pool.run(train, 2, asked, ("flip:rank=0,step=2,layer=blocks.0",))[0]
    (one,) = found(struck)
    assert [(began["rank"], began["layer"]) for began in one["began"]] == [(0, "blocks.0")]
    assert one["ranks"] == 2


def test_action_stop_ends_the_run_before_the_update(pool, tmp_path):
    asked = config(tmp_path, "dp=2", **{"replay.action": "stop", "checkpoint.every": 1})
    with pytest.raises(
        RankError, match=r"step 4, computed again .* rank 1 \(dp 1\) of .* first in the output of blocks\.1;"
    ):
        pool.run(train, 2, asked, ("flip:rank=1,step=4,layer=blocks.1",))
    assert max(LocalStorage(tmp_path / "run" / "checkpoints").steps()) == 3
    assert [one["action"] for one in found(tmp_path / "run")] == ["stop"]


def test_an_unchecked_corruption_changes_the_run(pool, tmp_path):
    """The fault is a real one: without the check, the run ends somewhere else."""
    struck = train(config(tmp_path, "dp=1", "struck"), ("flip:rank=0,step=3,layer=blocks.1",))
    assert not found(struck)
    assert state(struck) != state(train(config(tmp_path, "dp=1", "plain")))


@pytest.mark.parametrize("model", ["moe-tiny", "gpt-tiny"])
def test_the_second_pass_leaves_no_trace(tmp_path, model):
    """Experts are counted once, and dropout is the same."""
    twice = train(config(tmp_path, "recompute=full", "twice", **{"model": model, "replay.every": 1}))
    once = train(config(tmp_path, "recompute=full", "once", **{"model": model, "replay.every": 0}))
    assert not found(twice)
    assert state(twice) == state(once)
    loads = [[record["layers"] for record in Run.open(run).records("experts")] for run in (once, twice)]
    assert loads[0] == loads[1]


OWN = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)

    def forward(self, x, y):
        hidden = self.norm(self.one(x))
        found = self.two(hidden * (torch.rand_like(hidden) > 0.3)).squeeze(1)
        return (found - y).square().sum(), torch.tensor(float(len(y)))

def factory():
    return Model()

def batch(rows, step):
    draw = torch.Generator().manual_seed(step)
    return {"x": torch.randn(rows, 6, generator=draw), "y": torch.randn(rows, generator=draw)}
"""


def test_batchnorm_statistics_and_torch_rng_are_restored(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    settings = [f"model={tmp_path}/own.py:factory", "steps=4", "batch=4", "checkpoint.every=4", "device=cpu"]
    hashes = []
    for every in (0, 1):
        asked = Config.load(None, [*settings, f"run={tmp_path}/{every}", f"replay.every={every}"])
        run = train(asked)
        hashes.append(state(run))
        assert not found(run)
    assert hashes[0] == hashes[1]


def test_checksums_and_norms():
    value = torch.tensor([1.5, -2.0, 0.0])
    other = value.clone()
    other[2] = -0.0  # equal numbers, other bits
    assert bit_checksum(value) != bit_checksum(other)
    assert bit_checksum(torch.empty(0)) == 0
    one, two = torch.tensor([5, 6, 7]), torch.tensor([5, 8, 9])
    assert first_difference(one, two, 0.0) == 1
    assert first_difference(one, one, 0.0) == -1
    assert first_difference(one, one[:2], 0.0) == 1  # a pass that did less
    norms, near = torch.tensor([1.0, 2.0, float("nan")]), torch.tensor([1.0005, 2.5, 1.0])
    assert first_difference(norms, near, 1e-3) == 1
    assert first_difference(norms[[0, 2]], near[[0, 2]], 1e-3) == 1
    assert first_difference(norms[[0, 2]], norms[[0, 2]], 1e-3) == -1
    # What is made of rounding, beside the rest.
    assert first_difference(torch.tensor([3.0, 2e-10, 5.0]), torch.tensor([3.0, 3e-10, 5.0]), 1e-3) == -1
    assert first_difference(torch.tensor([3.0, 2e-3, 5.0]), torch.tensor([3.0, 3e-3, 5.0]), 1e-3) == 1


def test_the_wrong_pass_of_a_value_that_is_rounding_error():
    """By itself it agrees with nothing; beside the rest of its pass, it does."""
    parallel = SimpleNamespace(options=SimpleNamespace(device=torch.device("cpu")))
    made = ReplayCheck(
        SimpleNamespace(parallel=parallel, forward_backward=None, eager_forward_backward=None),
        ReplayConfig(every=1, tolerance=1e-2),
        lambda *_: None,
    )
    good, again, bad = (torch.tensor([3.0, faint, 5.0], dtype=torch.float64) for faint in (2e-10, 3e-10, 1.0))
    assert made._wrong_pass(1, [bad, good, again]) == 1
    assert made._wrong_pass(1, [good, bad, again]) == 2
    assert made._wrong_pass(1, [good, bad, 2 * bad]) == 0
    assert made._wrong_pass(2, [good, bad, bad[:2]]) == 0


def test_deterministic_kernels_are_enabled_and_restored(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_cublas_workspace()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"  # somebody's own
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic_kernels():
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        with (
            pytest.raises(ValueError, match=r"put_ does not have .*; set replay\.tolerance=1e-2 to compare"),
            deterministic_kernels(),
        ):
            torch.zeros(4).put_(torch.tensor([1]), torch.tensor([2.0]))
        with pytest.raises(RuntimeError, match="something else"), deterministic_kernels():
            raise RuntimeError("something else")
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_every_pass_uses_deterministic_kernels(tmp_path, monkeypatch):
    used, prepared = [], []

    @contextmanager
    def noted():
        used.append(1)
        yield

    monkeypatch.setattr(replay_check, "nullcontext", noted)  # a run on a CPU has these
    monkeypatch.setattr(replay_kernels, "set_cublas_workspace", lambda: prepared.append(1))
    train(config(tmp_path, "dp=1"))
    assert (len(used), len(prepared)) == (STEPS + 1, 1)  # every second step twice, and the first to try them


def test_only_bit_equality_on_a_gpu_needs_deterministic_kernels():
    for device, tolerance, kind in (
        ("cuda", 0.0, deterministic_kernels),
        ("cuda", 1e-2, nullcontext),
        ("cpu", 0.0, nullcontext),
    ):
        parallel = SimpleNamespace(options=SimpleNamespace(device=torch.device(device)))
        made = ReplayCheck(
            SimpleNamespace(parallel=parallel, forward_backward=None, eager_forward_backward=None),
            ReplayConfig(every=1, tolerance=tolerance),
            lambda *_: None,
        )
        assert made._kernels is kind


def test_steps_that_cannot_be_replayed_are_refused(tmp_path):
    with pytest.raises(ValidationError, match="cannot replay a step that updates before its end"):
        config(tmp_path, "pp=2,schedule=2bw,accumulate=2", tied="false")
    with pytest.raises(ValidationError, match="cannot replay a step that updates in backward"):
        config(tmp_path, "", **{"optimizer.in_backward": "true", "clip": 0})
    for offload in ("optimizer", "params"):
        with pytest.raises(ValidationError, match=f"offloads its gradients .offload={offload}"):
            config(tmp_path, f"offload={offload}")
    with pytest.raises(ValidationError, match=r"replay.action=stop has no effect with replay.every=0"):
        config(tmp_path, "", **{"replay.every": 0, "replay.action": "stop"})
