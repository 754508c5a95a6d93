"""Bounds on names, sizes and words that keep the packages readable."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "echelon"
MODULES = sorted(SOURCE.rglob("*.py"))
MAX_MODULES, MIN_LINES, MAX_LINES = 20, 25, 600
MAY_REPEAT = {"cost.py", "__init__.py"}
PYTHON_FOLDERS = ("src", "docs", "tests", "bench", "examples")
PLACEHOLDERS = ("file.py", "module.py", "my_model.py")
"""names that stand for a user's file"""
BANNED = ("by chance", "told", "nobody", "so many", "let go", "goes on", "made again", "is less than none")
"""phrases that the field's words replace (glossary)"""


def repeated(names: Counter[str]) -> list[str]:
    return sorted(name for name, count in names.items() if count > 1)


def test_class_names_are_unique() -> None:
    classes: dict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(str(path.relative_to(SOURCE)))
    assert {name: paths for name, paths in classes.items() if len(paths) > 1} == {}


def test_file_names_are_unique() -> None:
    assert repeated(Counter(path.name for path in MODULES if path.name not in MAY_REPEAT)) == []


def test_packages_are_small() -> None:
    modules = Counter(str(path.parent.relative_to(SOURCE)) for path in MODULES if path.name != "__init__.py")
    assert {package: count for package, count in modules.items() if count > MAX_MODULES} == {}


def test_modules_hold_one_idea_each() -> None:
    lines = {
        str(path.relative_to(SOURCE)): len(path.read_text(encoding="utf-8").splitlines())
        for path in MODULES
        if not path.name.startswith("__")
    }
    assert {name: n for name, n in lines.items() if not MIN_LINES <= n <= MAX_LINES} == {}


def test_files_that_docstrings_and_comments_name_exist() -> None:
    files = [path.as_posix() for name in PYTHON_FOLDERS for path in (ROOT / name).rglob("*.py")]
    stale = [
        f"{path.relative_to(ROOT)}:{token.start[0]} {name}"
        for path in MODULES
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
        if token.type == tokenize.COMMENT or token.string.startswith('"""')
        for name in re.findall(r"[\w/]*\w\.py\b", token.string)
        if name not in PLACEHOLDERS and not any(file.endswith(f"/{name}") for file in files)
    ]
    assert stale == []


@pytest.mark.parametrize("phrase", BANNED)
def test_the_glossary_is_followed(phrase: str) -> None:
    # Also inside identifiers: an underscore ends a word.
    pattern = re.compile("(?<![a-z])" + phrase.replace(" ", r"[\s#_]+") + "(?![a-z])", re.IGNORECASE)
    texts = [
        path
        for name in PYTHON_FOLDERS
        for path in (ROOT / name).rglob("*")
        if path.suffix in (".py", ".md", ".html", ".svg") and path != Path(__file__)
    ]
    found = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}"
        for path in texts
        for text in [path.read_text(encoding="utf-8")]
        for match in pattern.finditer(text)
    ]
    assert found == []
