"""Every public name has a docstring with an example, and the examples run."""

from __future__ import annotations

import contextlib
import doctest
import sys
from types import FunctionType

import pytest
import torch

import echelon as ec
from echelon.launch.rank_pool import RankPool


def examples(name: str) -> list[doctest.DocTest]:
    value = getattr(ec, name)
    names = {**vars(sys.modules[value.__module__]), "ec": ec, "torch": torch}
    return [test for test in doctest.DocTestFinder(recurse=False).find(value, name, globs=names) if test.examples]


@pytest.mark.parametrize("name", ec.__all__)
def test_the_example_runs(name, pool: RankPool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("echelon.verification.verifier.RankPool", lambda **_: contextlib.nullcontext(pool))
    (example,) = examples(name)
    outcome = doctest.DocTestRunner().run(example)
    assert outcome.attempted > 0
    assert outcome.failed == 0


def test_entry_points_are_plain_functions():
    assert all(isinstance(getattr(ec, name), FunctionType) for name in ("plan", "train", "verify", "wrap"))
