"""Injected faults are parsed strictly and strike where they should."""

from __future__ import annotations

import errno
import signal
import time

import pytest
import torch
from typer.testing import CliRunner

from echelon.cli import app
from echelon.faults.flight_recorder import FlightRecorder
from echelon.faults.injection_spec import FAULT_KINDS, injections_of_later_attempt, parse_injections
from echelon.faults.injector import (
    InjectedError,
    Injector,
    corrupt_batch,
    on_file_write,
    pending_flip_patterns,
    should_flip_output,
)
from echelon.layout import ValidationError


def test_defaults_and_options():
    kill, sleep, slow = parse_injections(
        ["kill:rank=2,step=7", "sleep: rank=1 , seconds=2.5,phase=backward", "slow-rank:rank=0,factor=3"]
    )
    assert (kill.rank, kill.step, kill.phase, kill.signal_number) == (2, 7, "forward", signal.SIGKILL)
    assert (sleep.seconds, sleep.phase, sleep.step) == (2.5, "backward", 1)
    assert slow.factor == 3.0
    assert parse_injections([str(kill)]) == (kill,)


def test_every_fault_kind_has_defaults():
    shortly = [f"{kind}:rank=0" if "rank" in FAULT_KINDS[kind] else kind for kind in FAULT_KINDS]
    assert [one.kind for one in parse_injections(shortly)] == list(FAULT_KINDS)


def test_all_faults_at_once_with_a_hint():
    texts = [
        "kil:rank=1",
        "kill:step=2",
        "sleep:rank=9,second=3",
        "raise:rank=0,step=0,phase=forwards",
        "kill:rank=1,step=99",
    ]
    with pytest.raises(ValidationError) as caught:
        parse_injections(texts, world_size=4, steps=10)
    lines = str(caught.value).splitlines()
    assert len(lines) == 7
    assert 'did you mean "kill"?' in lines[0]
    assert "is missing rank" in lines[1]
    assert 'did you mean "seconds"?' in lines[2]
    assert "rank=9 of 4" in lines[3]
    assert "step=0" in lines[4]
    assert 'did you mean "forward"?' in lines[5]
    assert "step=99 of 10" in lines[6]


def test_ranks_end_below_the_world_size_and_steps_at_the_last():
    assert parse_injections(["kill:rank=3,step=10"], world_size=4, steps=10)
    for text, legal in (("kill:rank=4,step=10", "0 to 3"), ("kill:rank=3,step=11", "1 to 10")):
        with pytest.raises(ValidationError, match=legal):
            parse_injections([text], world_size=4, steps=10)


@pytest.mark.parametrize(("of", "worlds"), [("", [4]), (",of=3", [3])], ids=["first", "named"])
def test_a_rank_that_is_gone_strikes_again_in_worlds_of_its_number_of_ranks(of, worlds):
    faults = parse_injections([f"gone:rank=1,step=6{of}", "kill:rank=2,step=6"])
    later = {world: injections_of_later_attempt(faults, world, first_world_size=4) for world in (2, 3, 4)}
    assert [world for world, found in later.items() if found] == worlds
    assert [(fault.kind, fault.step) for fault in later[worlds[0]]] == [("gone", 0)]


@pytest.mark.parametrize(
    "text", ["kill:", "kill", "kill:rank", "kill:rank=x", "kill:rank=1,rank=2", "sleep:rank=1,seconds=inf", ""]
)
def test_invalid_text_is_refused(text):
    with pytest.raises(ValidationError):
        parse_injections([text])


def test_the_command_refuses_before_any_process_starts():
    asked = ["train", "--procs", "2", "--set", "steps=3", "--set", "bacth=2", "--inject", "kill:rank=5"]
    result = CliRunner().invoke(app, [*asked[:5], "--inject", "kill:rank=5", "--inject", "slep:rank=0"])
    assert result.exit_code == 2
    assert "rank=5 of 2" in result.output
    assert 'did you mean "sleep"?' in result.output


def armed(texts, rank=0):
    recorder = FlightRecorder()
    return recorder, Injector(parse_injections(texts), rank, recorder)


