"""What compression keeps and moves, as plans ask for it: without torch."""

from __future__ import annotations

from dataclasses import fields

import pytest

from echelon.memory.compression import cost as compression_cost
from echelon.memory.compression.cost import Saved


@pytest.mark.parametrize("category", [field.name for field in fields(Saved)])
def test_bytes_of_a_category_for_plans(category: str) -> None:
    saved = Saved(**{category: 1e6})
    for compress in compression_cost.KINDS:
        for size in (2, 4):
            kept, plain = compression_cost.kept_bytes(saved, compress, size), compression_cost.plain_bytes(saved, size)
            assert kept <= plain * (1 + (category == "whole") / 8 / size)
            assert (compression_cost.moved_bytes(saved, compress, size) == 0.0) == (kept == plain)


def test_bytes_of_values_for_plans() -> None:
    values = Saved(values=1e6)
    assert compression_cost.kept_bytes(values, "lossless+fp8", 2) == 1e6 * (1 + 4 / 256)
    assert compression_cost.moved_bytes(values, "lossless+fp8", 2) == 2e6 * (2 + 1 + 4 / 256)
    assert (
        compression_cost.kept_bytes(values, "lossless+fp16", 2),
        compression_cost.moved_bytes(values, "lossless+fp16", 2),
    ) == (
        2e6,
        0.0,
    )


def test_what_a_vgg_moves_more_is_about_one_reading_of_what_it_keeps() -> None:
    """ReLU's backward, which reads bits, pays for a part of it."""
    saved = Saved(rectified=7.4e6, signs=6.1e6, maxima=1.5e6, values=1.5e6)
    for bytes_each in (2, 4):
        for compress in compression_cost.KINDS[1:]:
            moved = compression_cost.moved_bytes(saved, compress, bytes_each)
            assert moved < 1.3 * compression_cost.plain_bytes(saved, bytes_each)
            assert (
                compression_cost.kept_bytes(saved, compress, bytes_each)
                < compression_cost.plain_bytes(saved, bytes_each) / 1.7
            )
