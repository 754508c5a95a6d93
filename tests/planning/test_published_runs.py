"""What texts of published tables mean: links, programs, precisions."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.planning.calibrate.published_runs import parse_run, read_runs

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


@pytest.mark.parametrize(
    ("cells", "program"),
    [
        ({"gpu": "h100", "tp": "8"}, "megatron"),
        ({"gpu": "h100", "pp": "2"}, "megatron"),
        ({"gpu": "b200", "experts": "8", "ep": "8"}, "megatron"),
        ({"gpu": "h100"}, "unknown"),
        ({"gpu": "a100", "tp": "8"}, "unknown"),
        ({"gpu": "a100", "zero_stage": "3"}, "torch"),
        ({"gpu": "h100", "zero_stage": "3", "tp": "8"}, "torch"),
        ({"gpu": "h100", "zero_stage": "3", "compile": "1"}, "torch-compiled"),
        ({"gpu": "h100", "compile": "1"}, "torch-compiled"),
        ({"gpu": "tpu v5e", "zero_stage": "3"}, "xla"),
    ],
)
def test_a_program_that_no_text_names_is_that_of_its_layout_and_device(cells: dict[str, str], program: str) -> None:
    """Texts of some tables name no program: without this rule, their runs are twice as far off."""
    run = parse_run({**ROW, **cells})
    assert run.scenario.program == run.assumed["program"] == program
    assert "program" not in parse_run({**ROW, **cells, "program": "deepspeed"}).assumed


def test_the_table_has_the_columns_of_its_sources_alone() -> None:
    """A column of programs that was added to the table made 330 rows easier than rows to come, which have none."""
    table = Path(__file__).parents[2] / "bench" / "published" / "measurements.csv"
    assert "program" not in read_runs(table)[0]
