"""A cluster as a TOML file. Bandwidths are in gigabytes (not bits) per second and direction, of each device.

    name = "basement"                     # default: the file's name

    [[part]]                              # one per kind and size of node
    kind = "h100"                         # a known kind, or `name` with the numbers of its data sheet
    nodes = 2
    per_node = 8

    [[part]]
    name = "zeta1"                        # a device that planning does not know; DEVICE below has all its keys
    per_node = 8
    bf16_tflops = 700                     # dense peak
    memory_gib = 96
    memory_tbps = 3
    inside_bandwidth_gbps = 300
    outside_bandwidth_gbps = 25

    [inside]                              # between devices of a node; default: as the slowest kind has it
    bandwidth_gbps = 450
    latency_us = 3
    [outside]                             # between nodes, the same two keys
    [host]
    memory_gib = 1024                     # of a node
    disk_gbps = 8                         # of a node

    [curves]                              # measured; each may be left out
    matmul = [[4096, 4096, 4096, 650.0]]  # m, k, n, TFLOP/s
    attention = [[4096, 128, 480.0]]      # length, head_dim, TFLOP/s
    memory_tbps = 2.9                     # terabytes per second
    host_gbps = 22
    all_reduce = [[1048576, 4.1e-5]]      # bytes, seconds; also all_gather, reduce_scatter, all_to_all, send

[Note: exact numbers] Numbers are read and written as decimals and scaled by shifting the point, so that what `to_toml`
writes is read back as the same floats.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from echelon.input_file import InputFileError, parse_toml, read_toml
from echelon.layout.validation_error import ValidationError, ValidationIssue, did_you_mean
from echelon.planning.cluster.cluster import MAX_DEVICES, Cluster, MeasuredCurves, NodeGroup, build_cluster
from echelon.planning.cluster.device_kinds import DEFAULT_GENERATION, DEVICE_KINDS, GIB, DeviceKind, LinkSpec

Table = dict[str, Any]
GENERATIONS = ("volta", "ampere", "hopper", "blackwell", "amd", "tpu", "npu", "cpu")
DTYPES = ("bf16", "fp16", "fp8", "fp4", "fp32")


@dataclass(frozen=True)
class NumberField:
    """The unit and legal range of a number."""

    shift: int = 0
    """decimal places from the file's unit to bytes, seconds, FLOPs"""
    integer: bool = False
    in_gib: bool = False
    """the file's unit is GiB"""
    allows_zero: bool = False
    """whether 0 is a value"""
    maximum: float = 1e30

    @property
    def legal(self) -> str:
        bound = f"{'>= 0' if self.allows_zero else '> 0'}{f' and <= {self.maximum:g}' if self.maximum < 1e30 else ''}"
        return f"a {'whole number' if self.integer else 'number'} {bound}"

    def parse(self, value: Any) -> float | int | None:
        """In base units; none if invalid."""
        if isinstance(value, bool) or not isinstance(value, int | Decimal) or not Decimal(value).is_finite():
            return None
        number = Decimal(value)
        if not 0 <= number <= self.maximum or (self.integer and number % 1):
            return None
        parsed = round(number * GIB) if self.in_gib else float(number.scaleb(self.shift))
        parsed = int(number) if self.integer else parsed
        return parsed if parsed or self.allows_zero else None

    def format(self, value: float | int) -> str:
        if self.in_gib:
            return str(Decimal(value) / GIB)
        return str(value) if self.integer else str(Decimal(repr(value)).scaleb(-self.shift))


