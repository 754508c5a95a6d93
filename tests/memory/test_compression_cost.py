"""What compression keeps and moves, as plans ask for it: without torch."""

from __future__ import annotations

from dataclasses import fields

import pytest

from echelon.memory.compression import cost as compression_cost
from echelon.memory.compression.cost import SavedElements


@pytest.mark.parametrize("category", [field.name for field in fields(SavedElements)])
def test_stored_bytes_by_category(category: str) -> None:
    saved = SavedElements(**{category: 1e6})
    for compress in compression_cost.COMPRESSIONS:
        for size in (2, 4):
            kept, plain = (
                compression_cost.compressed_bytes(saved, compress, size),
                compression_cost.uncompressed_bytes(saved, size),
            )
            assert kept <= plain * (1 + (category == "pending_relu_outputs") / 8 / size)
            assert (compression_cost.extra_traffic_bytes(saved, compress, size) == 0.0) == (kept == plain)


def test_stored_bytes_of_values() -> None:
    values = SavedElements(values=1e6)
    assert compression_cost.compressed_bytes(values, "lossless+fp8", 2) == 1e6 * (1 + 4 / 256)
    assert compression_cost.extra_traffic_bytes(values, "lossless+fp8", 2) == 2e6 * (2 + 1 + 4 / 256)
    assert (
        compression_cost.compressed_bytes(values, "lossless+fp16", 2),
        compression_cost.extra_traffic_bytes(values, "lossless+fp16", 2),
    ) == (
        2e6,
        0.0,
    )


def test_extra_traffic_of_a_vgg_is_about_one_read_of_what_it_stores() -> None:
    """ReLU's backward, which reads bits, pays for a part of it."""
    saved = SavedElements(relu_outputs=7.4e6, relu_signs=6.1e6, max_pool_outputs=1.5e6, values=1.5e6)
    for bytes_each in (2, 4):
        for compress in compression_cost.COMPRESSIONS[1:]:
            moved = compression_cost.extra_traffic_bytes(saved, compress, bytes_each)
            assert moved < 1.3 * compression_cost.uncompressed_bytes(saved, bytes_each)
            assert (
                compression_cost.compressed_bytes(saved, compress, bytes_each)
                < compression_cost.uncompressed_bytes(saved, bytes_each) / 1.7
            )
