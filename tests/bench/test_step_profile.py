from __future__ import annotations

import json
import re
from dataclasses import asdict, replace

import pytest

from echelon.bench.measurement import Measurement
from echelon.bench.profile.breakdown import Breakdown, KernelTime, StepPart, from_dict, from_json, to_json
from echelon.bench.profile.breakdown_svg import as_svg
from echelon.bench.profile.kernel_classes import CATEGORIES
from echelon.bench.profile.kernel_trace import KernelSpan, share_time
from echelon.bench.tables.breakdown_table import breakdown_table, heading, remarks

TINY = Measurement(who="echelon", shape="tiny", size="llama-tiny", seq_len=64, batch=2, precision="fp32")


@pytest.fixture
def one() -> Breakdown:
    seconds = {"matmuls": 0.36, "attention": 0.1, "other": 0.003, "idle": 0.004}
    floor = {"matmuls": 0.34, "attention": 0.104}
    return Breakdown(
        shape="1b",
        seq=4096,
        batch=8,
        precision="bf16",
        recompute="none",
        states="float32",
        device="NVIDIA H200",
        torch="2.11.0",
        step_s=0.465,
        copy=4.2e12,
        parts=tuple(
            StepPart(name=name, seconds=seconds.get(name, 0.0), floor_s=floor.get(name, 0.0)) for name in CATEGORIES
        ),
        kernels=(KernelTime(name="strange<&>", part="other", calls=16, seconds=0.003),),
    )


def test_a_file_holds_all_of_it(one):
    text = json.dumps(to_json([one, one]))
    assert from_json(text) == [one, one]
    assert from_dict(json.loads(json.dumps(asdict(one)))) == one
    assert one.total == pytest.approx(0.467)
    assert one.floor == pytest.approx(0.444)


def test_the_picture_is_made_from_the_file_alone(one):
    again = replace(one, shape="8b", recompute="full", states="bfloat16")
    text = as_svg(from_json(json.dumps(to_json([one, again]))))
    assert text.startswith("<svg")
    assert text.endswith("</svg>\n")
    assert not re.search(r"url\(|href=|[ \t]$", text, re.MULTILINE)
    assert "1b in bf16: a step of 467.0 ms over a floor of 444.0 ms" in text
    assert "recompute=full, which the floor does not count" in text
    assert text.count(">attention<") == 2
    for number in ("360.0", "340.0", "+20.0", "−4.0", "–"):
        assert f">{number}</text>" in text
    assert "prefers-color-scheme: dark" in text


def test_no_bar_or_number_leaves_the_picture(one):
    text = as_svg([replace(one, parts=(*one.parts, StepPart(name="more", seconds=123.4, floor_s=99.9)))])
    width = int(re.search(r'width="(\d+)"', text)[1])
    bars = re.findall(r'<rect class="\w+" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', text)
    assert max(float(x) + float(w) for x, w in bars) <= width


def test_a_table_lists_unclassified_kernels(one):
    assert "a step takes 465.0 ms" in heading(one)
    made = breakdown_table(one)
    assert made.row_count == len(CATEGORIES) + 1
    assert any("3.00 ms in 16 x strange<&>" in line for line in remarks(one))


def test_a_trace_becomes_parts():
    from echelon.bench.profile.roofline import Roofline
    from echelon.bench.profile.step_profile import make_breakdown

    names = ("nvjet_a", "_norm_forward", "unknown kernel", "nvjet_a")
    found = share_time([KernelSpan(name=name, start=float(n), end=n + 0.5) for n, name in enumerate(names, 1)])
    least = Roofline(seconds={"matmuls": 0.2, "norm": 0.1}, copy_bandwidth=1e12)
    one = make_breakdown(TINY, 1.75, found, least, steps=2)
    measured = {part.name: part.seconds for part in one.parts if part.seconds}
    assert measured == pytest.approx({"matmuls": 0.5, "norm": 0.25, "other": 0.25, "idle": 0.75})
    assert {part.name: part.floor_s for part in one.parts if part.floor_s} == least.seconds
    assert one.total == pytest.approx(3.5 / 2)
    assert one.kernels[0] == KernelTime(name="nvjet_a", part="matmuls", calls=1.0, seconds=0.5)


def test_the_floor_of_a_small_step():
    from echelon.bench.profile.roofline import measure_roofline

    found = measure_roofline(TINY)
    assert {*found.seconds, "other", "idle"} == set(CATEGORIES)
    assert found.seconds["matmuls"] > found.seconds["rope"] > 0
    assert found.seconds["attention"] > 0
    assert found.copy_bandwidth > 1e8


def test_a_trace_is_taken():
    import torch

    from echelon.bench.profile.step_profile import trace_steps

    found = trace_steps(lambda: lambda: 0.0, torch.device("cpu"))
    assert "traceEvents" in found