COUNT = NumberField(integer=True, maximum=MAX_DEVICES)
MAX_TERA, MAX_GBPS = 1e5, 1e6
"""per second and device: more are numbers in another unit"""
TERA, GBPS = NumberField(shift=12, maximum=MAX_TERA), NumberField(shift=9, maximum=MAX_GBPS)
SECONDS = NumberField(allows_zero=True, maximum=1e9)
LINK = {"bandwidth_gbps": GBPS, "latency_us": NumberField(shift=-6, allows_zero=True, maximum=1e12)}
HOST = {"memory_gib": NumberField(in_gib=True, maximum=1e9), "disk_gbps": GBPS}
DEVICE = {
    **dict.fromkeys((f"{dtype}_tflops" for dtype in DTYPES), TERA),
    "memory_gib": NumberField(in_gib=True, maximum=1e9),
    "memory_tbps": NumberField(shift=12, maximum=1e3),
    **{f"{level}_{key}": number for level in ("inside", "outside", "host") for key, number in LINK.items()},
    "domain": COUNT,
    "watts": NumberField(allows_zero=True),
    "price": NumberField(allows_zero=True),
}
"""numbers of a device kind: price in US dollars an hour; domain: devices of a node"""
DEVICE_ATTRIBUTES = {"memory_gib": "memory", "memory_tbps": "bandwidth", "domain": "nvlink_domain"}
DEVICE_ATTRIBUTES |= {"watts": "watts", "price": "price"}
"""the fields of a `DeviceKind` by their keys"""
DEVICE_LINKS = {"inside_": "intra_node", "outside_": "inter_node", "host_": "host_link"}
"""its links by the prefix of their keys"""
REQUIRED = ("memory_gib", "memory_tbps", "inside_bandwidth_gbps", "outside_bandwidth_gbps")
"""keys of a custom device, beside its 16-bit peak; links take the latencies of known kinds, the host's also their
bandwidth"""
SIZE, BYTES = NumberField(integer=True), NumberField(integer=True, maximum=1e15)
CURVE_COLUMNS = {
    "matmul": (SIZE, SIZE, SIZE, TERA),
    "attention": (SIZE, SIZE, TERA),
    **dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"), (BYTES, SECONDS)),
}
RATES = {"memory_tbps": TERA, "host_gbps": GBPS}


class TableReader:
    """Takes values out of tables and collects the issues."""

    def __init__(self) -> None:
        self.faults: list[ValidationIssue] = []

    def fault(self, key: str, value: Any, rule: str, legal: str = "", hint: str = "") -> None:
        self.faults.append(ValidationIssue(key=key, value=_format_value(value), message=rule, legal=legal, hint=hint))

    def table(self, given: Any, where: str, known: Mapping[str, Any] | tuple[str, ...]) -> dict[str, Any]:
        """The known keys of a table; adds an issue for each other key."""
        if not isinstance(given, dict):
            self.fault(where, given, "is not a table", f"[{where}] with {', '.join(known)}")
            return {}
        prefix = f"{where}." if where else ""
        for key in given.keys() - set(known):
            hint = did_you_mean(key, known)
            self.fault(prefix + key, given[key], "is not a key of a cluster file", ", ".join(known), hint)
        return {key: value for key, value in given.items() if key in known}

    def numbers(self, given: dict[str, Any], where: str, known: Mapping[str, NumberField]) -> dict[str, Any]:
        parsed = {key: self.number(given[key], f"{where}.{key}", known[key]) for key in known if key in given}
        return {key: value for key, value in parsed.items() if value is not None}

    def number(self, value: Any, key: str, number: NumberField) -> float | int | None:
        parsed = number.parse(value)
        if parsed is None:
            self.fault(key, value, "is not a valid number", number.legal)
        return parsed

    def text(self, value: Any, key: str, legal: str) -> str:
        if isinstance(value, str) and value.strip():
            return value
        self.fault(key, value, "is not a text", legal)
        return ""


def _format_value(value: Any) -> str:
    return str(value) if isinstance(value, str | int | Decimal) else json.dumps(value, default=str)[:80]


def read_cluster_file(path: str) -> Cluster:
    legal = "a TOML file that can be read; the docstring of echelon.planning.cluster.cluster_file shows one"
    try:
        given = read_toml(path, parse_float=Decimal)
    except InputFileError as error:
        raise ValidationError.single("cluster", path, error.reason, legal=legal) from error
    return cluster_from_table(given, Path(path).stem)


def cluster_from_toml(text: str) -> Cluster:
    return cluster_from_table(parse_toml(text, parse_float=Decimal), "cluster")


