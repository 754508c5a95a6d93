from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from echelon.bench.bench_rows import add_peer_ratios, make_row
from echelon.bench.measurement import Measurement
from echelon.bench.tables.step_table import remarks, step_table
from echelon.training.logging.metrics import PeakFlops

PEAK = PeakFlops(flops=989.5e12, source="dense bf16 peak of H200")
OURS = Measurement(who="echelon", shape="1b", size="llama-1b", seq_len=4096, batch=8, precision="bf16")
CONTRACT = {"shape", "seq", "batch", "precision", "step_s", "tokens_per_s", "mfu", "hfu", "peak_bytes", "peer", "ratio"}


def found(step_s: float) -> dict:
    versions = {"version": "echelon 0.1.0", "torch": "2.11.0"}
    return {"step_s": step_s, "first_step_s": 9.0, "peak_bytes": 74 << 30, **versions}


def rows(*pairs):
    return add_peer_ratios([make_row(request, one, PEAK.flops) for request, one in pairs])


def test_mfu_matches_the_reference_formula():
    (row,) = rows((OURS, found(0.465)))  # which another program called 58.6 %
    assert row.mfu == pytest.approx(0.586, abs=0.001)
    assert row.hfu == row.mfu
    assert row.to_json().keys() >= CONTRACT | {"who", "first_step_s", "failed"}


def test_recomputation_counts_for_hfu_only():
    plain, again = rows((OURS, found(0.5)), (replace(OURS, recompute="full"), found(0.5)))
    assert again.mfu == plain.mfu
    assert 1.2 < again.hfu / again.mfu < 4 / 3


def test_the_best_peer_of_the_same_shape_and_precision_counts():
    peers = {name: replace(OURS, who=name) for name in ("torchtitan", "transformers")}
    made = rows(
        (OURS, found(0.5)),
        (peers["torchtitan"], found(0.55)),
        (peers["transformers"], found(0.7)),
        (replace(OURS, precision="fp8-row"), found(0.4)),
        (replace(peers["torchtitan"], precision="fp8"), found(0.44)),
        (replace(OURS, shape="3b"), found(0.5)),
    )
    assert [(row.peer, row.ratio and round(row.ratio, 9)) for row in made] == [
        ("torchtitan", 1.1),
        (None, None),
        (None, None),
        ("torchtitan", 1.1),
        (None, None),
        (None, None),
    ]


def test_ratios_are_by_token():
    ours, _ = rows((OURS, found(0.5)), (replace(OURS, who="torchtitan", batch=4), found(0.3)))
    assert ours.ratio == pytest.approx(0.6 / 0.5)


def test_a_failure_is_a_row_with_its_reason():
    made = rows((OURS, found(0.5)), (replace(OURS, who="torchtitan"), {"failed": "out of memory"}))
    assert (made[0].peer, made[0].ratio) == (None, None)
    assert (made[1].step_s, made[1].mfu, made[1].failed) == (None, None, "out of memory")
    assert "failed: 1b, bf16, torchtitan: out of memory" in remarks(made, {}, PEAK)


def test_the_table_fits_a_plain_terminal():
    made = rows(
        (OURS, found(0.5)),
        (replace(OURS, who="torchtitan", recompute="full"), found(0.55)),
        (replace(OURS, who="transformers"), {"failed": "out of memory"}),
    )
    printed = io.StringIO()
    Console(width=80, file=printed).print(step_table(made, width=80))
    lines = printed.getvalue().splitlines()
    words = [" ".join(line.split()) for line in lines]
    assert words[0] == "shape tokens type who step tokens/s MFU HFU GiB first ratio"
    assert words[1] == "1b 4096x8 bf16 echelon 500.0 ms 65,536 54.4% 54.4% 74.0 9.0 s 1.10"
    assert "torchtitan *" in lines[2]
    assert "failed" in lines[3]
    assert not any("…" in line for line in lines)
    said = remarks(made, {"8b": "needs 120 GiB"}, PEAK)
    assert "*: torchtitan with recompute=full" in said
    assert "left out: 8b, needs 120 GiB" in said
    assert said[-1] == "echelon 0.1.0, torch 2.11.0"
