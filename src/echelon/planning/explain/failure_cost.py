"""The cost of failures in a long run: the checkpoint interval, and goodput.

[Note: how often to save]

A save that training waits `d` seconds for, every `t` seconds, costs d / t of the time. A failure costs the work since
the newest checkpoint, t / 2 in the mean; with a failure every M seconds that is t / 2M. Their sum is least at

    t = sqrt(2 d M)                                      Young (1974)

which Daly (2006) makes exact for saves that are not short beside M. Our saves are written in the background: a
checkpoint exists some time after training has gone on, which is lost too if the failure comes in between, and the next
one waits for it.

[Note: what was measured, and how it grows]

bench/goodput.py measures, on two cores, what a save and a start cost besides the bytes they move, and what an index
costs for each box of a tensor. Bytes come from the plan, bandwidths from the cluster.
"""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass

from echelon.optim import cost
from echelon.planning.priced_plan import Plan

HOUR, DAY = 3600.0, 86400.0
DEVICE_HOURS = 16_384 * 54 * 24 / 419
"""of one failure: Llama 3's 419 unexpected interruptions in 54 days on 16,384 H100"""
ELEMENT_BYTES = 12
"""of an element on disk: master and two moments in float32"""
SAVE_S = 0.06
"""that training waits for a save beside copying bytes: measured"""
COMMIT_S = 0.3
"""from the last byte of a file to the checkpoint: measured"""
WRITE_BOX_S, READ_BOX_S = 1.6e-5, 1.6e-5
"""of the index for each box of a tensor, when it is written and when it is read: measured"""
BOXES_PER_SEGMENT = 3
"""boxes of a flat segment: the end of a row, full rows, the start of a row"""
START_S = 11.0
"""from a rank's death to the first step of new processes, without reading their state: measured"""
SHARED_STORE_BANDWIDTH = 2e12
"""bytes per second of a shared file system, as Llama 3 reports"""
GROUP_S = 30.0 / 10_000
"""for each device, to make groups of all of them: MegaScale reports less than 30 s for more than 10,000"""
REPLACE_S = 120.0
"""until a spare machine stands in for one that is gone: assumed"""
TIMEOUT_STEPS = 10
"""steps that a collective may take before it is given up"""
MIN_TIMEOUT = 30.0
MIN_BETWEEN_S = 60.0
"""between two failures: with less, no run gets anywhere, and the failures of 54 days cannot be simulated in seconds"""


@dataclass(frozen=True, kw_only=True)
class RecoveryTimes:
    """Seconds."""

    save: float
    """that training waits for a save"""
    exists: float
    """until its checkpoint exists, after that"""
    detect: float
    """until a failure is known: the time-out; a dead process is known at once"""
    replace: float
    restart: float
    """until the first step, from then on"""

    @property
    def down(self) -> float:
        return self.detect + self.replace + self.restart


@dataclass(frozen=True, kw_only=True)
class TimeShares:
    """Shares of a run's time."""

    useful: float
    saving: float
    lost: float
    """work since the newest checkpoint, which is repeated"""
    down: float


@dataclass(frozen=True, kw_only=True)
class PredictedGoodput:
    """What failures are predicted to cost a plan."""

    mtbf: float
    """seconds from one failure to the next, in the mean"""
    checkpoint_steps: int
    """between checkpoints"""
    checkpoint_seconds: float
    recovery: RecoveryTimes
    shares: TimeShares
    """the mean of the simulated runs"""
    low: float
    high: float
    """useful share of the worst and the best of them"""

    def to_json(self) -> dict[str, object]:
        return {
            "goodput": self.shares.useful,
            "goodput_low": self.low,
            "goodput_high": self.high,
            "failure_s": self.mtbf,
            "checkpoint_every": self.checkpoint_steps,
            "checkpoint_s": self.checkpoint_seconds,
            "timeout_s": self.recovery.detect,
            "recovery_s": asdict(self.recovery),
            "spent": asdict(self.shares),
        }