def cluster_from_table(given: dict[str, Any], name: str) -> Cluster:
    reader = TableReader()
    tables = reader.table(given, "", ("name", "part", "inside", "outside", "host", "curves"))
    name = reader.text(tables.get("name", name), "name", "any text")
    listed = tables.get("part", [])
    if not isinstance(listed, list) or not listed:
        reader.fault("part", listed, "lists no devices", "one table [[part]] per kind and size of node")
        listed = []
    parts = [_node_group(reader, part, f"part[{index}]") for index, part in enumerate(listed)]
    inside, outside, host = (
        reader.numbers(reader.table(tables.get(key, {}), key, known), key, known)
        for key, known in (("inside", LINK), ("outside", LINK), ("host", HOST))
    )
    curves = _curves(reader, tables["curves"]) if "curves" in tables else None
    if reader.faults:
        raise ValidationError(reader.faults)
    usual = build_cluster(name, [part for part in parts if part])
    return replace(
        usual,
        intra_node=_link(usual.intra_node, inside),
        inter_node=_link(usual.inter_node, outside),
        host_memory=host.get("memory_gib", usual.host_memory),
        disk_bandwidth=host.get("disk_gbps", usual.disk_bandwidth),
        curves=curves,
    )


def _link(usual: LinkSpec, given: Mapping[str, Any], prefix: str = "") -> LinkSpec:
    bandwidth = given.get(f"{prefix}bandwidth_gbps", usual.bandwidth)
    return LinkSpec(bandwidth=bandwidth, latency=given.get(f"{prefix}latency_us", usual.latency))


def _node_group(reader: TableReader, given: Any, where: str) -> NodeGroup | None:
    known = ("kind", "name", "generation", "nodes", "per_node", *DEVICE)
    table = reader.table(given, where, known)
    nodes = reader.number(table.get("nodes", 1), f"{where}.nodes", COUNT)
    per_node = reader.number(table["per_node"], f"{where}.per_node", COUNT) if "per_node" in table else 0
    numbers = reader.numbers(table, where, DEVICE)
    read_device = _known_device if "kind" in table else _custom_device
    device = read_device(reader, table, where, numbers)
    if device is None or nodes is None or per_node is None:
        return None
    if "kind" not in table and "domain" not in table:
        device = replace(device, nvlink_domain=int(per_node))
    return NodeGroup(device=device, nodes=int(nodes), per_node=int(per_node) or device.nvlink_domain)


def _known_device(reader: TableReader, table: Table, where: str, numbers: Table) -> DeviceKind | None:
    for key in {"name", "generation"} & table.keys():
        reader.fault(f"{where}.{key}", table[key], "does not go with kind", hint="leave one of them out")
    kind = reader.text(table["kind"], f"{where}.kind", ", ".join(DEVICE_KINDS))
    if kind and kind not in DEVICE_KINDS:
        hint = did_you_mean(kind, DEVICE_KINDS) or "give a custom device a `name` in place of `kind`"
        reader.fault(f"{where}.kind", kind, "is an unknown device kind", ", ".join(DEVICE_KINDS), hint)
    return _device(DEVICE_KINDS[kind], numbers) if kind in DEVICE_KINDS else None


def _custom_device(reader: TableReader, table: Table, where: str, numbers: Table) -> DeviceKind | None:
    before = len(reader.faults)
    if "name" not in table:
        hint = "or a `name` and the numbers of a custom device"
        reader.fault(where, "", "lacks its kind", ", ".join(DEVICE_KINDS), hint)
        return None
    name = reader.text(table["name"], f"{where}.name", "any text")
    generation = table.get("generation", DEFAULT_GENERATION)
    if generation not in GENERATIONS:
        hint = did_you_mean(str(generation), GENERATIONS) or "leave it out if none is near"
        reader.fault(f"{where}.generation", generation, "is not one that planning knows", ", ".join(GENERATIONS), hint)
    lacking = [key for key in REQUIRED if key not in table]
    lacking += ["bf16_tflops or fp16_tflops"] if not {"bf16_tflops", "fp16_tflops"} & table.keys() else []
    lacking += ["per_node"] if "per_node" not in table else []
    if lacking:
        reader.fault(where, "", f"lacks {', '.join(lacking)}", hint="add them from the device's data sheet")
    if len(reader.faults) > before or any(key not in numbers for key in table.keys() & DEVICE.keys()):
        return None
    # A custom device states all but latencies and the link to its host: of the A100 nothing else remains.
    blank: dict[str, Any] = {"flops": {}, "nvlink_domain": 1, "watts": 0.0, "price": 0.0}
    usual = DEVICE_KINDS["cpu" if generation == "cpu" else "a100-80"]
    return _device(replace(usual, name=name, generation=generation, **blank), numbers)


