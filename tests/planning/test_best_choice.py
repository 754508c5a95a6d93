"""Keys that a published run leaves out: the fastest choice that fits and is legal."""

from __future__ import annotations

import pytest

from echelon.planning.calibrate.published_runs import PublishedRun, parse_run, parse_runs
from echelon.planning.cost.memory_model import peak_memory

LLAMA_405B = {
    "source_id": "some",
    "note": "Megatron-LM",
    "hidden": "16384",
    "layers": "126",
    "heads": "128",
    "kv_heads": "8",
    "ffn_hidden": "53248",
    "gated_mlp": "1",
    "vocab": "128256",
    "seq_len": "8192",
    "gpu": "H100-80GB-SXM",
    "gpus": "8192",
    "tp": "8",
    "pp": "16",
    "global_batch": "2048",
    "step_time_s": "12.5",
}
LLAMA_8B = LLAMA_405B | {
    "hidden": "4096",
    "layers": "32",
    "heads": "32",
    "ffn_hidden": "14336",
    "gpus": "8",
    "tp": "1",
    "pp": "1",
    "global_batch": "16",
}


def run(row: dict[str, str], **cells: str) -> PublishedRun:
    return parse_run(row | cells)


def test_the_embedding_and_the_head_count_as_layers_where_layers_do_not_divide():
    """Of 126 layers 16 stages have 8 each, but the first and the last: four chunks, not one."""
    found = run(LLAMA_405B)
    assert (found.scenario.layout.schedule, found.scenario.layout.vpp) == ("interleaved", 4)
    assert found.assumed["vpp"] == 4


@pytest.mark.parametrize(
    "cells",
    [
        {"vpp": "1"},
        {"schedule": "1F1B"},
        {"gpu": "V100-16GB-SXM2"},
        {"note": "DeepSpeed"},
        {"note": "", "gpu": "A100-80GB"},
    ],
)
def test_chunks_are_chosen_only_where_they_are_open(cells):
    found = run(LLAMA_405B, **cells)
    assert found.scenario.layout.vpp == 1
    assert "vpp" not in found.assumed


def test_the_choice_is_the_fastest_that_fits():
    found = run(LLAMA_8B)
    assert peak_memory(found.scenario).total <= found.scenario.cluster.memory
    assert set(found.assumed) == {"microbatch", "recompute", "offload", "zero"}
    roomy = run(LLAMA_8B, gpu="B200-SXM")
    assert roomy.assumed["recompute"] == "none"
    large = run(LLAMA_8B, micro_batch="2", zero_stage="0")
    assert large.assumed["recompute"] != "none"
    stated = run(LLAMA_8B, micro_batch="1", recompute="full", zero_stage="1")
    assert stated.assumed == {}
    assert stated.scenario.layout.recompute == "full"


def test_what_fits_nowhere_has_the_choice_with_the_least_memory():
    found = run(LLAMA_405B, gpus="16", tp="1", note="torchtitan")
    assert found.assumed["microbatch"] == 1
    assert found.assumed["recompute"] == "full"


def test_an_unreadable_link_is_assumed_and_said():
    found = run(LLAMA_405B, inter_node_bw="RoCE RDMA")
    assert found.assumed["inter_node_bw"] == "400 Gb/s per device"
    assert "inter_node_bw" not in run(LLAMA_405B, inter_node_bw="400 Gb/s per GPU").assumed


def test_one_bad_cell_skips_its_row_alone():
    """zero_stage=5 stopped the whole table."""
    runs, skipped = parse_runs([LLAMA_8B, LLAMA_8B | {"zero_stage": "5"}, LLAMA_8B | {"pp": "7"}])
    assert len(runs) >= 1
    assert any("zero" in reason for reason in skipped)


@pytest.mark.parametrize(
    ("cells", "reduced"),
    [
        ({}, 2),
        ({"note": "Megatron-LM, fp32 grad accumulation"}, 4),
        ({"note": "torchtitan"}, 4),
        ({"gpu": "A100-80GB"}, 2),
    ],
)
def test_gradients_are_reduced_as_the_program_does(cells, reduced):
    assert run(LLAMA_8B, **cells).scenario.reduce_bytes == reduced
