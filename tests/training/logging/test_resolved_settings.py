from __future__ import annotations

import torch
from tiny_engines import batch_of, engine_of, float64, tiny
from torch import nn

from echelon.config.run_config import Config
from echelon.config.sections import OptimizerConfig
from echelon.layout import Layout
from echelon.training.engine import Engine
from echelon.training.logging.metrics import PeakFlops
from echelon.training.logging.resolved_settings import resolved_settings, tp_traffic


def rows_of(engine, seq_len=9):
    config = Config(seq_len=seq_len, batch=engine.layout.batch, timeout=12.5)
    return {
        name: (value, why)
        for name, value, why in resolved_settings(config, engine, PeakFlops(flops=2e12, source="named"), 3)
    }


def rows_on(layout, kv_heads=2):
    return rows_of(engine_of(tiny("llama", kv_heads=kv_heads), layout))


def test_every_setting_has_a_reason(pool):
    rows = pool.run(rows_on, 2, "dp=2,zero=2,microbatch=3,accumulate=2")[0]
    assert rows["layout"][0] == "dp=2,zero=2,microbatch=3,accumulate=2"
    assert rows["batch"] == ("12 sequences x 9 tokens", "dp 2 x microbatch 3 x accumulate 2")
    assert rows["dtypes"][0] == "compute float64, master float64, gradients float64"
    assert rows["time-out"][0] == "12.5 s"
    assert rows["threads"][0] == "3"
    assert rows["peak"] == ("2 TFLOP/s per device", "named")
    assert {"reduction", "parameter groups", "states per rank", "collectives"} <= rows.keys()
    assert all(value and why for value, why in rows.values())
    assert "vocabulary" not in rows, "nothing is padded without tensor parallelism"


def test_memory_budget_and_segments_are_reported():
    engine = engine_of(tiny(layers=4), "recompute=budget:0.0002GiB")
    assert rows_of(engine)["recompute"][1] == "chosen with the first microbatch"
    engine.rehearse_memory_budget(next(engine.microbatches(batch_of(tiny(), 4))))
    value, why = rows_of(engine)["recompute"]
    assert value.startswith("blocks.0")
    assert value.endswith("none")
    assert "of 0.0002 GiB at the peak" in why
    rows = rows_of(engine_of(tiny(layers=4), "recompute=every:3"))
    assert rows["recompute"] == ("segments of 3 layers", "2 inputs are saved of 4 layers on a rank")


def test_padding_and_kv_replicas_of_tp_are_reported(pool):
    rows = pool.run(rows_on, 4, "tp=4", 2)[0]
    assert rows["vocabulary"][0] == "257 padded to 260"
    assert rows["sequence"][0] == "9 padded to 12"
    assert rows["key-value heads"][0] == "2, each on 2 ranks"


def test_tp_grid_shapes_and_padding_are_reported(pool):
    rows = pool.run(rows_on, 4, "tp=4,tp_kind=2d,microbatch=3", 1)[0]
    assert rows["grid"] == (
        "1 x 2 x 2 ranks, 2 sequence(s) and 8 columns on each",
        "activations are sharded; 3 sequence(s) padded to 4",
    )
    assert rows["vocabulary"][0] == "257 padded to 258"
    assert rows["key-value heads"] == ("1, each on 2 ranks", "a side of the grid is a multiple of them")
    assert pool.run(rows_on, 8, "tp=8,tp_kind=3d", 2)[0]["vocabulary"][0] == "257 padded to 260"


def test_a_custom_model_has_no_tokens_and_no_known_traffic():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = {"a dictionary": "of the user's"}
            self.net = nn.Linear(2, 2)

        def forward(self, x):
            return self.net(x).sum(), torch.tensor(len(x))

    engine = Engine(Own(), Layout.parse("dp=1,microbatch=4"), options=float64())
    assert tp_traffic(engine, 9) is None
    assert rows_of(engine)["batch"][0] == "4 sequences"


def test_optimizer_defaults_are_reported():
    def reported(**changes):
        return rows_of(engine_of(tiny("llama"), "dp=1", optimizer=OptimizerConfig(**changes)))

    assert reported()["optimizer"] == ("adamw, betas [0.9, 0.95]", "its default")
    assert reported(name="sgd", momentum=0.9)["optimizer"] == ("sgd, momentum 0.9", "as configured")
    assert "optimizer" not in reported(name="sm3")
    muon = reported(name="muon", ema=0.99, in_backward=True)
    assert muon["optimizer"][0] == "muon, betas [0.9, 0.95], momentum 0.95"
    assert muon["by AdamW"][0] == "7 of 21 parameters on this rank"
    assert muon["EMA"][0] == "of the weights, decay 0.99"
    assert muon["update"][0] == "in backward"
    assert reported(states="int8")["moments"][1].startswith("256 elements share a scale")


def test_offloaded_states_and_transfers_are_reported():
    rows = rows_on("accumulate=2,offload=params+activations+disk")
    assert rows["offload"][0].startswith("5 of 5 parameter groups: ")
    assert "on the host and" in rows["offload"][0]
    assert "of gradients to the host" in rows["transfers"][0]
    assert rows["activations"][0] == "on the host between forward and backward"
    assert "master" not in rows["states per rank"][1]
    assert "offload" not in rows_on("dp=1")
    part = rows_of(Engine(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "offload=optimizer", options=half()))
    assert part["offload"] == (
        "1 of 2 parameter groups: 0 MiB on the host per rank",
        "the last layers, which the next step needs last",
    )


def half():
    return float64(host_share=0.5)
