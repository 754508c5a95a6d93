import pytest
import torch

from echelon.memory.checkpointing.cost import RecomputeWork
from echelon.planning.cluster.device_kinds import DEVICE_KINDS
from echelon.training.logging import metrics

CPU = torch.device("cpu")


def test_mfu_counts_required_flops():
    # 1B on one H200: 6 FLOPs for each of 1e9 parameters, 60,000 tokens/s.
    assert metrics.mfu(6e9, 60_000, 989.5e12) == pytest.approx(0.3638, abs=1e-4)


def test_hfu_equals_mfu_without_recomputation_and_adds_a_forward_of_the_blocks_with_it():
    flops, blocks, speed, peak = 9e9, 6e9, 1e4, 1e15
    none = metrics.recomputed_flops(RecomputeWork(), blocks)
    full = metrics.recomputed_flops(RecomputeWork(forward=1.0), blocks)
    assert metrics.hfu(flops, speed, peak, recomputed=none) == metrics.mfu(flops, speed, peak)
    assert metrics.hfu(flops, speed, peak, recomputed=full) == pytest.approx(metrics.mfu(flops + 2e9, speed, peak))


def test_selective_recomputation_counts_attention_only():
    assert metrics.recomputed_flops(RecomputeWork(attention=1.0), 6e9, 3e9) == 1e9
    assert metrics.recomputed_flops(RecomputeWork(forward=0.5, attention=0.25), 6e9, 3e9) == 1.25e9


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H100 PCIe", 756.5e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", 125e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA B200", 2250e12),
    ],
)
def test_known_devices(name, peak):
    found = metrics.known_peak(name)
    assert found is not None
    assert found.flops == peak


@pytest.mark.parametrize("kind", [kind for kind in DEVICE_KINDS if kind != "cpu"])
def test_mfu_and_plans_share_one_peak(kind):
    """A GB200 had 2,500 TFLOP/s in a run's MFU and 2,450 in a plan's."""
    found = metrics.known_peak(f"NVIDIA {DEVICE_KINDS[kind].driver_name}")
    assert found is not None
    assert found.flops == DEVICE_KINDS[kind].peak("bf16")


def test_devices_of_one_name_have_one_peak():
    """Three generations of TPUs, of 275, 197 and 459 TFLOP/s, were all called TPU, with the peak of the last."""
    peaks = {}
    for kind in DEVICE_KINDS.values():
        assert peaks.setdefault(kind.driver_name, kind.peak("bf16")) == kind.peak("bf16")
    assert [metrics.known_peak(f"TPU {variant}").flops for variant in ("v4", "v5e", "v5p")] == [275e12, 197e12, 459e12]
    assert metrics.known_peak("TPU") is None


def test_an_unknown_device_has_no_known_peak():
    assert metrics.known_peak("Some Future Card 9000") is None


def test_the_peak_of_a_cpu_is_measured():
    peak = metrics.peak_flops(CPU)
    assert 1e8 < peak.flops < 1e15
    assert "measured here: float32" in peak.source


def test_peak_memory_grows_with_allocations():
    before = metrics.peak_memory(CPU)
    held = torch.ones(before // 4 + 10_000_000, dtype=torch.float32)
    assert held.nbytes > before
    assert metrics.peak_memory(CPU) >= held.nbytes
