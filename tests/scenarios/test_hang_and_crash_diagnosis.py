"""A rank sleeps, skips a collective, raises or is killed: a diagnosis names the rank, the line and the waiting ranks.

Real processes on gloo. Layouts and faults that the scenario does not name are here too.
"""

from __future__ import annotations

import re
import time

import pytest
from cpu_clock import patient

from echelon import data
from echelon.config.run_config import Config
from echelon.config.sections import DataConfig, EvalConfig, SampleConfig
from echelon.launch.rank_failure import RankError
from echelon.training.run.run_dir import Run
from echelon.training.start_training import run_training

LATEST = 10.0
"""seconds after the timeout, on an idle machine"""


@pytest.fixture
def timeout() -> float:
    """4 s; more where ranks get to run so seldom that those without a fault would exceed it."""
    return round(patient(4.0), 1)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("".join(f"def line_{n}(x): return x + {n}\n" for n in range(300)))
    return str(data.prepare_token_file(folder, folder / "cache", tokenizer=data.load_tokenizer("bytes")))


@pytest.fixture
def failed(tokens, tmp_path, timeout):
    """Runs with a fault: (what the user sees, the line of the log, seconds from the fault to the end)."""

    def go(layout, fault, **changes):
        config = Config(
            data=DataConfig(path=(tokens,), eval_fraction=0.0),
            **{"model": "llama-tiny", "seq_len": 32, "batch": 4, "steps": 5, "timeout": timeout, **changes},
            layout=layout,
            device="cpu",
            sample=SampleConfig(tokens=0),
            eval=EvalConfig(every=0),
            run=str(tmp_path / "run"),
        )
        with pytest.raises(RankError) as caught:
            run_training(config, quiet=True, inject=[fault])
        end = time.time()
        log = Run.open(tmp_path / "run")
        (injected,) = log.records("injected")
        (diagnosis,) = log.records("diagnosis")
        text = str(caught.value)
        assert diagnosis["text"] in text
        assert text.count(diagnosis["text"]) == 1
        assert text.count("Traceback") <= 1
        took = end - injected["time"]
        assert took < timeout + patient(LATEST)
        return text, diagnosis, caught.value

    return go


def has(text, *facts):
    for fact in facts:
        assert re.search(fact, text), f"{fact!r} is not in\n{text}"


def test_a_rank_sleeps_in_its_loader(failed):
    text, record, error = failed("dp=2", "sleep:rank=1,step=3")
    has(
        text,
        r"^rank 1 \(dp 1\) did not reach all_reduce number \d+ on axis dp \(float32 \[\d+\], called at "
        r"echelon/parallel/dp/\w+.py:\d+ in backward of step 3\)",
        r"It has been in data of step 3 for \d",
        r"Its Python stack, innermost first: echelon/training/loop.py:\d+ in _train_step",
        r"Waiting: rank 0 \(dp 0\) for \d+\.\d s in all_reduce number \d+ on axis dp at echelon/parallel/dp",
    )
    assert (record["case"], record["ranks"], record["waiting"]) == ("absent", [1], [0])
    assert (record["collective"], record["axis"], record["step"]) == ("all_reduce", "dp", 3)
    assert "Traceback" not in text  # torch's message about the timeout is less useful
    assert error.rank == 1


def test_a_stage_of_a_pipeline_sleeps_in_its_backward(failed):
    text, record, _ = failed("pp=2,accumulate=2", "sleep:rank=1,step=2,phase=backward")
    has(
        text,
        r"^rank 1 \(pp 1\) did not send what another rank waits for: receive number \d+ on axis pp",
        r"echelon/pipeline/execution/runtime.py:\d+",
        r"It has been in backward of step 2",
        r"Waiting: rank 0 \(pp 0\)",
    )
    assert (record["collective"], record["axis"], record["ranks"]) == ("receive", "pp", [1])


def test_a_rank_skips_a_collective_and_the_next_has_another_size(failed):
    # gloo aborts a process where sizes differ: the recorders survive it.
    text, record, _ = failed("dp=2", "skip-collective:rank=1,step=3")
    has(
        text,
        r"^rank 1 \(dp 1\) skipped all_reduce number \d+ on axis dp \(float32 \[\d+\], called at "
        r"echelon/parallel/dp/\w+.py:\d+ in backward of step 3\)",
        r"Waiting: rank 0 \(dp 0\)",
    )
    assert (record["case"], record["ranks"], record["step"]) == ("skipped", [1], 3)