def test_a_fault_strikes_once_in_its_step_phase_and_rank():
    recorder, injector = armed(["raise:rank=0,step=2,phase=backward"])
    with injector.activate():
        for step, phase in ((1, "backward"), (2, "forward")):
            recorder.step = step
            recorder.enter_phase(phase)
        with pytest.raises(InjectedError, match="rank 0 in backward of step 2"):
            recorder.enter_phase("backward")
        recorder.enter_phase("backward")
    recorder, injector = armed(["raise:rank=1,step=1"])
    with injector.activate():
        recorder.step = 1
        recorder.enter_phase("forward")
    assert recorder.on_phase is None


def test_a_collective_is_skipped_once():
    recorder, injector = armed(["skip-collective:rank=0,step=1,axis=dp,op=all_gather"])
    with injector.activate():
        asked = [("all_reduce", "dp"), ("all_gather", "tp"), ("all_gather", "dp"), ("all_gather", "dp")]
        assert [recorder.should_skip(1, op, axis) for op, axis in asked] == [False, False, True, False]
    assert recorder.should_skip is None


def test_a_slow_rank_works_longer_but_does_not_load_longer(monkeypatch):
    now, slept = [1000.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    recorder, injector = armed(["slow-rank:rank=0,factor=3"])
    recorder.step = 1
    with injector.activate():
        recorder.enter_phase("forward")
        now[0] += 0.05
        with recorder.data_loading():
            now[0] += 0.02
        recorder.enter_phase("forward")
    assert slept[0] == pytest.approx(2 * 0.05)
    assert sum(slept) == pytest.approx(2 * 0.05)
    assert recorder.data_wait_s == pytest.approx(0.02)


def write(path, data):
    """Write as the checkpoint code does."""
    with on_file_write(path):
        path.write_bytes(data)


def test_files(tmp_path):
    recorder = FlightRecorder()
    recorder.step = 4
    data = bytes(range(200))
    asked = parse_injections(["corrupt-file:rank=0,step=4,name=*.bin,byte=7", "full-disk:step=2,name=b*"])
    with Injector(asked, 0, recorder).activate():
        write(tmp_path / "a.txt", data)
        assert (tmp_path / "a.txt").read_bytes() == data
        write(tmp_path / "a.bin", data)
        found = (tmp_path / "a.bin").read_bytes()
        assert [n for n in range(200) if found[n] != data[n]] == [7]
        with pytest.raises(OSError, match="No space left on device") as caught:
            write(tmp_path / "b.txt", data)
        assert caught.value.errno == errno.ENOSPC
        assert len((tmp_path / "b.txt").read_bytes()) == 100
        write(tmp_path / "b.txt", data)  # each strikes once
    write(tmp_path / "c.bin", data)
    assert (tmp_path / "c.bin").read_bytes() == (tmp_path / "b.txt").read_bytes() == data


def test_a_spike_corrupts_one_attempt_at_a_step():
    """All microbatches of the batch are corrupted, equally on every rank; ignored targets stay ignored."""
    recorder = FlightRecorder()
    recorder.step = 3
    inputs = {"tokens": torch.arange(32).view(2, 16), "targets": torch.full((2, 16), -100), "x": torch.ones(2)}
    first, second = torch.tensor([24, 25]), torch.tensor([26, 27])
    found = []
    for rank in (0, 1):
        with Injector(parse_injections(["spike:step=3"]), rank, recorder).activate():
            for samples in (first, second, first):
                found.append(corrupt_batch(inputs, samples))
    one, two, again, other, *_ = found
    assert not torch.equal(one["tokens"], inputs["tokens"])
    assert not torch.equal(one["tokens"], two["tokens"])
    assert torch.equal(one["tokens"], other["tokens"])
    assert torch.equal(one["targets"], inputs["targets"])
    assert again is inputs
    assert corrupt_batch(inputs, first) is inputs


def test_a_bit_flips_once_on_its_rank():
    recorder = FlightRecorder()
    recorder.step = 2
    asked = parse_injections(["flip:rank=1,step=2,layer=blocks.*"])
    with Injector(asked, 0, recorder).activate():
        assert not should_flip_output("blocks.1")
    with Injector(asked, 1, recorder).activate():
        assert pending_flip_patterns() == ["blocks.*"]
        assert [should_flip_output(name) for name in ("embed", "blocks.1", "blocks.2")] == [False, True, False]
    assert pending_flip_patterns() == []
