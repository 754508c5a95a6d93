"""What texts of published tables mean: links, programs, precisions."""

from __future__ import annotations

import pytest

from echelon.planning.calibrate.published_runs import parse_run

COLUMNS = "source_id hidden layers heads seq_len gpu gpus tp pp global_batch micro_batch step_time_s"
ROW = dict.fromkeys(COLUMNS.split(), "1") | {"source_id": "some", "hidden": "4096", "layers": "32", "heads": "32"}
ROW |= {"seq_len": "4096", "gpu": "h100", "gpus": "16", "global_batch": "64"}


@pytest.mark.parametrize(
    ("text", "gb_per_s"),
    [
        ("400 Gb/s per GPU", 50),
        ("400Gb/s per device", 50),
        ("50 GB/s per GPU", 50),
        ("3200 Gb/s", 50),
        ("8x400 Gb/s", 50),
        ("8 x 400 Gbps", 50),
        ("100 GB/s", 12.5),
        ("4 Omni-Path links per node", 6.25),
    ],
)
def test_a_link_is_of_a_device_or_of_a_node(text: str, gb_per_s: float) -> None:
    """400 Gb/s of each device were read as those of a node of eight: an eighth."""
    assert parse_run({**ROW, "inter_node_bw": text}).scenario.cluster.inter_node.bandwidth == gb_per_s * 1e9


@pytest.mark.parametrize(
    ("text", "precision"), [("bf16+float8 rowwise", "bf16"), ("FP8-MX", "fp8"), ("NVFP4", "fp4"), ("amp_bf16", "bf16")]
)
def test_precisions_as_sources_write_them(text: str, precision: str) -> None:
    assert parse_run({**ROW, "precision": text}).scenario.precision == precision


def test_a_device_with_another_power_limit() -> None:
    assert parse_run({**ROW, "gpu": "h100-500w"}).scenario.cluster.device.watts == 500
