"""How sure a prediction is: its interval, and whether anything near was measured.

Intervals are conformal: four of five runs of a source lie within `spread` of a prediction by constants that were fitted
to the other sources (`bench/fit.py --leave-out`). What a scenario has that no measured run had is a reason to doubt
it. Each reason widens the interval by `spread_far`, and by that again for each doubling beyond what was measured; a
plan prints the reasons.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from echelon.layout.layout import ASYNC_SCHEDULES
from echelon.planning.calibrate.constants import Constants
from echelon.planning.cluster.device_kinds import DEFAULT_GENERATION, DEVICE_KINDS, DeviceKind
from echelon.planning.scenario import Scenario

MEASURED_KINDS = (
    *("v100", "a100-40", "a100-80", "h100", "h200", "b200", "b300", "gb200", "gb300"),
    *("mi250x", "ascend910b", "tpu-v5e", "tpu-v5p"),
)
"""device kinds of published runs"""
MEASURED_PRECISIONS = {
    "volta": ("fp16",),
    "ampere": ("bf16", "fp16"),
    "hopper": ("bf16", "fp8"),
    "blackwell": ("bf16", "fp8", "fp4"),
    "amd": ("bf16", "fp16"),
    "npu": ("bf16", "fp16"),
    "tpu": ("bf16",),
}
"""of published runs, by the generation of their devices"""
MEASURED_PROGRAMS = {
    "megatron": ("ampere", "hopper", "blackwell", "npu"),
    "megatron-2021": ("volta", "ampere", "npu"),
    "deepspeed": ("volta", "ampere", "amd"),
    "torch": ("ampere", "hopper"),
    "torch-compiled": ("ampere", "hopper"),
    "xla": ("ampere", "hopper", "tpu"),
}
"""generations of devices in published runs, by their program"""
SLOWEST_NETWORKS = {
    "volta": 12.5e9 / 8,
    "ampere": 6.25e9,
    "hopper": 12.5e9,
    "blackwell": 50e9,
    "amd": 12.5e9,
    "npu": 25e9,
    "tpu": 12.5e9,
}
"""bytes per second of a device to other nodes, in the published run that has the least, by generation"""
OWN_KIND, OWN_PRECISIONS = "h200", ("bf16", "fp8")
"""what Echelon's own steps were measured on (bench/measured/h200.json)"""
MAX_MEASURED_DEVICES, MAX_MEASURED_SEQ_LEN = 12_288, 1_048_576
UNKNOWN_GENERATION = 5.0
"""times that a device widens the interval by `spread_far` if no generation tells the share of its peak that GEMMs
reach: of the shares in constants.py, four of five are within a factor of 1.6 of the one that is taken for it"""
SAME = 0.1
"""share by which a number of a device may differ from its kind's"""


def extrapolations(scenario: Scenario) -> list[str]:
    """What of a scenario is far from all measured runs; empty if nothing is."""
    return [reason for reason, _ in _doubts(scenario)]


def interval_factor(scenario: Scenario, c: Constants) -> float:
    """The factor, up and down, within which four of five runs lie."""
    spread = c.spread_experts if scenario.shape.experts else c.spread
    doubts = sum(weight for _, weight in _doubts(scenario))
    if not doubts and scenario.has_kernels:  # on one device, as clusters are doubtful
        spread = c.spread_own
    return math.exp(spread * c.spread_far**doubts)


def _doubts(scenario: Scenario) -> Iterator[tuple[str, float]]:
    """Yield reasons, each with the times that it widens the interval by `spread_far`."""
    layout, device, is_far = scenario.layout, scenario.cluster.device, _doublings
    yield from _device_doubts(scenario)
    if scenario.program == "unknown":
        yield "no run of this program was measured", 1.0
    elif scenario.is_own and layout.world > 1:
        yield "Echelon was measured on one device alone", 1.0
    if layout.world > MAX_MEASURED_DEVICES:
        yield (
            f"runs of up to {MAX_MEASURED_DEVICES:,} devices were measured",
            is_far(layout.world, MAX_MEASURED_DEVICES),
        )
    if scenario.seq_len > MAX_MEASURED_SEQ_LEN:
        reason = f"sequences of up to {MAX_MEASURED_SEQ_LEN:,} tokens were measured"
        yield reason, is_far(scenario.seq_len, MAX_MEASURED_SEQ_LEN)
    slowest, bandwidth = SLOWEST_NETWORKS.get(device.generation, 0.0), scenario.cluster.inter_node.bandwidth
    if layout.world > scenario.cluster.per_node and bandwidth < (1 - SAME) * slowest:
        reason = f"between nodes of {device.generation}, {slowest / 1e9:g} GB/s per device and more were measured"
        yield reason, is_far(slowest, bandwidth)
    if layout.tp_kind != "1d":
        yield f"no run with tp_kind={layout.tp_kind} was measured", 1.0
    if layout.schedule in ASYNC_SCHEDULES:
        yield f"no run with schedule={layout.schedule} was measured", 1.0
    if layout.offload != "none":
        yield f"no run with offload={layout.offload} was measured", 1.0


def _doublings(value: float, measured: float) -> float:
    return 1.0 + math.log2(value / measured)


def _device_doubts(scenario: Scenario) -> Iterator[tuple[str, float]]:
    """Yield reasons that lie in the devices; measured curves (`echelon bench`) take their place."""
    cluster, precision, program = scenario.cluster, scenario.precision, scenario.program
    if cluster.curves is not None and cluster.curves.matmul and cluster.curves.memory:
        return
    kinds = {group.device.name: group.device for group in cluster.node_groups}
    for name, device in kinds.items():
        if name not in MEASURED_KINDS and device.generation == DEFAULT_GENERATION:
            yield f"no run on {name} or its generation was measured", UNKNOWN_GENERATION
        elif name not in MEASURED_KINDS:
            yield f"no run on {name} was measured", 1.0
        elif not _is_kind(device, DEVICE_KINDS[name]):
            yield f"{name} was measured with other rates than these", 1.0
    if len(kinds) > 1:
        yield f"no run on {' and '.join(kinds)} together was measured", 1.0
    generation = cluster.device.generation
    if generation == "cpu":
        return
    if scenario.is_own and scenario.layout.world == 1 and generation != DEVICE_KINDS[OWN_KIND].generation:
        yield f"Echelon was measured on {OWN_KIND} alone", 1.0
    elif scenario.is_own and scenario.layout.world == 1 and cluster.device.name != OWN_KIND:
        yield f"Echelon was measured on {OWN_KIND} alone", 0.5
    known = MEASURED_PRECISIONS.get(generation, ())
    known = tuple(name for name in known if name in OWN_PRECISIONS) if scenario.is_own else known
    if generation in MEASURED_PRECISIONS and precision not in known:
        yield f"no run in {precision} on {generation} {'by Echelon ' if scenario.is_own else ''}was measured", 1.0
    if generation in MEASURED_PRECISIONS and generation not in MEASURED_PROGRAMS.get(program, (generation,)):
        yield f"no run of {program} on {generation} was measured", 1.0


def _is_kind(device: DeviceKind, kind: DeviceKind) -> bool:
    """Whether a device has the rates of its kind."""
    pairs = [(device.peak("bf16"), kind.peak("bf16")), (device.bandwidth, kind.bandwidth)]
    pairs.append((device.intra_node.bandwidth, kind.intra_node.bandwidth))
    return all(abs(own / known - 1) <= SAME for own, known in pairs)
