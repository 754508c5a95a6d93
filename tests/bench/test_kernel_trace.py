from __future__ import annotations

import pytest

from echelon.bench.profile.kernel_trace import KernelSpan, kernel_spans, share_time


def test_only_what_runs_on_the_device_counts():
    trace = {
        "traceEvents": [
            {"cat": "kernel", "name": "a", "ts": 10.0, "dur": 5.0},
            {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 20.0, "dur": 1.0},
            {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1.0, "dur": 50.0},
            {"name": "process_name", "ph": "M"},
        ]
    }
    assert [span.name for span in kernel_spans(trace)] == ["a", "Memcpy DtoD"]
    assert kernel_spans(trace)[0].end == pytest.approx(15e-6)


def test_overlapping_kernels_share_time_and_gaps_are_idle():
    found = share_time(
        [
            KernelSpan(name="a", start=100.0, end=104.0),
            KernelSpan(name="b", start=102.0, end=106.0),  # two seconds beside a
            KernelSpan(name="a", start=108.0, end=109.0),  # after a gap of two
            KernelSpan(name="nothing", start=108.5, end=108.5),
        ]
    )
    assert found.seconds == pytest.approx({"a": 2 + 1 + 1, "b": 1 + 2})
    assert found.idle == pytest.approx(2)
    assert found.calls == {"a": 2, "b": 1, "nothing": 1}
    assert sum(found.seconds.values()) + found.idle == pytest.approx(9)


def test_one_kernel_may_run_beside_itself():
    found = share_time([KernelSpan(name="a", start=1.0, end=3.0), KernelSpan(name="a", start=2.0, end=4.0)])
    assert found.seconds == pytest.approx({"a": 3.0})
    assert found.idle == 0
    assert share_time([]).seconds == {}
