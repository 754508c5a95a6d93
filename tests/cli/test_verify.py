from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from echelon.cli import app
from echelon.config.sections import OptimizerConfig
from echelon.layout import ValidationError
from echelon.models import model_config
from echelon.planning.planner import find_plans
from echelon.verification.layout_case import case_for_layout
from echelon.verification.verify_request import DEFAULT_LAYOUTS, VerifyRequest

OWN = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 1))
    def forward(self, x):
        return self.net(x).square().sum(), torch.tensor(len(x))

def build():
    return Model()

def mistaken():
    raise ValueError("the user's own mistake")

def batch(rows, seed):
    return {"x": torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed))}
"""


def invoke(*args):
    return CliRunner().invoke(app, ["verify", *args])


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path / 'own.py'}"


def test_json_has_a_verdict_per_layout(own):
    shown = invoke("--model", f"{own}:build", "--layouts", "dp=2; dp=2,zero=3,accumulate=2", "--json")
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert found.keys() == {"passed", "layouts", "replaced"}
    assert found["passed"] is True
    assert [row["layout"] for row in found["layouts"]] == ["dp=2", "dp=2,zero=3,accumulate=2"]
    for row in found["layouts"]:
        errors = ("max_error", "max_relative", "tolerance", "first_difference")
        assert row.keys() == {"layout", "passed", *errors, "seconds", "ran", "folded", "model", "replaced", "untested"}
        assert (row["passed"], row["first_difference"]) == (True, None)
        assert 0 <= row["max_error"] <= 1e-10
        assert 0 <= row["max_relative"] <= 1e-9


def test_a_failure_prints_a_table_and_sets_the_exit_code():
    shown = invoke("--layouts", "dp=2,zero=1", "--leave-out", "shard:reduce_scatter")
    assert shown.exit_code == 1
    model, line, reason, last = shown.stdout.splitlines()
    assert model.startswith("model llama-tiny-reduced: 4 layers, width 64, 4 heads (2 kv)")
    assert line.startswith("FAIL  dp=2,zero=1")
    assert "first difference: gradient of " in reason
    assert reason.endswith("axis dp")
    assert last.startswith("0 of 1 layouts pass")


def test_what_could_not_be_compared_is_null_in_json_and_not_infinity(own):
    shown = invoke("--model", f"{own}:mistaken", "--layouts", "dp=2", "--json")
    assert shown.exit_code == 1
    found = json.loads(shown.stdout, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    (row,) = found["layouts"]
    assert (row["passed"], row["max_error"], row["first_difference"]) == (False, None, None)
    assert row["trouble"].count("Traceback") == 1
    assert row["trouble"].endswith("ValueError: the user's own mistake")


def test_all_errors_of_a_request_are_reported_at_once(own):
    shown = invoke(
        "--model",
        f"{own}:biuld",
        "--layouts",
        "dp=2,zerro=1; pp=2,schedule=2bw,offload=optimizer",
        "--leave-out",
        "dp:al_reduce",
        "--json",
    )
    assert shown.exit_code == 2
    lines = shown.stderr.splitlines()
    assert json.loads(shown.stdout) == {"errors": lines}
    for word in (
        "leave-out=dp:al_reduce",
        "tp/2 or pp[0+1]",
        'did you mean "build"?',
        'did you mean "zero"?',
        "older weights are in use",
    ):
        assert any(word in line for line in lines), (word, lines)


def test_the_configuration_is_verified(tmp_path):
    (tmp_path / "c.toml").write_text(
        'model = "gpt-tiny"\nlayout = "dp=2,zero=2,accumulate=3"\nbatch = 12\nclip = 0.25\n'
        "dropout = 0.2\ntied = false\n"
        '[optimizer]\nname = "sgd"\nlr = 0.5\nmomentum = 0.9\n'
    )
    request = VerifyRequest(config=tmp_path / "c.toml").resolve()
    case, layouts = request.case, request.layouts
    assert not request.replaced or [each.key for each in request.replaced] == ["dtype"]
    assert [str(layout) for layout in layouts] == ["dp=2,zero=2,microbatch=2,accumulate=3"]
    assert (case.clip, case.optimizer) == (0.25, OptimizerConfig(name="sgd", lr=0.5, momentum=0.9))
    assert (case.model.family, case.model.dropout, case.model.tied) == ("gpt", 0.2, False)
    assert (case.model.width, case.model.layers) == (64, 4)
    # The command line overrides it.
    request = VerifyRequest(config=tmp_path / "c.toml", model="llama-tiny", layouts="tp=2; dp=2").resolve()
    case, layouts = request.case, request.layouts
    assert (case.model.family, [str(layout) for layout in layouts]) == ("llama", ["dp=1,tp=2", "dp=2"])
    shown = invoke(str(tmp_path / "c.toml"), "--json")
    assert shown.exit_code == 0, shown.output
    assert [row["layout"] for row in json.loads(shown.stdout)["layouts"]] == ["dp=2,zero=2,microbatch=2,accumulate=3"]


def test_the_configured_optimizer_is_verified_on_a_custom_model(own, tmp_path):
    (tmp_path / "c.toml").write_text(f'model = "{own}:build"\nclip = 0.5\n[optimizer]\nname = "sgd"\n')
    request = VerifyRequest(config=tmp_path / "c.toml").resolve()
    case, layouts = request.case, request.layouts
    assert (case.model, case.batch_function, case.clip, case.optimizer.name) == (
        f"{own}:build",
        f"{own}:batch",
        0.5,
        "sgd",
    )
    assert len(layouts) == len(DEFAULT_LAYOUTS.split(";"))


def test_a_large_model_is_shrunk():
    request = VerifyRequest(model="llama-70b", layouts="tp=4").resolve()
    small = case_for_layout(request.case, request.layouts[0]).case.model
    assert small.parameters < model_config.find_model("llama-tiny").parameters * 3
    assert small.family == "llama"


def test_a_large_layout_is_folded_and_every_output_says_so():
    shown = invoke("--model", "llama-70b", "--layouts", "dp=4", "--max-ranks", "2")
    assert shown.exit_code == 0, shown.output
    model, line, note, last = shown.stdout.splitlines()
    assert model.startswith("model llama-70b-reduced: 4 layers, width 64, 8 heads (2 kv)")
    assert line.startswith("PASS  dp=4 ")
    assert note.strip() == "folded: dp=4 to 2"
    assert "1 of them folded to fewer ranks or microbatches" in last


def test_a_hugging_face_config_is_reduced_as_a_named_model_is(tmp_path):
    """`plan` reads it too."""
    keys = {"hidden_size": 1024, "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8}
    keys |= {"model_type": "llama", "intermediate_size": 4096, "vocab_size": 32000, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps({**keys, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}))
    for path in (tmp_path / "config.json", tmp_path):
        request = VerifyRequest(model=str(path), layouts="tp=8,pp=4").resolve()
        small = case_for_layout(request.case, request.layouts[0]).case.model
        assert (request.case.model.layers, small.layers, small.heads, small.kv_heads) == (30, 5, 4, 2)


def test_plan_marks_no_hugging_face_model_as_runnable_that_verify_refuses(tmp_path):
    keys = {"model_type": "gpt_neox", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16}
    keys |= {"intermediate_size": 4096, "vocab_size": 32000, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    with pytest.raises(ValidationError, match="is not an architecture that our models compute"):
        VerifyRequest(model=str(tmp_path), layouts="dp=2").resolve()
    (plan,) = find_plans(str(tmp_path), "8xh100", layout="dp=8").plans
    assert not plan.runnable
    keys |= {"model_type": "llama", "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    (plan,) = find_plans(str(tmp_path), "8xh100", layout="dp=8").plans
    assert plan.runnable


@pytest.mark.parametrize("ranks", ["0", "1", "-3", "1000000"])
def test_max_ranks_is_validated_with_the_rest(ranks):
    shown = invoke("--layouts", "tp=3", "--max-ranks", ranks)
    assert shown.exit_code == 2
    assert f"max-ranks={ranks}" in shown.stderr
    assert "tp=3 does not divide 4 heads (llama-tiny)" in shown.stderr


def test_errors_of_the_configuration_are_reported_with_the_rest(tmp_path):
    (tmp_path / "c.toml").write_text("stepz = 3\n")
    shown = invoke(str(tmp_path / "c.toml"), "--layouts", "tp=3")
    assert shown.exit_code == 2
    assert 'did you mean "steps"?' in shown.stderr
    assert "tp=3 does not divide" in shown.stderr
