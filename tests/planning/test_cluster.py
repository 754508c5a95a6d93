"""Clusters: names, files, this machine; every fault at once; what is written is read back the same."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import echelon as ec
from echelon.layout.validation_error import ValidationError, ValidationIssue
from echelon.planning.cluster.cluster import Cluster, MeasuredCurves, NodeGroup, device_kind, parse_cluster
from echelon.planning.cluster.cluster_file import DTYPES, GENERATIONS, cluster_from_toml, cluster_to_toml
from echelon.planning.cluster.device_kinds import DEVICE_KINDS, GIB, DeviceKind, LinkSpec


def faults(text: str) -> tuple[ValidationIssue, ...]:
    with pytest.raises(ValidationError) as caught:
        parse_cluster(text)
    return caught.value.issues


def sizes(cluster: Cluster) -> list[tuple[str, int, int]]:
    return [(part.device.name, part.nodes, part.per_node) for part in cluster.node_groups]


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8xh100", [("h100", 1, 8)]),
        ("7xh100", [("h100", 1, 7)]),
        ("12xh100", [("h100", 1, 8), ("h100", 1, 4)]),
        ("64xa100-80:eth", [("a100-80", 8, 8)]),
        ("100xgb200", [("gb200", 1, 72), ("gb200", 1, 28)]),
        ("8xH100 + 8xa100-80", [("h100", 1, 8), ("a100-80", 1, 8)]),
    ],
)
def test_cluster_names(text: str, expected: list[tuple[str, int, int]]) -> None:
    cluster = parse_cluster(text)
    assert sizes(cluster) == expected
    assert cluster.name == text
    assert cluster.devices == sum(nodes * per for _, nodes, per in expected)
    assert cluster.per_node == max(expected, key=lambda part: part[1] * part[2])[2]


def test_networks() -> None:
    assert (
        parse_cluster("64xa100-80").inter_node
        == parse_cluster("64xa100-80:ib").inter_node
        == DEVICE_KINDS["a100-80"].inter_node
    )
    # 100 Gb/s of a host are shared by its eight devices, or by its four.
    assert parse_cluster("64xa100-80:eth").inter_node.bandwidth == pytest.approx(12.5e9 / 8)
    assert parse_cluster("4xa100-80:eth").inter_node.bandwidth == pytest.approx(12.5e9 / 4)
    assert parse_cluster("144xgb200:eth").inter_node.bandwidth == pytest.approx(12.5e9 / 8)
    assert parse_cluster("16xh100:roce").inter_node.bandwidth == pytest.approx(50e9 / 8)


def test_mixed_kinds_wait_for_the_slowest() -> None:
    cluster = parse_cluster("8xh100+16xa100-40:eth")
    assert cluster.device.name == "a100-40"
    assert cluster.memory == 40 * GIB
    assert cluster.intra_node == DEVICE_KINDS["a100-40"].intra_node
    assert cluster.inter_node.bandwidth == pytest.approx(12.5e9 / 8)
    assert (cluster.devices, cluster.nodes) == (24, 3)
    assert cluster.price == pytest.approx(8 * 2.5 + 16 * 1.2)
    assert cluster.watts == 8 * 700 + 16 * 400


def test_faults_of_names() -> None:
    (kind,) = faults("8xh10")
    assert (kind.key, kind.value) == ("cluster", "8xh10")
    assert "(h10)" in kind.message
    assert all(name in kind.legal for name in DEVICE_KINDS)
    assert "h100" in kind.hint
    assert "1xh100" in faults("h100")[0].hint
    assert "8xa100-80" in faults("8a100-80")[0].hint
    assert "number of devices" in faults("0xh100")[0].message
    assert "number of devices" in faults("-8xh100")[0].message
    assert "cannot be read" in faults("")[0].message
    assert "cannot be read" in faults("9" * 5000 + "xh100")[0].message
    assert 'did you mean "eth"?' in faults("8xh100:ethh")[0].hint
    assert len(faults("0xh100+8xh10+8xa100-80:x")) == 3


def test_here_is_this_machine() -> None:
    cluster = parse_cluster("here")
    assert cluster.name == "here"
    assert cluster.nodes == len(cluster.node_groups)
    assert cluster.host_memory > 0
    if cluster.device.generation == "cpu":
        assert cluster.memory * cluster.devices <= cluster.host_memory


def test_devices_by_the_names_of_their_drivers() -> None:
    assert device_kind("NVIDIA A100-SXM4-40GB", 40 * GIB) == "a100-40"
    assert device_kind("NVIDIA A100 80GB PCIe", 79 * GIB) == "a100-80"
    assert device_kind("NVIDIA H100 80GB HBM3", 79 * GIB) == "h100"
    assert device_kind("NVIDIA H200", 139 * GIB) == "h200"
    assert device_kind("NVIDIA GB200", 185 * GIB) == "gb200"
    assert device_kind("Tesla V100-SXM2-16GB", 16 * GIB) == "v100"
    assert device_kind("NVIDIA GeForce RTX 4090", 24 * GIB) == ""
    assert device_kind("TPU v5e", 16 * GIB) == "tpu-v5e"
    assert device_kind("TPU v5p", 32 * GIB) == "tpu-v5p"


def test_names_and_files_load_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(cluster_to_toml(parse_cluster("12xh100")))
    code = f"from echelon.planning.cluster.cluster import parse_cluster as parse; parse('8xh100'); parse({str(path)!r})"
    subprocess.run([sys.executable, "-c", f"import sys; {code}; assert 'torch' not in sys.modules"], check=True)


# -- files ------------------------------------------------------------------------------------------------------------

CUSTOM = """
[[part]]
name = "mine"
generation = "ampere"
per_node = 4
bf16_tflops = 100
fp32_tflops = 50
memory_gib = 24
memory_tbps = 1
inside_bandwidth_gbps = 32
inside_latency_us = 5
outside_bandwidth_gbps = 1.25
outside_latency_us = 30
host_bandwidth_gbps = 25
host_latency_us = 10
"""


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "basement.toml"
    path.write_text("""
