import errno
import json
import math
import os
from pathlib import Path

import pytest

from echelon.config.run_config import Config
from echelon.training.run.run_dir import Run, RunError

PLAN = {"layout": "dp=2", "derived": [{"name": "microbatch", "value": 12}], "bound": math.inf}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_is_a_directory_that_reads_back(here):
    config = Config(run="first", steps=7)
    with Run.create(config, PLAN) as run:
        run.log("step", step=1, loss=2.5)
        run.log("eval", step=1, loss=2.25)
    again = Run.open("first")
    assert again.config == config
    assert again.plan == {**PLAN, "bound": "inf"}
    assert list(again.records()) == [
        {"kind": "step", "step": 1, "loss": 2.5},
        {"kind": "eval", "step": 1, "loss": 2.25},
    ]
    assert [record["loss"] for record in again.records("eval")] == [2.25]


def test_the_default_directory_names_the_model_and_the_time(here):
    run = Run.create(Config(model="gpt-tiny"), PLAN)
    assert run.path.parent == Path("runs")
    assert run.path.name.startswith("gpt-tiny-2")


def test_a_run_that_exists_is_never_overwritten(here):
    paths = [str(Run.create(Config(run="same", seed=seed), PLAN).path) for seed in range(3)]
    assert paths == ["same", "same-2", "same-3"]
    assert [Run.open(path).config.seed for path in paths] == [0, 1, 2]


def test_a_folder_with_other_files_is_not_used(here):
    (here / "mine").mkdir()
    (here / "mine" / "thesis.txt").write_text("do not lose me")
    (here / "empty").mkdir()
    assert Run.create(Config(run="mine"), PLAN).path == Path("mine-2")
    assert Run.create(Config(run="empty"), PLAN).path == Path("empty")


def test_nan_and_inf_are_logged_as_texts(here):
    with Run.create(Config(run="r"), PLAN) as run:
        run.log("step", loss=math.nan, norm=math.inf, deep={"values": [1.0, -math.inf]})
    (line,) = (here / "r" / "log.jsonl").read_text().splitlines()
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert math.isnan(float(record["loss"]))
    assert float(record["norm"]) == math.inf
    assert record["deep"] == {"values": [1.0, "-inf"]}


def test_every_line_is_on_disk_as_soon_as_it_is_logged(here):
    run = Run.create(Config(run="r"), PLAN)
    run.log("step", step=1)
    assert [record["step"] for record in run.records()] == [1]
    run.close()


def test_any_unicode_text_can_be_logged(here):
    with Run.create(Config(run="r"), PLAN) as run:
        run.log("sample", text="line\nbreak \x00 \u2603 \U0001f600 \udc80")
    (record,) = run.records()
    assert record["text"] == "line\nbreak \x00 \u2603 \U0001f600 \udc80"


def test_a_torn_last_line_is_left_out_and_repaired_by_the_next_write(here):
    with Run.create(Config(run="r"), PLAN) as run:
        run.log("step", step=1)
    log = here / "r" / "log.jsonl"
    with open(log, "a") as file:
        file.write('{"kind": "step", "st')
    again = Run.open("r")
    assert [record["step"] for record in again.records()] == [1]
    with again:
        again.log("step", step=2)
    assert [record["step"] for record in again.records()] == [1, 2]


def test_damage_in_the_middle_is_reported_with_its_line(here):
    with Run.create(Config(run="r"), PLAN) as run:
        run.log("step", step=1)
    with open(here / "r" / "log.jsonl", "a") as file:
        file.write("not json\n{}\n")
    with pytest.raises(RunError, match=r"log\.jsonl, line 2"):
        list(Run.open("r").records())


def test_a_folder_that_is_not_a_run_is_refused(here):
    with pytest.raises(RunError, match=r"has no config\.toml, plan\.json, log\.jsonl"):
        Run.open("nowhere")


def test_a_file_in_the_place_of_the_folder_is_a_clear_error(here):
    (here / "taken").write_text("")
    with pytest.raises(RunError, match="is a file"):
        Run.create(Config(run="taken"), PLAN)
    with pytest.raises(RunError, match="cannot write the run"):
        Run.create(Config(run="taken/deeper"), PLAN)


def test_an_unwritable_folder_is_a_clear_error(here, monkeypatch):
    # Raised by hand: file modes do not stop root.
    def locked(*args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", locked)
    with pytest.raises(RunError, match="permission denied"):
        Run.create(Config(run="locked/run"), PLAN)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_a_clear_error(here):
    run = Run.create(Config(run="r"), PLAN)
    run._log = open("/dev/full", "a")  # noqa: SIM115
    with pytest.raises(RunError, match="no space left on device"):
        run.log("step", step=1)


def test_a_full_disk_at_creation_is_a_clear_error(here, monkeypatch):
    def no_room(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", no_room)
    with pytest.raises(RunError, match="no space left on device"):
        Run.create(Config(run="r"), PLAN)
