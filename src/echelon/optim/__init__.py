"""Update rules on flat shards.

An elementwise rule (AdamW, SGD) does not care which parameter an element belongs to, so it runs on the few long runs
of each unit's shard that share hyperparameters. Three ways to run one:

    with_torch.py   torch's fused kernels, a handful of calls: masters in one tensor, on a CPU or in float64
    adamw.py        AdamW in one pass: split masters, moments in bfloat16, and every GPU
    sgd.py          SGD in plain torch: split masters, and every GPU

Units whose states live on the host are updated there, by the same rules, beside the device's work (on_host.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from echelon.optim.adamw import OnePassAdamW
from echelon.optim.on_host import OnHost, Together
from echelon.optim.rule import MOMENTS, Rule, Update, build, moment_bytes, num_moments, runs_of
from echelon.optim.sgd import PlainSGD
from echelon.optim.with_torch import WithTorch
from echelon.parallel.flat import Flat
from echelon.parallel.flat_unit import FlatUnit
from echelon.parallel.master import SplitMaster

__all__ = ["MOMENTS", "Rule", "Update", "build", "moment_bytes", "num_moments", "sharded"]


def sharded(flat: Flat, rule: Rule) -> Update:
    """The update of all units' shards of one rank, where they live."""
    away = [unit for unit in flat.units if unit.host is not None]
    here = some(flat, rule, [unit for unit in flat.units if unit.host is None])
    if not away:
        return here
    state_bytes = num_moments(rule) * moment_bytes(rule, away[0].master.dtype)
    return Together(here, OnHost(away, lambda unit: some(flat, rule, [cast(FlatUnit, unit)]), state_bytes))


def some(flat: Flat, rule: Rule, units: Sequence[FlatUnit]) -> Update:
    """The update of some units, all on one device."""
    runs = list(runs_of(flat, units))
    split = any(isinstance(unit.master, SplitMaster) for unit in units)
    on_a_gpu = any(unit.full.is_cuda and unit.master.dtype == torch.float32 for unit in units)
    short = bool(units) and rule.states == "bfloat16"  # a stage of a pipeline may have no parameter
    if rule.name == "adamw" and (split or on_a_gpu or short):
        return OnePassAdamW(runs, rule, units[0].full.device)
    if rule.name == "sgd" and (split or on_a_gpu):
        return PlainSGD(runs, rule)
    return WithTorch(runs, rule)
