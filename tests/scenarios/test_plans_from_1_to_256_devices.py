"""Plans from 0.1B on one device to an MoE model of 600B on 256, on 12, and on 7 after a failure."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from echelon.cli import app

QUESTIONS = {
    "gpt2-124m on one": ["gpt2-124m", "--cluster", "1xh100", "--batch", "32"],
    "8B on 8": ["llama-8b", "--cluster", "8xh100", "--batch", "64"],
    "70B on 64": ["llama-70b", "--cluster", "64xh100", "--batch", "256"],
    "a mixture of 671B on 256": [
        "deepseek-v3",
        "--cluster",
        "256xh100",
        "--batch",
        "1024",
        "--plan-only",
        "--fix",
        "cp=1",
    ],
    "8B on 12": ["llama-8b", "--cluster", "12xh100", "--batch", "96"],
    "8B on 7, after one has failed": ["llama-8b", "--cluster", "7xh100", "--batch", "64"],
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_ranked_layouts_with_reasons(name):
    result = CliRunner().invoke(app, ["plan", *QUESTIONS[name], "--json"])
    assert result.exit_code == 0, result.output
    plans = json.loads(result.stdout)["plans"]
    assert plans == sorted(plans, key=lambda plan: plan["step_s"])
    assert all(plan["fits"] for plan in plans)
    assert len(plans[0]["reasons"]) >= 2
    if name == "gpt2-124m on one":
        assert "no parallelism is needed" in " ".join(plans[0]["reasons"])


def test_the_answer_is_the_same_every_time():
    arguments = ["plan", *QUESTIONS["8B on 12"], "--json"]
    assert CliRunner().invoke(app, arguments).stdout == CliRunner().invoke(app, arguments).stdout
