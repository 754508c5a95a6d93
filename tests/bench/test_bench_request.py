from __future__ import annotations

from pathlib import Path

import pytest

from echelon.bench import peers
from echelon.bench.bench_device import BenchDevice
from echelon.bench.bench_request import BenchOptions, check_options, plan_measurements, plan_profiles
from echelon.layout.validation_error import ValidationError

CPU = BenchDevice(device_type="cpu", name="cpu", memory=0)
H200 = BenchDevice(device_type="cuda", name="NVIDIA H200", memory=140 << 30, fp8=True)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder with all peers, empty; none of them is anywhere else."""
    for name in ("torchtitan", "torchdata", "torchao", "transformers"):
        (tmp_path / "packages" / name).mkdir(parents=True)
        (tmp_path / "packages" / name / "__init__.py").touch()

    def can_import(name: str, folder: str) -> bool:
        return name == "torch" or (bool(folder) and (Path(folder) / name).is_dir())

    monkeypatch.setattr(peers, "_can_import", can_import)
    monkeypatch.chdir(tmp_path)
    return str(tmp_path / "packages")


def who(found):
    return [(request.shape, request.precision, request.who, request.recompute) for request in found.measurements]


def test_a_gpu_with_peers(packages):
    found = plan_measurements(BenchOptions(peers=packages), H200)
    for_gpt2 = [("bf16", "echelon", "none"), ("bf16", "compiled", "none"), ("fp8", "echelon", "ops")]
    for_1b = [("bf16", name, "none") for name in ("echelon", "compiled", "torchtitan", "transformers")]
    for_1b += [("fp8", "echelon", "ops"), ("fp8", "torchtitan", "none")]
    assert who(found)[:9] == [("gpt2", *row) for row in for_gpt2] + [("1b", *row) for row in for_1b]
    assert who(found)[-1] == ("8b", "fp8", "torchtitan", "full")
    assert len(found.measurements) == 21
    assert found.left_out == {
        f"{name} of gpt2": "its recipe has no gpt model" for name in ("torchtitan", "transformers")
    }
    assert {(request.device, request.peer_folder) for request in found.measurements} == {("cuda", packages)}


def test_a_cpu_has_one_small_shape(packages):
    found = plan_measurements(BenchOptions(peers=packages), CPU)
    assert who(found) == [("tiny", "fp32", name, "none") for name in ("echelon", "compiled", "transformers")]
    assert found.left_out == {"torchtitan": "its recipe runs on CUDA only"}


def test_missing_peers_are_listed(packages):
    found = plan_measurements(BenchOptions(shapes="1b"), H200)
    assert [one[2] for one in who(found)] == ["echelon", "compiled", "echelon"]
    assert found.left_out == {
        "torchtitan": "not installed (torchtitan, torchdata)",
        "torchtitan in fp8": "not installed (torchtitan, torchdata, torchao)",
        "transformers": "not installed (transformers)",
    }
    assert plan_measurements(BenchOptions(shapes="1b", against="none"), H200).left_out == {}


def test_the_folder_of_this_directory_is_found(packages):
    Path(packages).rename(".peers")
    found = plan_measurements(BenchOptions(shapes="1b", precision="bf16", against="torchtitan"), H200)
    assert [one[2] for one in who(found)] == ["echelon", "torchtitan"]
    assert found.measurements[0].peer_folder == str(Path(".peers").resolve())


def test_shapes_that_cannot_fit_are_left_out_unless_asked_for(packages):
    small = BenchDevice(device_type="cuda", name="NVIDIA A100", memory=80 << 30)
    found = plan_measurements(BenchOptions(), small)
    ours = [(one[0], one[1]) for one in who(found) if one[2] == "echelon"]
    assert ours == [("gpt2", "bf16"), ("1b", "bf16"), ("3b", "bf16")]
    assert found.left_out["8b"] == "requires 120 GiB, and NVIDIA A100 has 80"
    assert "8b" in [one[0] for one in who(plan_measurements(BenchOptions(shapes="8b"), small))]


def test_options_apply_to_all_measurements(packages):
    options = BenchOptions(
        shapes="8b", batch=2, seq_len=512, recompute="none", states="bfloat16", steps=3, peers=packages
    )
    found = plan_measurements(options, H200).measurements
    assert {(one.batch, one.seq_len, one.recompute, one.timed_steps) for one in found} == {(2, 512, "none", 3)}
    assert {one.who: one.states for one in found}["torchtitan"] == "float32"
    assert found[0].states == "bfloat16"


def test_recompute_options_that_peers_lack(packages):
    found = plan_measurements(
        BenchOptions(shapes="8b", precision="bf16", recompute="ops", against="torchtitan", peers=packages), H200
    )
    assert [one[2:] for one in who(found)] == [("echelon", "ops"), ("torchtitan", "full")]


def test_both_fp8_precisions_have_one_peer(packages):
    found = plan_measurements(BenchOptions(shapes="1b", precision="fp8,fp8-row", peers=packages), H200)
    assert [one[1:3] for one in who(found)] == [("fp8", "echelon"), ("fp8", "torchtitan"), ("fp8-row", "echelon")]


def test_all_errors_are_reported_at_once(tmp_path):
    options = BenchOptions(
        only="step",
        out=tmp_path / "mine.txt",
        shapes="1b,4b",
        precision="bf61",
        peers=str(tmp_path / "none"),
        against="torchtitann",
        steps=0,
        states="float16",
        recompute="some",
        batch=-1,
        seq_len=0,
    )
    with pytest.raises(ValidationError) as raised:
        check_options(options)
    found = {fault.key: str(fault) for fault in raised.value.issues}
    keys = "only out shapes precision peers against steps states recompute batch seq-len"
    assert set(found) == {f"--{key}" for key in keys.split()}
    assert 'did you mean "bf16"?' in found["--precision"]
    assert "does not end in .toml" in found["--out"]
    assert found["--steps"] == "--steps=0 is too small; legal: 1 or more"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"only": "steps", "out": "mine.toml"}, "requires the devices, which --only steps leaves out"),
        ({"only": "devices", "shapes": "1b"}, "is incompatible with --only devices"),
        ({"only": "steps", "profile": "a.svg"}, "is incompatible with --profile"),
        ({"profile": "a.svg", "out": "mine.toml"}, "requires the devices, which --profile leaves out"),
        ({"profile": "a.svg", "against": "none"}, "measures echelon alone"),
        ({"profile": "a.png"}, "does not end in .json or .svg"),
    ],
)
def test_conflicting_options_are_rejected(options, words, tmp_path):
    paths = {key: tmp_path / options[key] for key in ("out", "profile") if key in options}
    with pytest.raises(ValidationError, match=words):
        check_options(BenchOptions(**{**options, **paths}))


def test_a_profile_needs_a_gpu(tmp_path):
    options = BenchOptions(profile=tmp_path / "a.svg", shapes="1b,3b", precision="bf16,fp8")
    with pytest.raises(ValidationError, match="requires a GPU"):
        plan_profiles(options, CPU)
    found = plan_profiles(options, H200)
    assert [(one.shape, one.precision) for one in found] == [
        ("1b", "bf16"),
        ("1b", "fp8"),
        ("3b", "bf16"),
        ("3b", "fp8"),
    ]


def test_fp8_is_rejected_on_devices_without_it(packages):
    with pytest.raises(ValidationError, match="is not supported by"):
        plan_measurements(BenchOptions(peers=packages, precision="bf16,fp8-row"), CPU)
