"""Whether a plan is near what was measured: what makes it far, that its interval is wider, that every view says so."""

from __future__ import annotations

import io
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from echelon.layout import Layout
from echelon.planning.calibrate import confidence, published_runs
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


OWN = "Echelon was measured on h200 alone"


def priced(cluster: Cluster, layout: str = "dp=8", **options) -> Plan:
    setup = {"shape": resolve_shape("llama-1b"), "seq_len": 4096, "program": "megatron", **options}
    return price(Scenario(cluster=cluster, layout=Layout.parse(layout), **setup))


@pytest.mark.parametrize(
    ("cluster", "layout", "options", "words"),
    [
        ("8xmi300x", "dp=8", {}, ["no run on mi300x was measured", "no run of megatron on amd was measured"]),
        ("8xh100", "dp=8", {"program": "unknown"}, ["no run of this program was measured"]),
        ("8xh100", "tp=4,tp_kind=2d,dp=2", {}, ["no run with tp_kind=2d was measured"]),
        ("8xh100", "pp=2,schedule=pipedream,dp=4", {}, ["no run with schedule=pipedream was measured"]),
        (
            "8xh100",
            "cp=8",
            {"seq_len": 2 * MAX_MEASURED_SEQ_LEN},
            ["sequences of up to 1,048,576 tokens were measured"],
        ),
        ("16384xh100", "dp=16384", {}, ["runs of up to 12,288 devices were measured"]),
        ("64xh100:eth", "dp=64", {}, ["between nodes of hopper, 12.5 GB/s per device and more were measured"]),
        ("8xh100", "dp=8", {"program": "echelon"}, ["Echelon was measured on one device alone"]),
        ("1xv100", "dp=1", {"program": "echelon"}, [OWN, "no run in bf16 on volta by Echelon was measured"]),
        ("1xa100-80", "dp=1", {"program": "echelon"}, [OWN]),
        (
            "1xh200",
            "dp=1",
            {"program": "echelon", "precision": "fp4"},
            ["no run in fp4 on hopper by Echelon was measured"],
        ),
        ("8xh200", "dp=8,offload=params", {}, ["no run with offload=params was measured"]),
        (
            "8xv100",
            "dp=8",
            {"precision": "bf16"},
            ["no run in bf16 on volta was measured", "no run of megatron on volta was measured"],
        ),
        ("8xb200", "dp=8", {"program": "torch"}, ["no run of torch on blackwell was measured"]),
    ],
)
def test_what_is_far_is_named_and_widens_the_interval(cluster, layout, options, words):
    plan, near = priced(parse_cluster(cluster), layout, **options), priced(parse_cluster("8xh100"))
    assert plan.extrapolated == words
    assert near.extrapolated == []
    assert plan.spread > near.spread


def test_a_device_file_that_only_has_the_name_of_a_kind_is_far():
    quick = parse_cluster("8xh100").with_devices(lambda device: replace(device, flops={"bf16": 5e15}))
    assert priced(quick).extrapolated == ["h100 was measured with other rates than these"]


def test_every_kind_of_a_mixed_cluster_counts():
    mixed = replace(
        parse_cluster("8xh100"),
        node_groups=(*parse_cluster("8xh100").node_groups, *parse_cluster("8xmi300x").node_groups),
    )
    assert priced(mixed).extrapolated == [
        "no run on mi300x was measured",
        "no run on h100 and mi300x together was measured",
    ]


def test_the_interval_widens_with_the_number_of_reasons_and_with_the_distance():
    h100 = parse_cluster("8xh100")
    one, two = priced(h100, program="unknown"), priced(h100, "dp=2,tp=4,tp_kind=2d", program="unknown")
    assert two.spread > one.spread > priced(h100).spread
    near, far = (priced(parse_cluster(f"{n}xh100"), f"dp={n}") for n in (16384, 65536))
    assert near.extrapolated == far.extrapolated
    assert far.spread > near.spread


def test_the_narrow_interval_is_that_of_one_h200_alone():
    """It was that of any single device, and of layouts that offload."""
    own = {"layout": "dp=1", "program": "echelon"}

    def half_width(cluster: str, **more: str) -> float:
        return math.log(priced(parse_cluster(cluster), **(own | more)).spread)

    narrow = half_width("1xh200")
    assert all(half_width(f"1x{kind}") > 1.5 * narrow for kind in ("v100", "a100-80", "h100", "b200"))
    assert half_width("1xh200", layout="dp=1,offload=params") > 1.5 * narrow
    assert half_width("8xh200", layout="dp=8") > 1.5 * narrow


def test_what_is_called_measured_is_in_the_table():
    """Programs, precisions, networks and sizes of the published runs, as confidence.py lists them."""
    table = Path(__file__).parents[2] / "bench" / "published" / "measurements.csv"
    runs = published_runs.parse_runs(published_runs.read_runs(table))[0]
    scenarios = [run.scenario for run in runs if run.seconds]
    programs, precisions, slowest = defaultdict(set), defaultdict(set), {}
    for one in scenarios:
        generation = one.cluster.device.generation
        programs[one.program].add(generation)
        precisions[generation].add(one.precision)
        if one.layout.world > one.cluster.per_node:
            bandwidth = one.cluster.inter_node.bandwidth
            slowest[generation] = min(slowest.get(generation, bandwidth), bandwidth)
    del programs["unknown"]
    assert programs == {name: set(kinds) for name, kinds in confidence.MEASURED_PROGRAMS.items()}
    assert precisions == {name: set(dtypes) for name, dtypes in confidence.MEASURED_PRECISIONS.items()}
    assert slowest == pytest.approx(confidence.SLOWEST_NETWORKS)
    assert max(one.layout.world for one in scenarios) == confidence.MAX_MEASURED_DEVICES
    assert max(one.seq_len for one in scenarios) == MAX_MEASURED_SEQ_LEN
    assert {one.cluster.device.name for one in scenarios} == set(confidence.MEASURED_KINDS)


def test_views_say_whether_a_plan_is_near_what_was_measured():
    far, near = priced(parse_cluster("8xmi300x")), priced(parse_cluster("8xh100"))
    assert plan_labels.describe_confidence(far) == (
        "extrapolated: no run on mi300x was measured; no run of megatron on amd was measured"
    )
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
    assert plan.extrapolated == ["no run on zeta1 or its generation was measured"]
    stated = priced(cluster_from_toml(DATA_SHEET + 'generation = "amd"\n'))
    assert stated.extrapolated[0] == "no run on zeta1 was measured"
    # Generations reach shares of their peaks that differ by up to two: which one it is like is most of the doubt.
    assert math.sqrt(plan.high / plan.low) > 1.5 > math.sqrt(stated.high / stated.low)
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
    for kind, program in (("a100-80", "megatron"), ("h100", "torch"), ("b200", "megatron"), ("tpu-v5p", "xla")):
        scenario = priced(parse_cluster(f"8x{kind}"), program=program).scenario
        assert extrapolations(scenario) == []