def test_a_rank_skips_a_collective_and_all_hang(failed):
    text, record, _ = failed("tp=2", "skip-collective:rank=0,step=2,op=reduce_scatter")
    has(
        text,
        r"^rank 0 \(tp 0\) skipped reduce_scatter number \d+ on axis tp",
        r"echelon/parallel/tp/tp_collectives.py:\d+",
    )
    has(text, r"its operation number \d+ is all_gather", r"Waiting: rank 1 \(tp 1\)")
    assert (record["case"], record["axis"]) == ("skipped", "tp")


def test_a_rank_raises_and_its_traceback_is_last_and_once(failed):
    text, record, error = failed("dp=2,tp=2", "raise:rank=2,step=2,phase=backward")
    has(
        text,
        r"^rank 2 \(dp 1, tp 0\) raised .*InjectedError: .*, in backward of step 2\.",
        r"Its last operation was \w+ number \d+ on axis \w+ \(echelon/\S+:\d+, step \d\)",
        r"rank 3 \(dp 1, tp 1\) for \d+\.\d s in reduce_scatter number \d+ on axis tp at echelon/parallel/tp/",
        r"InjectedError: injected into rank 2 in backward of step 2 \(raise:rank=2,step=2,phase=backward\)$",
    )
    assert text.count("Traceback (most recent call last)") == 1
    assert (record["case"], record["ranks"], error.rank) == ("raised", [2], 2)
    assert 3 in record["waiting"]


def test_the_first_rank_is_killed(failed):
    # The one that writes the log and the display.
    text, record, error = failed("pp=2,accumulate=2", "kill:rank=0,step=3")
    has(
        text,
        r"^rank 0 \(pp 0\) ended without an exception: the process was ended by SIGKILL, in forward of step 3\.",
        r"Memory at its last heartbeat: \d+ MiB|Memory at its last heartbeat: \d+\.\d+ GiB in the rank",
        r"Waiting: rank 1 \(pp 1\) for \d+\.\d s in receive number \d+ on axis pp at echelon/pipeline/execution/",
    )
    assert (record["case"], record["ranks"], record["waiting"]) == ("killed", [0], [1])
    assert error.rank == 0


def test_a_process_is_stopped(failed):
    # It publishes no heartbeat, and does not answer the launcher either.
    text, record, _ = failed("dp=2,zero=3", "kill:rank=1,step=2,signal=SIGSTOP")
    has(text, r"^rank 1 \(dp 1\) did not reach \w+ number \d+ on axis dp", r"Its last heartbeat was \d+\.\d s ago")
    assert (record["case"], record["ranks"], record["waiting"]) == ("absent", [1], [0])


def test_the_slow_rank_is_named_though_steps_take_equally_long(failed, tokens, tmp_path):
    config = Config(
        data=DataConfig(path=(tokens,), eval_fraction=0.0),
        seq_len=32,
        batch=4,
        steps=13,
        layout="dp=2",
        device="cpu",
        sample=SampleConfig(tokens=0),
        eval=EvalConfig(every=0),
        run=str(tmp_path / "run"),
    )
    run_training(config, quiet=True, inject=["slow-rank:rank=1,factor=12"])
    looks = list(Run.open(tmp_path / "run").records("ranks"))
    assert (looks[0]["slow"]["rank"], looks[0]["slow"]["cause"]) == (1, "work")
    assert looks[0]["work"][1] > 2 * looks[0]["work"][0]
    assert looks[0]["waiting"][0] > looks[0]["waiting"][1]


OWN = """
import time
import torch
import torch.distributed as dist
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)
    def forward(self, x):
        return self.net(x).square().sum(), torch.tensor(len(x))

def build():
    return Model()

def fetch(step):
    if dist.get_rank() == 1:
        time.sleep(3600 if step == 12 else 0.2)

def batch(rows, step):
    fetch(step)
    return {"x": torch.ones(rows, 3)}
"""


def test_a_custom_loader_is_slow_and_then_hangs(tmp_path, monkeypatch, timeout):
    # Nothing is injected. Its stall is distinguished from work, and the report contains its line.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    line = 1 + OWN[: OWN.index("time.sleep")].count("\n")
    config = Config(model="own.py:build", batch=4, steps=20, layout="dp=2", device="cpu", timeout=timeout, run="run")
    with pytest.raises(RankError) as caught:
        run_training(config, quiet=True)
    has(
        str(caught.value),
        r"^rank 1 \(dp 1\) did not reach all_reduce",
        rf"innermost first: \S*own.py:{line} in fetch",
    )
    has(str(caught.value), r"It has been in data of step 13", r"Waiting: rank 0 \(dp 0\)")
    (look,) = Run.open("run").records("ranks")
    assert (look["slow"]["rank"], look["slow"]["cause"]) == (1, "data")
    assert look["data"][1] > 0.2 > look["data"][0]
