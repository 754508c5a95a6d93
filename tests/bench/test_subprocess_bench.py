from __future__ import annotations

import os
import sys

import pytest

from echelon.bench.measurement import Measurement
from echelon.bench.peers.import_stubs import stub_missing_modules
from echelon.bench.subprocess_bench import describe_error, run_in_subprocess

TINY = Measurement(
    who="echelon", shape="tiny", size="llama-tiny", seq_len=32, batch=2, precision="fp32", warmup_steps=1, timed_steps=1
)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Makes a module that such a process can run."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))

    def make(text: str) -> str:
        (tmp_path / "work.py").write_text(text)
        return "work"

    return make


def test_a_step_is_measured_in_a_process_of_its_own():
    found = run_in_subprocess("echelon.bench.measure_step", TINY)
    assert found.keys() == {"step_s", "first_step_s", "peak_bytes", "version", "torch"}
    assert 0 < found["step_s"] < found["first_step_s"]
    assert found["peak_bytes"] > 1 << 20
    assert found["version"].startswith("echelon ")


def test_a_failure_is_reported_with_its_reason(module):
    text = (
        "from echelon.bench.subprocess_bench import subprocess_main as main\ndef work(m, start):\n    {}\nmain(work)\n"
    )
    failures = {
        "raise ValueError('no such\\nlayout')": "ValueError: no such layout (work.py, line 3)",
        "import no_such_package": "no_such_package is not installed",
    }
    for line, words in failures.items():
        assert words in run_in_subprocess(module(text.format(line)), TINY)["failed"]


def test_prints_of_libraries_do_not_disturb_the_result(module):
    text = "import os\nfrom echelon.bench.subprocess_bench import subprocess_main as main\ndef work(m, start):\n"
    text += "    print('noise')\n    os.system('echo more noise')\n"
    text += "    return dict(batch=m.batch, late=start > 0)\nmain(work)\n"
    assert run_in_subprocess(module(text), TINY) == {"batch": 2, "late": True}


def test_a_process_that_dies_or_hangs_is_a_result_too(module):
    dying = module("import os, sys\nprint('last words', file=sys.stderr)\nsys.stderr.flush()\nos._exit(3)\n")
    assert run_in_subprocess(dying, TINY) == {"failed": "the process ended with code 3: last words"}
    killed = module("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert run_in_subprocess(killed, TINY) == {"failed": "the process was ended by SIGKILL: it printed nothing"}
    assert run_in_subprocess(module("import time\ntime.sleep(60)\n"), TINY, limit=0.5) == {
        "failed": "not done after 0 s"
    }


def test_modules_that_a_peer_never_calls_may_be_missing(monkeypatch):
    names = ["no_such_package", "no_such_package.part", "json"]
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    stub_missing_modules(names)
    from no_such_package.part import Something, decorate  # type: ignore[import-not-found]

    class Child(Something):
        @decorate("with", arguments=True)
        def method(self) -> int:
            return 1

    assert Child().anything.else_ is not None
    assert Something[int] is Something
    assert Something.Inner
    assert sys.modules["json"].dumps({}) == "{}"
    with pytest.raises(AttributeError):
        _ = sys.modules["no_such_package"].__version__


def test_out_of_memory_reports_the_memory_in_use(monkeypatch):
    import torch

    device = type("Device", (), {"total_memory": 140 << 30})
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 138 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    words = describe_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.83 GiB."))
    assert words == "out of memory (138.0 GiB of 140.0 were in use)"
