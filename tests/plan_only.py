"""A grammar in which something is not built yet: today everything is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.layout import grammar


def without_offload(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(
        grammar.KEYS_BY_NAME,
        "offload",
        replace(grammar.KEYS_BY_NAME["offload"], built=("none",), missing="offloading is"),
    )