def predict_goodput(
    plan: Plan, *, device_hours: float = DEVICE_HOURS, days: float = 54.0, runs: int = 20
) -> PredictedGoodput:
    """Predict the goodput of a plan on its full cluster by simulated runs, deterministically."""
    devices = plan.scenario.cluster.devices
    between = device_hours * HOUR / devices
    if between < MIN_BETWEEN_S:
        raise ValueError(
            f"the cluster fails too often to predict its goodput (every {between:.3g} s: {device_hours:g} hours per "
            f"device, {devices:,} devices); give at least {MIN_BETWEEN_S * devices / HOUR:.3g} device hours"
        )
    recovery = estimate_recovery(plan)
    seconds = checkpoint_interval(between, recovery)
    every = max(1, round(seconds / plan.seconds))
    seconds = every * plan.seconds
    simulated = [simulate_run(between, recovery, seconds, days * DAY, seed) for seed in range(runs)]
    mean = {name: sum(getattr(run, name) for run in simulated) / runs for name in vars(simulated[0])}
    return PredictedGoodput(
        mtbf=between,
        checkpoint_steps=every,
        checkpoint_seconds=seconds,
        recovery=recovery,
        shares=TimeShares(**mean),
        low=min(run.useful for run in simulated),
        high=max(run.useful for run in simulated),
    )


def estimate_recovery(plan: Plan) -> RecoveryTimes:
    """See the second note."""
    layout, cluster, shape = plan.layout, plan.scenario.cluster, plan.scenario.shape
    writers = layout.tp * layout.pp * layout.num_shards * (layout.cp if layout.zero else 1)
    rule = plan.scenario.optimizer
    total = shape.parameters * (4 + cost.state_bytes_per_element(rule) if rule is not None else ELEMENT_BYTES)
    each, at_once = total / writers, min(writers, cluster.per_node)
    disk = max(each * at_once / cluster.disk_bandwidth, total / SHARED_STORE_BANDWIDTH)
    stretches = (shape.num_layers / layout.pp + 2) * ELEMENT_BYTES / 4
    boxes = writers * stretches * BOXES_PER_SEGMENT
    link = (cluster.curves.host if cluster.curves else 0.0) or cluster.device.host_link.bandwidth
    return RecoveryTimes(
        save=SAVE_S + each / link,
        exists=disk + COMMIT_S + WRITE_BOX_S * boxes,
        detect=max(MIN_TIMEOUT, TIMEOUT_STEPS * plan.seconds),
        replace=REPLACE_S,
        restart=START_S + GROUP_S * cluster.devices + READ_BOX_S * boxes + disk + plan.seconds,
    )


def checkpoint_interval(mtbf: float, recovery: RecoveryTimes) -> float:
    """Seconds from one save to the next, by Daly's formula; no save begins before the last one is through."""
    save = recovery.save
    if save >= 2 * mtbf:
        return mtbf
    ratio = save / (2 * mtbf)
    best = math.sqrt(2 * save * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save
    return max(best, recovery.exists)


def expected_goodput(mtbf: float, recovery: RecoveryTimes, interval: float) -> float:
    """The useful share to first order: see the first note."""
    return 1 - recovery.save / interval - (interval / 2 + recovery.exists + recovery.down) / mtbf


def simulate_run(mtbf: float, recovery: RecoveryTimes, interval: float, length: float, seed: int = 0) -> TimeShares:
    """A run of some length, failure by failure; failures come at any time, also while one is being mended."""
    chance = random.Random(seed)
    now = useful = saving = lost = down = 0.0
    cycle = interval + recovery.save
    while now < length:
        lasts = min(chance.expovariate(1 / mtbf), length - now)
        is_over = now + lasts >= length
        begun = int(lasts // cycle)
        there = begun if is_over else max(int((lasts - recovery.exists) // cycle), 0)
        # The run's end loses nothing: its last step is saved.
        saved = lasts - begun * recovery.save if is_over else there * interval
        useful += saved
        saving += begun * recovery.save
        lost += lasts - saved - begun * recovery.save
        now += lasts
        if is_over:
            break
        left = recovery.down
        while left > 0 and now < length:
            next_one = chance.expovariate(1 / mtbf)
            spent = min(left, next_one, length - now)
            now, down = now + spent, down + spent
            left = recovery.down if next_one < left else 0.0
    return TimeShares(useful=useful / now, saving=saving / now, lost=lost / now, down=down / now)
