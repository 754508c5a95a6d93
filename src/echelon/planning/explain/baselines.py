"""What people write before they know parallel training, priced on the same model, cluster and batch.

    one device             dp=1
    DataParallel           one process drives the devices of a node (torch.nn.DataParallel)
    DDP                    dp over all devices, one process each, nothing sharded
    naive layer split      layers over the devices of a node, one device busy at a time

[Note: one process with many devices]

Echelon does not implement DataParallel: it is the baseline that shows why each device has its own process. Every
forward of a microbatch on n devices, with P parameters, m sequences of T tokens for each device and V words

    scatter      sends the tokens of the others from device 0            8 (n-1) m T / b
    replicate    broadcasts the weights from device 0, around a ring     e P / b, in buckets of 10 MiB
    launches     has one interpreter start the kernels of n devices      n times a device's, beyond its compute
    gather       copies the logits of the others to device 0             e (n-1) m T V / b, and their gradients back
    loss         is computed by device 0, of all n m T tokens
    reduce       adds the gradients to device 0, after backward          e P / b, around a ring

with e bytes of an element and b bytes per second of a link. Nothing of it overlaps with compute: autograd sees all
replicas of a parameter as one operation, and the loss waits for all logits. Device 0 alone holds the optimizer states,
updates, and holds the gathered logits. The others wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from echelon.layout import Layout
from echelon.planning.calibrate.calibration import constants_for
from echelon.planning.calibrate.constants import FITTED_CONSTANTS, Constants
from echelon.planning.cluster.link_time import exposed_time
from echelon.planning.cost.count_work import LOGIT_TRAFFIC, count_work
from echelon.planning.cost.memory_model import RankMemory
from echelon.planning.cost.reached_rates import reached_rates
from echelon.planning.cost.recompute_cost import microbatch_saved_bytes
from echelon.planning.cost.step_time import microbatch_time
from echelon.planning.cost.working_memory import LOGIT_BYTES
from echelon.planning.priced_plan import Plan, price
from echelon.planning.scenario import PlanRequest, Scenario
from echelon.planning.search.layout_families import MAX_MICROBATCH

BUCKET_BYTES = 10 * 2**20
"""of a broadcast or reduction, torch's default"""
TOKEN_BYTES = 8
NOT_RUN = "a baseline: priced, not run"


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A priced baseline."""

    name: str
    plan: Plan
    """of DataParallel: with the layout of the same split, dp over the devices of a node"""
    runnable: bool
    reason: str = ""
    """why it is not runnable"""

    def to_json(self) -> dict[str, object]:
        """The keys of a plan, with the baseline's name."""
        reasons = [self.reason] if self.reason else []
        return {"name": self.name, **self.plan.to_json(), "runnable": self.runnable, "reasons": reasons}


def price_baselines(request: PlanRequest, c: Constants = FITTED_CONSTANTS) -> list[Baseline]:
    """Price every baseline that divides the batch and the model, each with its best microbatch."""
    devices, in_node = request.cluster.devices, min(request.cluster.per_node, request.cluster.devices)
    stages = min(in_node, request.shape.num_layers)
    splits: list[tuple[str, dict[str, int | str], Callable[[Scenario, Constants], Plan], bool]] = [
        ("one device", {"dp": 1}, price, True),
        ("DataParallel", {"dp": _most_devices(request, in_node)}, price_data_parallel, request.on_gpu and in_node > 1),
        ("DDP", {"dp": devices}, price, devices > 1),
        ("naive layer split", {"dp": 1, "pp": stages, "schedule": "naive"}, price, stages > 1),
    ]
    baselines = []
    for name, keys, price_one, is_possible in splits:
        plans = [price_one(request.scenario(layout), c) for layout in _layouts(request, keys)] if is_possible else []
        if plans:
            best = min(plans, key=lambda plan: (not plan.fits, plan.seconds if plan.fits else plan.memory.total))
            is_run = price_one is price
            reason = "" if is_run else NOT_RUN
            baselines.append(Baseline(name=name, plan=best, runnable=is_run and best.runnable, reason=reason))
    return baselines


def _most_devices(request: PlanRequest, in_node: int) -> int:
    """The devices of one node, which one process can drive; fewer where they do not divide the batch."""
    return max(n for n in range(1, in_node + 1) if not request.batch % n)


def _layouts(request: PlanRequest, keys: dict[str, int | str]) -> Iterator[Layout]:
    """The splits of a baseline: every microbatch, with and without recomputation."""
    per_rank, rest = divmod(request.batch, int(keys["dp"]))
    for microbatch in range(1, MAX_MICROBATCH + 1) if not rest else ():
        if not per_rank % microbatch:
            sizes = {"microbatch": microbatch, "accumulate": per_rank // microbatch, "zero": 0}
            for recompute in ("none", "full"):
                layout = Layout.resolve({**keys, **sizes, "recompute": recompute})
                if not request.violations(layout):
                    yield layout


def price_data_parallel(scenario: Scenario, c: Constants = FITTED_CONSTANTS) -> Plan:
    """Price torch.nn.DataParallel in the split of a layout with dp alone: see [Note: one process with many devices]."""
    plan, work, c = price(scenario, c), count_work(scenario), constants_for(scenario, c)
    layout, shape, size = scenario.layout, scenario.shape, scenario.element_bytes
    devices, others, forwards = layout.dp, layout.dp - 1, layout.accumulate
    m, rates = microbatch_time(work, c), reached_rates(work.microbatch.device, c)
    bandwidth, latency = float(rates.intra_node_bandwidth), float(rates.latency)
    param_bytes, logit_bytes = size * shape.parameters, size * scenario.tokens * shape.vocab
    ring = (param_bytes / bandwidth + latency * math.ceil(param_bytes / BUCKET_BYTES)) * (devices > 1)
    waits = float(exposed_time(devices * m.kernel_launches, m.forward_device) - m.launch_waits[0])
    loss_bytes = LOGIT_TRAFFIC * devices * scenario.tokens * shape.vocab - float(work.microbatch.loss_bytes)
    each_forward = {
        "scatter": TOKEN_BYTES * others * scenario.tokens / bandwidth,
        "replicate": ring,
        "gather": 2 * others * logit_bytes / bandwidth,
        "reduce": ring,
        "loss": 3 * loss_bytes / work.microbatch.device.memory_bandwidth,
        "launches": plan.times.get("launches", 0.0) / scenario.correction / forwards + waits,
    }
    times = {name: scenario.correction * forwards * float(seconds) for name, seconds in each_forward.items()}
    times = {**{name: seconds for name, seconds in plan.times.items() if name != "dp"}, **times}
    times = {name: seconds for name, seconds in times.items() if seconds > 0}
    return replace(plan, times=times, memory=_with_gathered_logits(plan))


def _with_gathered_logits(plan: Plan) -> RankMemory:
    """The memory of device 0: at the head it holds all activations, and the logits of all devices."""
    scenario, parts = plan.scenario, plan.memory.parts
    logits = int(scenario.layout.dp * scenario.tokens * scenario.shape.vocab * LOGIT_BYTES)
    activations = max(parts.get("activations", 0), int(microbatch_saved_bytes(scenario)))
    # Gradients are allocated later, unless those of an earlier microbatch are there.
    later = ("working",) if scenario.layout.accumulate > 1 else ("working", "gradients")
    held = {name: size for name, size in parts.items() if name not in later}
    at_head = {**held, "activations": activations, "logits": logits}
    return replace(plan.memory, parts=max(parts, at_head, key=lambda bytes_by: sum(bytes_by.values())))
