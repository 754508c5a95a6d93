"""The truth is a plain loop: its numbers are what torch alone gives, and it leans on nothing that it judges."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from echelon import models
from echelon.config.sections import OptimizerConfig
from echelon.models import model_config
from echelon.verification import truth
from echelon.verification.verify_case import VerifyCase

SHAPE = replace(model_config.find_model("llama-tiny"), layers=1, width=16, heads=2, ffn=16, max_seq_len=40)


@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_the_truth_equals_a_plain_loop(tmp_path: Path, clip: float) -> None:
    rule = OptimizerConfig(name="sgd", lr=0.5, weight_decay=0.0)
    case = VerifyCase(model=SHAPE, optimizer=rule, steps=2, clip=clip)
    truth.write_truth(case, num_sequences=4, accumulate=2, path=tmp_path / "truth.safetensors")
    record = load_file(tmp_path / "truth.safetensors")
    model = models.build(SHAPE, dtype=torch.float64, seed=case.seed)
    for step in range(2):
        model.zero_grad()
        total, count = model(**case.batch(step, 4))
        (total / count).backward()
        assert record[f"{step}/loss"].item() == pytest.approx((total / count).item(), rel=1e-12)
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
        assert record[f"{step}/norm"].item() == pytest.approx(norm.item(), rel=1e-12)
        factor = min(1.0, clip / (norm.item() + 1e-6)) if clip else 1.0
        with torch.no_grad():
            for name, p in model.named_parameters():
                torch.testing.assert_close(record[f"{step}/gradient/{name}"], gradients[name], rtol=1e-9, atol=1e-12)
                p -= 0.5 * factor * gradients[name]
                torch.testing.assert_close(record[f"{step}/parameter/{name}"], p.detach(), rtol=1e-9, atol=1e-12)


def test_the_truth_imports_no_parallel_code() -> None:
    tree = ast.parse(Path(truth.__file__).read_text())
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module == "echelon" for a in n.names}
    assert {module for module in modules if module.startswith("echelon.")} == {
        "echelon.verification.verify_case",
        "echelon.models.layers",
        "echelon.verification.reference_optimizer",
    }
    assert names == {"rng"}
