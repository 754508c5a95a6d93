"""Rules of the project that a reviewer would otherwise have to remember."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "echelon"
FILES = sorted(SOURCE.rglob("*.py"))
CODE = [*FILES, *(path for folder in ("tests", "bench", "docs", "examples") for path in (ROOT / folder).rglob("*.py"))]

MAY_IMPORT: dict[str, set[str]] = {
    "layout": set(),
    "compat": set(),
    "draw": set(),
    "rng": set(),
    "input_file": set(),
    "kernels": {"compat"},
    "launch": {"layout", "compat"},
    "faults": {"layout", "launch", "compat"},
    "moe": {"layout", "kernels", "rng"},
    "precision": {"layout", "kernels", "compat"},
    "models": {"input_file", "layout", "kernels", "moe", "rng", "compat"},
    "data": {"input_file", "layout", "models", "rng"},
    "memory": {"layout", "kernels", "models", "rng", "compat"},
    "parallel": {"faults", "layout", "kernels", "models", "moe", "memory", "precision", "rng", "compat"},
    "optim": {"layout", "kernels", "memory", "parallel", "rng", "compat"},
    "pipeline": {
        *("input_file", "draw", "faults", "layout", "kernels", "models", "parallel", "precision", "rng", "compat"),
    },
    "checkpoint": {"input_file", "faults", "layout", "memory", "models", "optim", "parallel"},
    "config": {"data", "input_file", "layout", "memory", "models", "optim", "pipeline"},
    "planning": {
        *("input_file", "draw", "layout", "kernels", "models", "moe", "memory", "optim", "parallel", "pipeline", "rng"),
        "compat",
    },
    "training": {
        *("layout", "kernels", "models", "data", "memory", "parallel", "optim", "pipeline", "launch", "planning"),
        *("config", "moe", "precision", "rng", "compat", "faults", "checkpoint", "input_file"),
    },
    "verification": {
        *("config", "layout", "kernels", "models", "parallel", "pipeline", "precision", "optim", "launch", "training"),
        "rng",
    },
    "bench": {"config", "draw", "layout", "models", "memory", "parallel", "training", "planning", "compat"},
    "report": {"draw", "pipeline", "training"},
    "cli": {
        *("config", "faults", "layout", "models", "pipeline", "launch", "training", "verification", "planning"),
        *("bench", "report", "checkpoint", "input_file"),
    },
}
"""the packages that each package may import: `layout` imports none, `cli` is on top"""
WITHOUT_TORCH = (
    "echelon",
    "echelon.layout",
    "echelon.models",
    "echelon.models.model_dir",
    "echelon.models.hf.hf_config_reader",
    "echelon.models.hf.hf_config_writer",
    "echelon.moe",
    "echelon.cli",
    "echelon.config.run_config",
    "echelon.training.run.resume",
    "echelon.checkpoint.checkpoint_index",
    "echelon.checkpoint.storage",
    "echelon.verification.verify_request",
    "echelon.parallel.auto_sharding.solve_sharding",
    "echelon.parallel.auto_sharding.split_overrides",
    "echelon.pipeline",
    "echelon.pipeline.schedules",
    "echelon.pipeline.partition",
    "echelon.pipeline.stage_replication",
    "echelon.pipeline.simulate",
    "echelon.planning",
    "echelon.planning.cluster.cluster",
    "echelon.planning.cluster.cluster_file",
    "echelon.planning.search.memory_savings",
    "echelon.planning.model.model_sources",
    "echelon.planning.calibrate.calibration",
    "echelon.planning.cluster.device_bench",
    "echelon.bench.bench_request",
    "echelon.bench.bench_rows",
    "echelon.bench.profile.breakdown_svg",
    "echelon.report.run_picture",
    "echelon.report.expert_load_html",
    "echelon.report.expert_load_text",
)
COSTS = tuple(
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) for path in FILES if path.name == "cost.py"
)


def project() -> dict[str, object]:
    found: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def constraints() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name: Version(version) for name, version in pairs}


def requirements() -> list[Requirement]:
    found = project()
    extras = found["optional-dependencies"]
    assert isinstance(extras, dict)
    assert isinstance(found["dependencies"], list)
    return [Requirement(text) for text in [*found["dependencies"], *(t for texts in extras.values() for t in texts)]]


def test_tried_versions_are_in_range() -> None:
    tried = constraints()
    for requirement in requirements():
        assert tried[requirement.name] in requirement.specifier
    assert tried.keys() == {requirement.name for requirement in requirements()}


def test_the_core_has_few_dependencies() -> None:
    dependencies = project()["dependencies"]
    assert isinstance(dependencies, list)
    names = {Requirement(text).name for text in dependencies}
    assert names == {"torch", "numpy", "safetensors", "rich", "typer"}
    assert project()["requires-python"] == ">=3.11"
    assert project()["license"] == "Apache-2.0"


def private_names(path: Path) -> Iterator[str]:
    """Yield the private torch names that a file imports or accesses."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [
                part for alias in node.names if alias.name.split(".")[0] == "torch" for part in alias.name.split(".")
            ]
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            names = ast.unparse(node).split(".")
        else:
            continue
        yield from (name for name in names if name.startswith("_") and not name.startswith("__"))


def test_private_torch_names_live_in_compat() -> None:
    found = {str(path.relative_to(SOURCE)): names for path in FILES if (names := sorted(set(private_names(path))))}
    assert set(found) <= {"compat.py"}, found


def test_private_names_are_detected(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("import torch._C\nfrom torch.distributed import _x\nx = torch.distributed._y.z\n")
    assert sorted(set(private_names(path))) == ["_C", "_x", "_y"]


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_hold_one_idea_each(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 600, "look for the second idea in it"
    assert not {"utils", "util", "common", "helpers", "helper", "manager", "misc"} & {*path.stem.split("_")}


def imports(path: Path) -> Iterator[str]:
    """Yield the packages of echelon that a file imports, anywhere in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "echelon":
            parts = (node.module or "").split(".")
            yield from parts[1:2] or (alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("echelon."))


def test_imports_between_packages() -> None:
    wrong = []
    for path in FILES:
        package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if package in ("__init__", "__main__"):
            continue
        known = {name for name in imports(path) if (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").is_file()}
        wrong += [f"{path.relative_to(SOURCE)} -> {name}" for name in sorted(known - MAY_IMPORT[package] - {package})]
    assert wrong == []


def test_models_are_independent_of_ranks() -> None:
    for path in (SOURCE / "models").glob("*.py"):
        assert "torch.distributed" not in path.read_text(encoding="utf-8"), path.name


def test_light_imports_leave_torch_out() -> None:
    """Planning, validation and --help start quickly: these modules import no torch, checked in one process."""
    names = (*WITHOUT_TORCH, *COSTS)
    loop = f"for name in {names!r}:\n    __import__(name)\n    assert 'torch' not in sys.modules, name"
    code = f"import sys\n{loop}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_the_public_api_is_there() -> None:
    import echelon

    assert sorted(echelon.__all__) == echelon.__all__
    for name in echelon.__all__:
        assert getattr(echelon, name) is not None
    with pytest.raises(AttributeError, match="no attribute"):
        _ = echelon.nothing


def test_no_generated_file_is_tracked() -> None:
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    assert {".venv/", "runs/", "__pycache__/"} <= set(ignored)
    assert not re.search(r"/(home|root|work)/", (ROOT / "README.md").read_text(encoding="utf-8"))
