"""`verify` in fp64 passes every layout; with one reduction left out, it fails and names parameter and axis."""

import pytest

import echelon as ec

LAYOUTS = "dp=2,accumulate=4; dp=3,zero=2; tp=2; dp=2,tp=2,zero=3,recompute=full"


@pytest.fixture(scope="module")
def report(pool):
    return ec.verify("llama-tiny", LAYOUTS, pool=pool, steps=3)


def test_every_layout_passes(report):
    assert [verdict.layout for verdict in report.verdicts] == [
        "dp=2,accumulate=4",
        "dp=3,zero=2",
        "dp=1,tp=2",
        "dp=2,zero=3,tp=2,recompute=full",
    ]
    assert report.passed
    assert all(verdict.passed and verdict.first_difference is None for verdict in report.verdicts)


def test_equal_means_1e_10(report):
    # Not zero either: a comparison of a thing with itself would pass too.
    assert all(0 < verdict.max_error <= 1e-10 for verdict in report.verdicts)


@pytest.mark.parametrize(
    ("layout", "leave_out", "axis"),
    [
        ("dp=2", "replica:all_reduce", "dp"),
        ("dp=2,zero=2", "shard:reduce_scatter", "dp"),
        ("dp=2,zero=3", "shard:all_gather", "dp"),
        ("tp=2,sp=0", "tp:all_reduce", "tp"),
        ("dp=2,tp=2", "replica:all_reduce", "dp"),
        ("dp=2,tp=2,zero=1", "tp:reduce_scatter", "tp"),
    ],
)
def test_a_missing_reduction_is_named(pool, layout, leave_out, axis):
    report = ec.verify("gpt-tiny", layout, pool=pool, leave_out=leave_out, steps=1)
    (verdict,) = report.verdicts
    assert not report.passed
    assert verdict.axis == axis
    assert verdict.first_difference.name
    assert verdict.first_difference.error > 1e-10
    shown = verdict.to_json()["first_difference"]
    assert shown == {
        "parameter": verdict.first_difference.name,
        "axis": axis,
        "error": verdict.first_difference.error,
        "relative": verdict.first_difference.relative,
    }


def test_the_first_parameter_is_the_one_whose_sum_is_missing(pool):
    # Under sequence parallelism each tp rank has a part of the norms' gradients; nothing else goes through this sum.
    (verdict,) = ec.verify("llama-tiny", "tp=2", pool=pool, leave_out="tp:all_reduce", steps=1).verdicts
    assert not verdict.passed
    assert verdict.axis == "tp"
