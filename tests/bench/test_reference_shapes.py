from __future__ import annotations

import pytest

from echelon.bench.measurement import Measurement
from echelon.bench.profile.min_bytes import min_bytes
from echelon.bench.reference_shapes import CPU_SHAPES, CUDA_SHAPES, REFERENCE_SHAPES, reference_model

REFERENCE = {  # width, layers, heads, kv heads, ffn, vocabulary; sequence, batch
    "1b": (2048, 16, 32, 8, 8192, 128256, 4096, 8),
    "3b": (3072, 28, 24, 8, 8192, 128256, 4096, 4),
    "8b": (4096, 32, 32, 8, 14336, 128256, 8192, 1),
}
BYTES = {"1b": 0.040, "3b": 0.052, "8b": 0.077}
"""seconds of the fewest bytes on an H200 that copies 4.2 TB/s, counted with another program"""


def of(name: str, **changes) -> Measurement:
    shape = REFERENCE_SHAPES[name]
    values = {"who": "echelon", "shape": name, "size": shape.size, "seq_len": shape.seq_len, "batch": shape.batch}
    return Measurement(**{**values, "precision": "bf16", **changes})


@pytest.mark.parametrize("name", REFERENCE)
def test_flops_are_the_reference_formula(name):
    width, layers, heads, kv_heads, ffn, vocab, seq, batch = REFERENCE[name]
    shape = REFERENCE_SHAPES[name]
    layer = 2 * width * width + 2 * width * kv_heads * (width // heads) + 3 * width * ffn + 2 * width
    assert shape.model.flops_per_token(seq) == 6 * (layers * layer + width + vocab * width) + 6 * layers * width * seq
    assert (shape.model.kv_heads, shape.seq_len, shape.batch) == (kv_heads, seq, batch)
    assert not shape.model.tied


def test_default_shapes_are_known_and_long_sequences_allowed():
    assert {*CPU_SHAPES, *CUDA_SHAPES} <= set(REFERENCE_SHAPES)
    assert reference_model("llama-8b", 32768).max_seq_len == 32768
    assert reference_model("llama-8b", 1024).max_seq_len == 8192


@pytest.mark.parametrize("name", REFERENCE)
def test_min_bytes_match_a_second_count(name):
    # Six in a hundred apart: the other count writes the products' weights beside their master copies.
    assert sum(min_bytes(of(name)).values()) / 4.2e12 == pytest.approx(BYTES[name], rel=0.06)


def test_min_bytes_follow_dtypes():
    wide, narrow = min_bytes(of("1b")), min_bytes(of("1b", states="bfloat16"))
    assert narrow["optimizer"] == wide["optimizer"] * 18 / 26
    assert wide["casts and copies"] == 0
    assert min_bytes(of("1b", precision="fp8"))["casts and copies"] > 0
    assert min_bytes(of("1b", precision="fp32"))["norm"] == 2 * wide["norm"]


def test_a_measurement_round_trips_as_a_line():
    request = of("8b", recompute="full", device="cuda", peer_folder="a folder")
    assert Measurement.from_line(request.to_line()) == request
    assert str(request) == "8b, bf16, echelon"
    assert request.tokens == 8192
