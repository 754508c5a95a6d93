"""What the free texts of published runs mean: devices, links, programs."""

from __future__ import annotations

import pytest

from echelon.planning.calibrate.row_texts import device_kind, link_bandwidth, named_program, pairs_microbatches


@pytest.mark.parametrize(
    ("text", "gigabytes"),
    [
        ("400 Gb/s per node", 50),
        ("400 Gbit/s per node", 50),
        ("100 GbE", 12.5),
        ("25 Gigabit Ethernet", 3.125),
        ("3.2 Tb/s per node", 400),
        ("1.6 Tb/s", 200),
        ("3200 Gbps EFA", 400),
        ("400G InfiniBand", 50),
        ("400 Gb/s RDMA per GPU", 400),
        ("400gb/s per gpu", 400),
        ("400 Gb/s/GPU", 400),
        ("200 Gb/s per chip", 200),
        ("400Gbps InfiniBand per accelerator", 400),
        ("0.4 Tbit/s per card", 400),
        ("50 GB/s each GPU", 400),
        ("50 GB/s per device", 400),
        ("400 GBps per node", 400),
        ("8x400 Gb/s per GPU", 400),
        ("8x400 Gb/s, one NIC per GPU", 400),
        ("8 x 50 GB/s IB per node", 400),
        ("8 NICs of 200 Gbps", 200),
        ("8 adapters, 50 GB/s each", 400),
        ("8x NDR", 400),
        ("4 Omni-Path links per node", 50),
        ("100 Gb/s EDR IB per node", 12.5),
        ("RoCE RDMA", 0),
        ("", 0),
    ],
)
def test_the_bandwidth_of_a_node_is_read_from_its_text(text, gigabytes):
    assert link_bandwidth(text, 8) == pytest.approx(gigabytes * 1e9)


@pytest.mark.parametrize(
    ("text", "kind", "gib"),
    [
        ("RTX 4090", "rtx4090", 24),
        ("NVIDIA GeForce RTX 4090", "rtx4090", 24),
        ("Gaudi 3", "gaudi3", 128),
        ("TPU v5p", "tpu-v5p", 95),
        ("TPUv5e", "tpu-v5e", 16),
        ("NVIDIA H100 80GB HBM3", "h100", 80),
        ("H100-96GB-HBM2e-500W", "h100", 96),
        ("H200-141GB-SXM", "h200", 140),
        ("A100-40GB-SXM", "a100-40", 40),
        ("A800-80GB-SXM", "a100-80", 80),
        ("V100-32GB", "v100", 32),
        ("MI250X-GCD", "mi250x", 64),
        ("Ascend 910B3", "ascend910b", 64),
        ("GB200-NVL72", "gb200", 185),
    ],
)
def test_a_device_is_known_however_its_name_is_spelled(text, kind, gib):
    found = device_kind(text)
    assert (found.name, found.memory / 2**30) == (kind, gib)


@pytest.mark.parametrize("text", ["GH200", "L40", "H1000", "RTX 40900", "cpu"])
def test_a_device_that_only_contains_a_known_name_is_unknown(text):
    """GH200 was read as H200."""
    assert device_kind(text) is None


def test_watts_in_a_name_are_those_of_the_device():
    assert device_kind("H100-96GB-HBM2e-500W").watts == 500


@pytest.mark.parametrize(
    ("texts", "program"),
    [
        ({"source": "NVIDIA NeMo performance"}, "megatron"),
        ({"source": "NVIDIA-NeMo/Automodel docs"}, "torch"),
        ({"source_id": "nemo_automodel"}, "torch"),
        ({"note": "Megatron-LM, TE"}, "megatron"),
        ({"note": "TFLOP/s by the Megatron formula"}, ""),
        ({"note": "Megatron-DeepSpeed"}, "deepspeed"),
        ({"source": "EleutherAI/gpt-neox"}, "deepspeed"),
        ({"source": "bigscience-workshop/bigscience"}, "deepspeed"),
        ({"source": "NVIDIA/dgxc-benchmarking llama3.1"}, "megatron"),
        ({"source": "NVIDIA/dgxc-benchmarking maxtext"}, "xla"),
        ({"note": "not jaxed"}, ""),
        ({"note": "JAX, maxtext"}, "xla"),
        ({"source": "pytorch/torchtitan"}, "torch"),
        ({"note": "fsdp=8 of NeMo"}, "megatron"),
        ({"source": "bigscience", "program": "megatron"}, "megatron"),
        ({}, ""),
    ],
)
def test_a_program_is_what_a_row_states_or_names(texts, program):
    assert named_program(texts) == program


@pytest.mark.parametrize(
    ("texts", "pairs"),
    [
        ({"note": "dispatcher DeepEP; +1f1b overlap"}, True),
        ({"note": "moe_a2a_overlap"}, True),
        ({"note": "EP A2A overlap"}, True),
        ({"note": "--overlap-moe-expert-parallel-comm"}, True),
        ({"schedule": "DualPipe"}, True),
        ({"note": "no EP overlap"}, False),
        ({"note": "1f1b overlap-grad-reduce, tp-comm-overlap on"}, False),
        ({"note": "comm overlap; dispatcher DeepEP"}, False),
        ({}, False),
    ],
)
def test_microbatches_run_in_pairs_where_a_row_says_so(texts, pairs):
    assert pairs_microbatches(texts) == pairs
