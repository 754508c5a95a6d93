"""`Plan`: a layout with what it is predicted to take, in seconds by cause and in bytes by category."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache

from echelon.layout import Layout
from echelon.pipeline.schedules import FAMILIES, make_schedule
from echelon.pipeline.simulate import Durations, simulate
from echelon.pipeline.timeline import Timeline
from echelon.planning.calibrate.calibration import constants_for
from echelon.planning.calibrate.constants import FITTED_CONSTANTS, Constants
from echelon.planning.cost.count_work import count_work
from echelon.planning.cost.expert_traffic import all_to_all_bytes_per_token
from echelon.planning.cost.memory_model import RankMemory, peak_memory, stage_memory
from echelon.planning.cost.recompute_cost import recompute_shares
from echelon.planning.cost.step_time import StepTimes, microbatch_time, recompute_time, step_times
from echelon.planning.cost.step_work import StepWork
from echelon.planning.scenario import Scenario

MAX_SIMULATED_ACTIONS = 4_000
"""that a price may simulate; longer steps are simulated in part, and go on as they have begun"""
NEGLIGIBLE_SECONDS = 1e-12
"""seconds that are none"""
STEADY_MICROBATCHES = 16
"""microbatches after which every schedule repeats itself, or twice as many as there are ranks"""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a layout is predicted to do."""

    scenario: Scenario
    times: dict[str, float]
    """seconds of a step by cause"""
    memory: RankMemory
    """of the fullest rank"""
    bubble: float
    """share of the pipeline's time in which ranks wait"""
    spread: float
    """four of five runs lie within this factor, up and down"""
    reasons: tuple[str, ...] = ()

    @property
    def layout(self) -> Layout:
        return self.scenario.layout

    @cached_property
    def seconds(self) -> float:
        return sum(self.times.values())

    @property
    def low(self) -> float:
        return self.seconds / self.spread

    @property
    def high(self) -> float:
        return self.seconds * self.spread

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.scenario.cluster.memory

    @property
    def runnable(self) -> bool:
        """Today, by `train`."""
        return self.scenario.runnable

    @property
    def tokens_per_s(self) -> float:
        return self.scenario.batch_tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Against the peak in 16 bits, of the devices in use."""
        return self._utilisation(self.scenario.shape.train_flops(self.scenario.seq_len))

    @property
    def hfu(self) -> float:
        """With what recomputation repeats."""
        shape, seq_len, again = self.scenario.shape, self.scenario.seq_len, recompute_shares(self.scenario)
        layers = shape.flops(seq_len) - 2.0 * shape.head_parameters
        attention = sum(n * layer.attention.flops(seq_len) for layer, n in shape.layers if layer.attention)
        more = float(again.layers * layers + again.attention * attention)
        return self._utilisation(shape.train_flops(seq_len) + more)

    def _utilisation(self, flops: float) -> float:
        """`flops` are executed per token."""
        return flops * self.tokens_per_s / (self.scenario.cluster.device.peak("bf16") * self.layout.world)

    def to_json(self) -> dict[str, object]:
        """The keys of `echelon plan --json`."""
        return {
            "layout": str(self.layout),
            "precision": self.scenario.precision,
            "parameters": self.scenario.shape.parameters,
            "active_parameters": self.scenario.shape.active_parameters,
            "imbalance": self.scenario.imbalance if self.scenario.shape.experts else None,
            "all_to_all_bytes": all_to_all_bytes_per_token(self.scenario),
            "runnable": self.runnable,
            "fits": self.fits,
            "step_s": self.seconds,
            "step_s_low": self.low,
            "step_s_high": self.high,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "bubble": self.bubble,
            "memory_bytes": self.memory.total,
            "memory": self.memory.parts,
            "time": self.times,
            "reasons": list(self.reasons),
        }


def price(scenario: Scenario, c: Constants = FITTED_CONSTANTS) -> Plan:
    """The plan of one scenario, its pipeline simulated."""
    work, c = count_work(scenario), constants_for(scenario, c)
    seconds = step_times(work, c)
    found = {field.name: scenario.correction * float(getattr(seconds, field.name)) for field in fields(StepTimes)}
    bubble = 0.0
    if scenario.layout.pp > 1:
        duration, bubble = _simulate_pipeline(scenario, work, c)
        # The schedule itself says what waiting for other stages, and for the fullest of them, comes to.
        waits = ("imbalance", "bubble", "pp")
        head = 3 * float(microbatch_time(work, c).head) * scenario.layout.accumulate / scenario.layout.pp
        found["head"] = scenario.correction * head
        computed = sum(found[name] for name in STAGE_CAUSES)
        found |= dict.fromkeys(waits, 0.0)
        found["bubble"] = duration - computed
    spread = math.exp(c.spread_experts if scenario.shape.experts else c.spread)
    return Plan(
        scenario=scenario,
        times={name: seconds for name, seconds in found.items() if abs(seconds) > NEGLIGIBLE_SECONDS},
        memory=peak_memory(scenario, c),
        bubble=bubble,
        spread=spread,
    )


STAGE_CAUSES = ("products", "attention", "passing", "launches", "head", "recompute", "tp", "ep", "cp")
"""causes that stages spend their actions on"""


def action_durations(scenario: Scenario, work: StepWork, c: Constants = FITTED_CONSTANTS) -> Durations:
    """Seconds of every action of every stage."""
    m = microbatch_time(work, c)
    shares = [scenario.correction * share for share in layer_shares(scenario)]
    again = float(recompute_time(work, m))
    # Of the tensor-parallel messages of a layer two are forward, two backward, and two are repeated.
    ahead = 2 / (4 + 2 * float(work.microbatch.recompute.layers))
    sent = float(m.tp + m.ep + m.cp)
    forward = float(m.forward) + ahead * sent
    weights = float(m.weight_grad)
    inputs = float(m.backward) - weights + again + (1 - ahead) * sent
    last, head = len(shares) - 1, scenario.correction * float(m.head)
    return Durations(
        forward=tuple(share * forward + head * (stage == last) for stage, share in enumerate(shares)),
        input_grad=tuple(share * inputs + head * (stage == last) for stage, share in enumerate(shares)),
        weight_grad=tuple(share * weights + head * (stage == last) for stage, share in enumerate(shares)),
        send_forward=scenario.correction * float(m.pp),
        send_backward=scenario.correction * float(m.pp),
    )


def layer_shares(scenario: Scenario) -> list[float]:
    """Of every stage, its share of the layers: equal where they divide, else the last stages have fewer."""
    stages, layers = scenario.layout.pp * scenario.layout.vpp, scenario.shape.num_layers
    each, rest = divmod(layers, stages)
    return [(each + (stage < rest)) / layers for stage in range(stages)]


def step_timeline(scenario: Scenario, c: Constants = FITTED_CONSTANTS, *, microbatches: int = 0) -> Timeline:
    """A step, action by action; or one of fewer microbatches."""
    layout = scenario.layout
    schedule = make_schedule(layout.schedule, layout.pp, microbatches or layout.accumulate, chunks=layout.vpp)
    return simulate(schedule, action_durations(scenario, count_work(scenario), constants_for(scenario, c)))


def _simulate_pipeline(scenario: Scenario, work: StepWork, c: Constants) -> tuple[float, float]:
    """(seconds of a step's passes, share of them in which ranks wait)."""
    layout = scenario.layout
    seconds = action_durations(scenario, work, c)
    family = FAMILIES.get(layout.schedule)
    chunks = layout.vpp if family is not None and family.chunks is None else 0

    def run(count: int) -> tuple[float, float]:
        if family is not None:
            return _cached_simulation(layout.schedule, layout.pp, count, chunks, seconds)
        found = simulate(
            make_schedule(layout.schedule, layout.pp, count, chunks=chunks), seconds
        )  # a file, which may change
        return found.duration, found.bubble

    first = -(-max(STEADY_MICROBATCHES, 2 * layout.pp) // layout.pp) * layout.pp
    second = first + layout.pp
    if 3 * layout.pp * layout.vpp * layout.accumulate <= MAX_SIMULATED_ACTIONS or second >= layout.accumulate:
        return run(layout.accumulate)
    short, longer = run(first)[0], run(second)[0]
    duration = longer + (layout.accumulate - second) * (longer - short) / (second - first)
    busy = layout.accumulate * _busy_seconds(seconds) / layout.pp
    return duration, max(0.0, 1 - busy / duration)


@lru_cache(maxsize=512)
def _cached_simulation(
    schedule: str, ranks: int, microbatches: int, chunks: int, seconds: Durations
) -> tuple[float, float]:
    """(seconds, bubble). Many layouts of a search have stages that take as long: zero changes nothing here."""
    found = simulate(_cached_schedule(schedule, ranks, microbatches, chunks=chunks), seconds)
    return found.duration, found.bubble


_cached_schedule = lru_cache(maxsize=32)(make_schedule)


def _busy_seconds(seconds: Durations) -> float:
    """Of all stages, on one microbatch."""
    parts = (seconds.forward, seconds.input_grad, seconds.weight_grad)
    return sum(sum(part) if isinstance(part, tuple) else part for part in parts)


def memory_by_stage(scenario: Scenario, c: Constants = FITTED_CONSTANTS) -> list[RankMemory]:
    """Of one rank of every stage: all ranks of a stage hold the same."""
    c = constants_for(scenario, c)
    return [stage_memory(scenario, stage, c) for stage in range(scenario.layout.pp)]


def memory_over_time(scenario: Scenario, rank: int, c: Constants = FITTED_CONSTANTS) -> list[tuple[float, float]]:
    """(seconds, bytes) of a rank through the passes of a step."""
    c = constants_for(scenario, c)
    found = stage_memory(scenario, rank, c)
    still = found.total - found.parts.get("activations", 0)
    if scenario.layout.pp == 1:
        return [(0.0, still), (scenario.correction * float(step_times(count_work(scenario), c).total), found.total)]
    line = step_timeline(scenario, c)
    in_flight = max(1, line.in_flight[rank])
    each = found.parts.get("activations", 0) / in_flight
    return [(second, still + size) for second, size in line.memory_over_time(rank, each)]


def with_layout_keys(scenario: Scenario, **keys: int | str) -> Scenario:
    """The scenario in a layout with other keys."""
    return replace(scenario, layout=scenario.layout.replace(**keys))