[[part]]
kind = "h100"
memory_gib = 79.5
nodes = 2
[outside]
bandwidth_gbps = 40
[host]
memory_gib = 512
disk_gbps = 6
[curves]
matmul = [[4096, 4096, 4096, 650.0], [64, 4096, 4096, 90]]
attention = [[4096, 128, 480]]
memory_tbps = 2.9
all_reduce = [[1048576, 4.1e-5]]
""")
    cluster = parse_cluster(str(path))
    assert cluster.name == "basement"
    assert sizes(cluster) == [("h100", 2, 8)]
    assert cluster.memory == 79.5 * GIB
    assert cluster.device.flops == DEVICE_KINDS["h100"].flops
    assert cluster.intra_node == DEVICE_KINDS["h100"].intra_node
    assert cluster.inter_node == LinkSpec(bandwidth=40e9, latency=DEVICE_KINDS["h100"].inter_node.latency)
    assert (cluster.host_memory, cluster.disk_bandwidth) == (512 * GIB, 6e9)
    assert cluster.curves == MeasuredCurves(
        matmul=((4096, 4096, 4096, 650e12), (64, 4096, 4096, 90e12)),
        attention=((4096, 128, 480e12),),
        memory=2.9e12,
        all_reduce=((1048576, 4.1e-5),),
    )


def test_a_custom_device() -> None:
    cluster = cluster_from_toml(CUSTOM)
    assert sizes(cluster) == [("mine", 1, 4)]
    assert cluster.device.peak("bf16") == 100e12
    assert cluster.device.nvlink_domain == 4
    assert cluster.intra_node == LinkSpec(bandwidth=32e9, latency=5e-6)
    with pytest.raises(ValidationError, match="lacks inside_bandwidth_gbps, bf16_tflops or fp16"):
        cluster_from_toml(
            "\n".join(line for line in CUSTOM.splitlines() if "inside_b" not in line).replace("bf16", "fp8")
        )


def test_a_device_by_its_data_sheet() -> None:
    """Latencies and the link to the host are those of known kinds; the generation is that of other accelerators."""
    optional = ("generation", "fp32", "latency", "host")
    lines = [line for line in CUSTOM.splitlines() if not any(word in line for word in optional)]
    device, usual = cluster_from_toml("\n".join(lines)).device, DEVICE_KINDS["h100"]
    assert device.generation == "npu"
    assert device.intra_node == LinkSpec(bandwidth=32e9, latency=usual.intra_node.latency)
    assert device.inter_node == LinkSpec(bandwidth=1.25e9, latency=usual.inter_node.latency)
    assert (device.flops, device.watts, device.price) == ({"bf16": 100e12}, 0, 0)
    for line in lines:
        if "=" in line and not line.startswith("name"):
            with pytest.raises(ValidationError, match=rf"lacks .*{line.split()[0]}.*data sheet"):
                cluster_from_toml("\n".join(other for other in lines if other != line))
    with pytest.raises(ValidationError, match=r'generation=Hoper .*npu.*did you mean "hopper"'):
        cluster_from_toml("\n".join([*lines, 'generation = "Hoper"']))


def test_dtypes_that_a_data_sheet_leaves_out_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(CUSTOM.replace("fp32_tflops = 50", ""))
    for precision in ("fp16", "fp32", "fp8"):
        with pytest.raises(ValidationError, match=rf"legal: bf16; or state its {precision}_tflops"):
            ec.plan("llama-tiny", str(path), precision=precision)
    assert DEVICE_KINDS["v100"].supports("bf16")
    assert DEVICE_KINDS["tpu-v4"].supports("fp16")
    assert not DEVICE_KINDS["v100"].supports("fp8")


@pytest.mark.parametrize(
    ("key", "value"), [("bf16_tflops", 989e12), ("memory_tbps", 3350), ("inside_bandwidth_gbps", 9e11)]
)
def test_a_number_in_another_unit_is_refused(tmp_path: Path, key: str, value: float) -> None:
    """FLOPs in place of TFLOPs were priced: MFU 1.5e-9 %."""
    numbers = {"bf16_tflops": 989, "memory_gib": 80, "memory_tbps": 3.35, "inside_bandwidth_gbps": 450} | {key: value}
    path = tmp_path / "units.toml"
    lines = "".join(f"{name} = {number}\n" for name, number in numbers.items())
    path.write_text(f'[[part]]\nname = "zeta"\nper_node = 8\noutside_bandwidth_gbps = 50\n{lines}')
    assert [fault.key for fault in faults(str(path))] == [f"part[0].{key}"]


def test_all_faults_of_a_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("""
nam = "x"
[[part]]
kind = "h10"
nodes = 0
per_node = 2.5
[[part]]
per_node = true
memory_gib = nan
[inside]
bandwidth_gbps = -5
latency = 3
[outside]
latency_us = "fast"
[host]
memory_gib = 0
[curves]
matmul = [[1, 2, 3], [1, 2, 3, -4]]
all_reduce = 7
""")
    found = {fault.key: fault for fault in faults(str(path))}
    assert found.keys() == {
        "nam",
        "part[0].kind",
        "part[0].nodes",
        "part[0].per_node",
        "part[1]",
        "part[1].per_node",
        "part[1].memory_gib",
        "inside.bandwidth_gbps",
        "inside.latency",
        "outside.latency_us",
        "host.memory_gib",
        "curves.matmul[0]",
        "curves.matmul[1]",
        "curves.all_reduce[0]",
    }
    assert 'did you mean "name"?' in found["nam"].hint
    assert 'did you mean "h100"?' in found["part[0].kind"].hint
    assert (found["inside.bandwidth_gbps"].value, found["inside.bandwidth_gbps"].legal) == (
        "-5",
        "a number > 0 and <= 1e+06",
    )
    assert "latency_us" in found["inside.latency"].hint
    assert all(fault.message for fault in found.values())


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (nothing,) = faults(str(tmp_path / "no.toml"))
    assert "cannot be read" in nothing.message
    path = tmp_path / "broken.toml"
    path.write_text("[[part")
    assert "is not valid TOML" in faults(str(path))[0].message
    path.write_bytes(b"\xff\xfe")
    assert "is not UTF-8" in faults(str(path))[0].message
    path.write_text("")
    assert "lists no devices" in faults(str(path))[0].message
    path.write_text("part = 3\ninside = 4\ncurves = 5\nhost = []\nname = 6")
    assert {fault.key for fault in faults(str(path))} == {"part", "inside", "curves", "host", "name"}


# -- round trip -------------------------------------------------------------------------------------------------------

positive = st.floats(1e-3, 1e15, allow_subnormal=False)
counts = st.integers(1, 10_000)
links = st.builds(LinkSpec, bandwidth=positive, latency=st.floats(0, 10))
custom = st.builds(
    DeviceKind,
    name=st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip),
    generation=st.sampled_from(GENERATIONS),
    flops=st.sets(st.sampled_from(DTYPES)).flatmap(
        lambda some: st.fixed_dictionaries(dict.fromkeys(some | {"bf16", "fp32"}, positive))
    ),
    memory=st.integers(1, 10**15),
    bandwidth=positive,
    intra_node=links,
    nvlink_domain=counts,
    inter_node=links,
    host_link=links,
    watts=st.floats(0, 1e5),
    price=st.floats(0, 1e3),
)
parts = st.builds(
    NodeGroup, device=st.sampled_from(list(DEVICE_KINDS.values())) | custom, nodes=counts, per_node=counts
)
collectives = st.lists(st.tuples(counts, st.floats(0, 100))).map(tuple)
curves = st.builds(
    MeasuredCurves,
    matmul=st.lists(st.tuples(counts, counts, counts, positive)).map(tuple),
    attention=st.lists(st.tuples(counts, counts, positive)).map(tuple),
    memory=positive,
    host=st.just(0.0) | positive,
    all_reduce=collectives,
    send=collectives,
)
clusters = st.builds(
    Cluster,
    name=st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip),
    node_groups=st.lists(parts, min_size=1, max_size=3).map(tuple),
    intra_node=links,
    inter_node=links,
    host_memory=st.integers(1, 10**15),
    disk_bandwidth=positive,
    curves=st.none() | curves,
)


@given(clusters)
def test_cluster_files_round_trip(cluster: Cluster) -> None:
    assert cluster_from_toml(cluster_to_toml(cluster)) == cluster


def test_this_machine_can_be_written() -> None:
    cluster = parse_cluster("here")
    assert cluster_from_toml(cluster_to_toml(cluster)) == cluster
    assert (
        cluster_from_toml(cluster_to_toml(replace(parse_cluster("8xv100+8xh800:eth"), curves=MeasuredCurves()))).curves
        == MeasuredCurves()
    )
