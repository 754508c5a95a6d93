"""A model is tried link by link before a run, and cut by what that found."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import echelon as ec
from echelon import models
from echelon.config.run_config import Config
from echelon.launch.rank_failure import RankError
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout, Mesh
from echelon.pipeline.execution.layer_timing import (
    broadcast_profile,
    measure_bandwidths,
    measure_profile,
    measure_split,
)
from echelon.pipeline.layer_profile import LayerProfile, PipelineProfile
from echelon.training.loop import train_on_rank

CPU = torch.device("cpu")


class Uneven(nn.Module):
    """Four layers of one size, of which the first sleeps."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        pair = None
        for link in self.pipeline_model().layers:
            pair = link.run(pair, None, x=x)
        return pair

    def pipeline_model(self):
        return ec.PipelineModel(
            layers=tuple(ec.PipelineLayer(f"layers.{i}", (f"layers.{i}",), self._run(i)) for i in range(4))
        )

    def _run(self, index):
        def run(carried, _shared, x):
            time.sleep(0.2 if index == 0 else 0.0)
            out = self.layers[index](x if carried is None else carried)
            return (out.sum(), len(out)) if index == 3 else out

        return run


def profile():
    return measure_profile(Uneven(), {"x": torch.ones(2, 4)}, device=CPU, dtype=torch.float32, repeats=4)


def test_every_layer_is_timed_and_the_slow_one_is_found():
    found = profile()
    assert found.names == tuple(f"layers.{i}" for i in range(4))
    assert found.source == "measured"
    assert found.links[0].forward_s >= 0.2 > max(link.seconds for link in found.links[1:])
    assert {link.activation_bytes for link in found.links[:3]} == {2 * 4 * 4}
    assert {link.parameter_bytes for link in found.links} == {4 * (4 * 4 + 4)}


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_a_meta_model_is_timed_with_one_layer_in_memory(name):
    model = models.build(models.find_model(name), "meta")
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    found = measure_profile(model, {"tokens": tokens, "targets": tokens}, device=CPU, dtype=torch.float32, repeats=1)
    assert len(found.links) == models.find_model(name).layers + 2
    assert all(link.seconds > 0 for link in found.links)
    assert all(parameter.is_meta for parameter in model.parameters())


def split_of_uneven():
    found = broadcast_profile(profile)
    split = measure_split(found, Mesh(Layout.parse("pp=2")), CPU)
    return split.blocks_per_stage, found.to_json()


def test_all_ranks_split_alike_and_the_slow_layer_is_alone(pool: RankPool):
    first, second = pool.run(split_of_uneven, 2)
    assert first == second
    assert first[0] == (1, 3)


def wires():
    return measure_bandwidths((0, 1, 1, 0), (0, 1), 1000, CPU)


def test_bandwidth_is_measured_between_ranks_only(pool: RankPool):
    first, second = pool.run(wires, 2)
    assert first == second
    assert first[1] == 1.0
    assert min(first[0], first[2]) > 1000


def trained(profile, run):
    settings = ["layout=pp=2,accumulate=2", "batch=2", "seq_len=16", "steps=2", "eval.every=0", "sample.tokens=0"]
    return train_on_rank(Config.load(None, [*settings, f"pipeline.profile={profile}", f"run={run}"]), quiet=True).loss


def test_a_run_can_be_split_by_a_profile_and_writes_it(pool: RankPool, tmp_path):
    measured = pool.run(trained, 2, "measure", str(tmp_path / "one"))[0]
    left = tmp_path / "one" / "profile.json"
    assert PipelineProfile.from_json(left.read_text()).source == "measured"
    given = pool.run(trained, 2, str(left), str(tmp_path / "two"))[0]
    assert measured == pytest.approx(given, rel=1e-5)


def test_an_unusable_profile_is_rejected_before_the_run_starts(tmp_path):
    file = tmp_path / "profile.json"
    file.write_text("{}")
    with pytest.raises(ec.ValidationError, match="cannot be read"):
        Config.load(None, ["layout=pp=2,accumulate=2", f"pipeline.profile={file}"])
    with pytest.raises(ec.ValidationError, match="no effect"):
        Config.load(None, ["pipeline.profile=measure"])
    with pytest.raises(ec.ValidationError, match=r"incompatible with pipeline\.layers"):
        Config.load(None, ["layout=pp=2,accumulate=2", "pipeline.profile=measure", "pipeline.layers=[2, 2]"])


def test_a_profile_of_another_model_is_rejected(pool: RankPool, tmp_path):
    file = tmp_path / "profile.json"
    numbers = {"forward_s": 1, "input_s": 1, "weight_s": 1, "activation_bytes": 4, "parameter_bytes": 4}
    for names in (["a", "b"], ["first", *(f"layers.{i}" for i in range(4)), "last"]):
        links = tuple(LayerProfile(name=name, **numbers) for name in names)
        file.write_text(PipelineProfile(links=links, source="predicted").to_json())
        with pytest.raises(RankError, match=rf"another model \(layers {names[0]}, .*, {len(names)} in all; this one"):
            pool.run(trained, 2, str(file), str(tmp_path / "run"))
