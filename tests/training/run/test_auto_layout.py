"""The machine that `train --plan auto` and a run's own prediction plan for: the one that the ranks will run on."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from echelon.config.run_config import Config
from echelon.launch.world import World
from echelon.layout import ValidationError
from echelon.training.run.auto_layout import plan_request_of, with_planned_layout
from echelon.training.run.prediction import _this_machine


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine with two H200."""
    gpu = SimpleNamespace(name="NVIDIA H200", total_memory=140 << 30)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: gpu)


@pytest.mark.parametrize(
    ("device", "ranks", "generation", "devices"),
    [
        ("auto", None, "hopper", 2),
        ("auto", 2, "hopper", 2),
        ("auto", 4, "cpu", 4),  # more ranks than GPUs: every rank runs on the CPU
        ("cpu", 2, "cpu", 2),
        ("cuda", 4, "hopper", 4),
    ],
)
@pytest.mark.usefixtures("two_gpus")
def test_a_plan_is_for_the_devices_that_the_ranks_get(device, ranks, generation, devices):
    cluster = plan_request_of(Config(device=device), ranks).cluster
    assert (cluster.device.generation, cluster.devices) == (generation, devices)


@pytest.mark.usefixtures("two_gpus")
def test_the_prediction_of_a_cpu_run_is_for_the_cpu():
    world = World(world_size=2, device=torch.device("cpu"))
    assert _this_machine(world, threads=1).device.generation == "cpu"


@pytest.mark.parametrize("program", ["megatron", "torch"])
def test_a_plan_that_is_priced_for_another_program_is_refused(tmp_path, program):
    """It was run, in a layout that is best for that program."""
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"plans": [{"layout": "dp=1", "precision": "bf16", "program": program}]}))
    with pytest.raises(ValidationError, match=f"another program \\({program}\\)"):
        with_planned_layout(Config(), str(plan), None)
    plan.write_text(json.dumps({"plans": [{"layout": "dp=1", "precision": "bf16", "program": "echelon"}]}))
    assert with_planned_layout(Config(), str(plan), None)[0].layout == "dp=1"
