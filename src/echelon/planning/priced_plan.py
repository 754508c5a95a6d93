"""`Plan`: a scenario with its predicted seconds by cause and bytes by category."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache

from echelon.layout import Layout
from echelon.pipeline.schedules import FAMILIES, make_schedule
from echelon.pipeline.simulate import Durations, simulate
from echelon.pipeline.timeline import Timeline
from echelon.planning.calibrate.calibration import constants_for
from echelon.planning.calibrate.confidence import extrapolations, interval_factor
from echelon.planning.calibrate.constants import FITTED_CONSTANTS, Constants
from echelon.planning.cost.count_work import count_work
from echelon.planning.cost.expert_traffic import all_to_all_bytes_per_token
from echelon.planning.cost.memory_model import RankMemory, peak_memory, stage_memory
from echelon.planning.cost.recompute_cost import recompute_shares
from echelon.planning.cost.step_time import StepTimes, microbatch_time, recompute_time, step_times
from echelon.planning.cost.step_work import StepWork
from echelon.planning.scenario import Scenario

MAX_SIMULATED_ACTIONS = 4_000
"""simulated per plan; longer steps are simulated in part and extrapolated from their steady state"""
NEGLIGIBLE_SECONDS = 1e-12
"""shorter times are rounding errors"""
STEADY_MICROBATCHES = 16
"""microbatches after which a schedule is in its steady state, or twice pp if that is more"""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A scenario and its predicted time and memory."""

    scenario: Scenario
    times: dict[str, float]
    """seconds of a step by cause"""
    memory: RankMemory
    """of the fullest rank"""
    bubble: float
    """share of the pipeline's time that ranks wait"""
    spread: float
    """factor, up and down, within which four of five runs lie"""
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
        return self.scenario.runnable

    @property
    def extrapolated(self) -> list[str]:
        """Why nothing near was measured; empty if something was."""
        return extrapolations(self.scenario)

    @property
    def tokens_per_s(self) -> float:
        return self.scenario.batch_tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, of the 16-bit peak of the devices in use."""
        return self._utilisation(self.scenario.train_flops)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation: with recomputed FLOPs."""
        shape, seq_len, recompute = self.scenario.shape, self.scenario.seq_len, recompute_shares(self.scenario)
        layers = shape.flops(seq_len) - 2.0 * shape.head_parameters
        attention = sum(n * layer.attention.flops(seq_len) for layer, n in shape.layers if layer.attention)
        gemms = layers - attention
        recomputed = float(recompute.layers * layers + recompute.attention * attention + recompute.gemms * gemms)
        return self._utilisation(self.scenario.train_flops + recomputed)

    def _utilisation(self, flops: float) -> float:
        """Share of the peak that `flops` per token reach."""
        return flops * self.tokens_per_s / (self.scenario.cluster.device.peak("bf16") * self.layout.world)

    def to_json(self) -> dict[str, object]:
        """The keys of `echelon plan --json`."""
        return {
            "layout": str(self.layout),
            "precision": self.scenario.precision,
            "program": self.scenario.program,
            "parameters": self.scenario.shape.parameters,
            "active_parameters": self.scenario.shape.active_parameters,
            "imbalance": self.scenario.imbalance if self.scenario.shape.experts else None,
            "all_to_all_bytes": all_to_all_bytes_per_token(self.scenario),
            "runnable": self.runnable,
            "fits": self.fits,
            "step_s": self.seconds,
            "step_s_low": self.low,
            "step_s_high": self.high,
            "extrapolated": self.extrapolated,
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
    """Predict one scenario, its pipeline simulated."""
    work, c = count_work(scenario), constants_for(scenario, c)
    predicted = step_times(work, c)
    times = {field.name: scenario.correction * float(getattr(predicted, field.name)) for field in fields(StepTimes)}
    bubble = 0.0
    if scenario.layout.pp > 1:
        duration, bubble = _simulate_pipeline(scenario, work, c)
        head = float(microbatch_time(work, c).all_head) * scenario.layout.accumulate / scenario.layout.pp
        times["head"] = scenario.correction * head
        computed = sum(times[name] for name in STAGE_CAUSES)
        # The simulated bubble includes waiting for the slowest stage and for p2p transfers.
        times |= {"imbalance": 0.0, "bubble": duration - computed, "pp": 0.0}
    return Plan(
        scenario=scenario,
        times={name: seconds for name, seconds in times.items() if abs(seconds) > NEGLIGIBLE_SECONDS},
        memory=peak_memory(scenario, c),
        bubble=bubble,
        spread=interval_factor(scenario, c),
    )


STAGE_CAUSES = ("products", "attention", "passing", "launches", "head", "recompute", "tp", "ep", "cp")
"""causes that the actions of stages consist of"""


def action_durations(scenario: Scenario, work: StepWork, c: Constants = FITTED_CONSTANTS) -> Durations:
    """Seconds of every action of every stage."""
    m, correction = microbatch_time(work, c), scenario.correction
    # Stages have equally many layers if pp divides them, else the last ones have fewer.
    stages, layers = scenario.layout.pp * scenario.layout.vpp, scenario.shape.num_layers
    each, rest = divmod(layers, stages)
    shares = [correction * ((each + (stage < rest)) / layers) for stage in range(stages)]
    # A layer has two tp collectives in forward, two in backward, and two for recomputation.
    forward_share = 2 / (4 + 2 * float(work.microbatch.recompute.layers))
    communication = float(m.communication)
    forward, weight_grad = float(m.forward) + forward_share * communication, float(m.weight_grad)
    recompute = float(recompute_time(work, m))
    input_grad = float(m.backward) - weight_grad + recompute + (1 - forward_share) * communication
    last, head, send = len(shares) - 1, correction * float(m.head), correction * float(m.pp)

    def per_stage(seconds: float, head: float = head) -> tuple[float, ...]:
        return tuple(share * seconds + head * (stage == last) for stage, share in enumerate(shares))

    return Durations(
        forward=per_stage(forward),
        input_grad=per_stage(input_grad),
        weight_grad=per_stage(weight_grad, float(m.is_trained) * head),
        send_forward=send,
        send_backward=send,
    )


def step_timeline(scenario: Scenario, c: Constants = FITTED_CONSTANTS, *, microbatches: int = 0) -> Timeline:
    """Simulate a step, action by action; or one of fewer microbatches."""
    layout = scenario.layout
    schedule = make_schedule(layout.schedule, layout.pp, microbatches or layout.accumulate, chunks=layout.vpp)
    return simulate(schedule, action_durations(scenario, count_work(scenario), constants_for(scenario, c)))


def _simulate_pipeline(scenario: Scenario, work: StepWork, c: Constants) -> tuple[float, float]:
    """Return (seconds of a step's passes, share of them that ranks wait)."""
    layout = scenario.layout
    durations = action_durations(scenario, work, c)
    family = FAMILIES.get(layout.schedule)
    chunks = layout.vpp if family is not None and family.chunks is None else 0

    def run(microbatches: int) -> tuple[float, float]:
        if family is not None:
            return _cached_simulation(layout.schedule, layout.pp, microbatches, chunks, durations)
        schedule = make_schedule(layout.schedule, layout.pp, microbatches, chunks=chunks)  # a file, which may change
        timeline = simulate(schedule, durations)
        return timeline.duration, timeline.bubble

    first = -(-max(STEADY_MICROBATCHES, 2 * layout.pp) // layout.pp) * layout.pp
    second = first + layout.pp
    if 3 * layout.pp * layout.vpp * layout.accumulate <= MAX_SIMULATED_ACTIONS or second >= layout.accumulate:
        return run(layout.accumulate)
    short, longer = run(first)[0], run(second)[0]
    duration = longer + (layout.accumulate - second) * (longer - short) / (second - first)
    passes = (durations.forward, durations.input_grad, durations.weight_grad)
    stages = sum(sum(seconds) if isinstance(seconds, tuple) else seconds for seconds in passes)
    busy = layout.accumulate * stages / layout.pp
    return duration, max(0.0, 1 - busy / duration)


@lru_cache(maxsize=512)
def _cached_simulation(
    schedule: str, ranks: int, microbatches: int, chunks: int, durations: Durations
) -> tuple[float, float]:
    """Return (seconds, bubble). Many layouts of a search have the same durations: zero does not change them."""
    timeline = simulate(_cached_schedule(schedule, ranks, microbatches, chunks=chunks), durations)
    return timeline.duration, timeline.bubble


_cached_schedule = lru_cache(maxsize=32)(make_schedule)


def memory_by_stage(scenario: Scenario, c: Constants = FITTED_CONSTANTS) -> list[RankMemory]:
    c = constants_for(scenario, c)
    return [stage_memory(scenario, stage, c) for stage in range(scenario.layout.pp)]


def memory_over_time(scenario: Scenario, rank: int, c: Constants = FITTED_CONSTANTS) -> list[tuple[float, float]]:
    """Return (seconds, bytes) of a rank through the passes of a step."""
    c = constants_for(scenario, c)
    memory = stage_memory(scenario, rank, c)
    activations = memory.parts.get("activations", 0)
    base = memory.total - activations
    if scenario.layout.pp == 1:
        seconds = scenario.correction * float(step_times(count_work(scenario), c).total)
        return [(0.0, base), (seconds, memory.total)]
    timeline = step_timeline(scenario, c)
    per_microbatch = activations / max(1, timeline.in_flight[rank])
    return [(second, base + size) for second, size in timeline.memory_over_time(rank, per_microbatch)]


def with_layout_keys(scenario: Scenario, **keys: int | str) -> Scenario:
    return replace(scenario, layout=scenario.layout.replace(**keys))
