"""Every path and every name on the architecture page exists in the source."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "echelon"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
NAMES = re.findall(r"`([\w/]+\.py)`: `([\w.]+)`", PAGE)


def defined(path: Path) -> set[str]:
    """Functions, classes and methods of a module, and names that it assigns."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w/]+/[\w]+\.py)`", PAGE))))
def test_paths_exist(path: str) -> None:
    assert (SOURCE / path).exists() or (ROOT / path).exists()


@pytest.mark.parametrize(("path", "name"), NAMES)
def test_names_are_defined(path: str, name: str) -> None:
    assert name in defined(SOURCE / path)


def test_the_page_names_enough() -> None:
    assert len(NAMES) > 25