def _device(usual: DeviceKind, numbers: Mapping[str, Any]) -> DeviceKind:
    """The device kind with the given numbers in place of its own."""
    flops = {dtype: numbers[f"{dtype}_tflops"] for dtype in DTYPES if f"{dtype}_tflops" in numbers}
    given = {name: numbers[key] for key, name in DEVICE_ATTRIBUTES.items() if key in numbers}
    given |= {name: _link(getattr(usual, name), numbers, prefix) for prefix, name in DEVICE_LINKS.items()}
    return replace(usual, flops={**usual.flops, **flops}, **given)


def _curves(reader: TableReader, given: Any) -> MeasuredCurves:
    table = reader.table(given, "curves", (*CURVE_COLUMNS, *RATES))
    rates = reader.numbers(table, "curves", RATES)
    rows = {key: tuple(_rows(reader, table[key], key)) for key in CURVE_COLUMNS if key in table}
    return MeasuredCurves(memory=rates.get("memory_tbps", 0.0), host=rates.get("host_gbps", 0.0), **rows)


def _rows(reader: TableReader, given: Any, key: str) -> Iterator[tuple[Any, ...]]:
    columns = CURVE_COLUMNS[key]
    for index, row in enumerate(given if isinstance(given, list) else [given]):
        where = f"curves.{key}[{index}]"
        if not isinstance(row, list) or len(row) != len(columns):
            reader.fault(where, row, "is not a row of the curve", f"a list of {len(columns)} numbers")
            continue
        yield tuple(reader.number(value, where, number) for value, number in zip(row, columns, strict=True))


def cluster_to_toml(cluster: Cluster) -> str:
    """TOML that `cluster_from_toml` reads as the same cluster."""
    lines = [f"name = {_quoted(cluster.name)}"]
    for part in cluster.node_groups:
        lines += ["", "[[part]]", *_device_lines(part.device), f"nodes = {part.nodes}", f"per_node = {part.per_node}"]
    for key, link in (("inside", cluster.intra_node), ("outside", cluster.inter_node)):
        lines += ["", f"[{key}]", *_link_lines(link)]
    host = {"memory_gib": cluster.host_memory, "disk_gbps": cluster.disk_bandwidth}
    lines += ["", "[host]", *(f"{key} = {HOST[key].format(value)}" for key, value in host.items())]
    if cluster.curves:
        lines += ["", "[curves]", *_curve_lines(cluster.curves)]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _link_lines(link: LinkSpec, prefix: str = "") -> list[str]:
    values = {"bandwidth_gbps": link.bandwidth, "latency_us": link.latency}
    return [f"{prefix}{key} = {LINK[key].format(value)}" for key, value in values.items()]


def _device_lines(device: DeviceKind) -> list[str]:
    if device == DEVICE_KINDS.get(device.name):
        return [f"kind = {_quoted(device.name)}"]
    numbers = {f"{dtype}_tflops": device.flops[dtype] for dtype in DTYPES if dtype in device.flops}
    numbers |= {key: getattr(device, name) for key, name in DEVICE_ATTRIBUTES.items()}
    return [
        f"name = {_quoted(device.name)}",
        f"generation = {_quoted(device.generation)}",
        *(f"{key} = {DEVICE[key].format(value)}" for key, value in numbers.items()),
        *(line for prefix, name in DEVICE_LINKS.items() for line in _link_lines(getattr(device, name), prefix)),
    ]


def _curve_lines(curves: MeasuredCurves) -> Iterator[str]:
    for field in fields(curves):
        value = getattr(curves, field.name)
        if field.name in CURVE_COLUMNS and value:
            columns = CURVE_COLUMNS[field.name]
            rows = (map(NumberField.format, columns, row) for row in value)
            yield f"{field.name} = [{', '.join(f'[{cells}]' for cells in map(', '.join, rows))}]"
    if curves.memory:
        yield f"memory_tbps = {TERA.format(curves.memory)}"
    if curves.host:
        yield f"host_gbps = {GBPS.format(curves.host)}"
