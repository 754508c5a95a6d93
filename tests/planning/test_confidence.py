"""Whether a plan is near what was measured: what makes it far, that its interval is wider, that every view says so."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from echelon.layout import Layout
from echelon.planning.calibrate.confidence import MAX_MEASURED_SEQ_LEN, extrapolations
from echelon.planning.cluster.cluster import Cluster, MeasuredCurves, parse_cluster
from echelon.planning.cluster.cluster_file import cluster_from_toml, cluster_to_toml
from echelon.planning.model.model_sources import resolve_shape
from echelon.planning.priced_plan import Plan, price
from echelon.planning.scenario import Scenario
from echelon.planning.show import plan_labels, plans_html, plans_text

DATA_SHEET = """
[[part]]
name = "zeta1"
per_node = 8
bf16_tflops = 700
memory_gib = 96
memory_tbps = 3
inside_bandwidth_gbps = 300
outside_bandwidth_gbps = 25
"""
CURVES = MeasuredCurves(matmul=((4096, 4096, 4096, 450e12), (1024, 4096, 4096, 300e12)), memory=2.5e12)


def priced(cluster: Cluster, layout: str = "dp=8", **options) -> Plan:
    setup = {"shape": resolve_shape("llama-1b"), "seq_len": 4096, **options}
    return price(Scenario(cluster=cluster, layout=Layout.parse(layout), **setup))


@pytest.mark.parametrize(
    ("cluster", "layout", "options", "words"),
    [
        ("8xmi300x", "dp=8", {}, ["no run on mi300x was measured"]),
        ("8xh100", "dp=8", {"program": "unknown"}, ["no run of this program was measured"]),
        ("8xh100", "tp=4,tp_kind=2d,dp=2", {}, ["no run with tp_kind=2d was measured"]),
        ("8xh100", "pp=2,schedule=pipedream,dp=4", {}, ["no run with schedule=pipedream was measured"]),
        ("8xh100", "cp=8", {"seq_len": 2 * MAX_MEASURED_SEQ_LEN}, ["sequences of up to 262,144 tokens were measured"]),
        ("16384xh100", "dp=16384", {}, ["runs of up to 12,288 devices were measured"]),
    ],
)
def test_what_is_far_is_named_and_widens_the_interval(cluster, layout, options, words):
    plan, near = priced(parse_cluster(cluster), layout, **options), priced(parse_cluster("8xh100"))
    assert plan.extrapolated == words
    assert near.extrapolated == []
    assert plan.spread > near.spread


def test_views_say_whether_a_plan_is_near_what_was_measured():
    far, near = priced(parse_cluster("8xmi300x")), priced(parse_cluster("8xh100"))
    assert plan_labels.describe_confidence(far) == "extrapolated: no run on mi300x was measured"
    for best, other, marks in ((far, near, 1), (near, far, 1), (near, near, 0)):
        console = Console(file=io.StringIO(), width=100)
        console.print(plans_text([best, other], width=100))
        lines, words = console.file.getvalue().splitlines(), plan_labels.describe_confidence(best)
        interval = next(number for number, line in enumerate(lines) if line.startswith("a step"))
        assert words in lines[interval + 1 : interval + 3]
        assert sum("extrapolated" in line for line in lines) == marks + (best is far)
        page = plans_html([best, other], title="plans")
        assert f"80 % of runs: {words}." in page
        assert page.count('<span class="mark yellow">extrapolated</span>') == 2 * marks


def test_a_device_by_its_data_sheet_is_extrapolated_until_it_is_measured():
    cluster = cluster_from_toml(DATA_SHEET)
    assert cluster.device.generation == "npu"
    plan = priced(cluster)
    assert plan.extrapolated == ["no run on zeta1 was measured"]
    # The share of accelerators is what GEMMs reach: not that of the fastest generation.
    as_hopper = priced(cluster.with_devices(lambda device: replace(device, generation="hopper")))
    assert plan.times["products"] > as_hopper.times["products"]
    measured = cluster_from_toml(cluster_to_toml(replace(cluster, curves=CURVES)))
    assert priced(measured).extrapolated == []
    assert priced(measured).spread < plan.spread
    assert priced(measured).times["products"] < plan.times["products"]  # it reaches more than was assumed
    links_alone = replace(cluster, curves=MeasuredCurves(all_reduce=((1 << 20, 1e-4),)))
    assert priced(links_alone).extrapolated == plan.extrapolated


def test_a_single_device_that_was_not_measured_has_no_narrow_interval():
    """It had that of our kernels on one H200, which is narrower than those of clusters that were measured."""
    one = {"layout": "dp=1", "program": "echelon"}
    assert priced(parse_cluster("1xh200"), **one).spread < priced(parse_cluster("8xh100")).spread
    assert priced(cluster_from_toml(DATA_SHEET), **one).spread > priced(parse_cluster("8xh100")).spread


def test_what_was_measured_is_near():
    for kind in ("a100-80", "h100", "h200", "b200", "tpu-v5p"):
        scenario = priced(parse_cluster(f"8x{kind}")).scenario
        assert extrapolations(scenario) == []
