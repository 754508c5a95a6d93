"""Update rules on flat shards.

An elementwise rule (AdamW, SGD) does not care which parameter an element belongs to, so it runs on the few long runs
of each unit's shard that share hyperparameters. Three ways to run one:

    with_torch.py   torch's fused kernels, a handful of calls: masters in one tensor, on a CPU or in float64
    adamw.py        AdamW in one pass: split masters or none, moments in bfloat16, short gradients, and every GPU
    sgd.py          SGD in plain torch: split masters or none, short gradients, and every GPU
"""

from __future__ import annotations

import torch

from echelon.optim.adamw import OnePassAdamW
from echelon.optim.rule import MOMENTS, Rule, Update, build, moment_bytes, num_moments
from echelon.optim.sgd import PlainSGD
from echelon.optim.with_torch import WithTorch
from echelon.parallel.flat import Flat
from echelon.parallel.master import SplitMaster

__all__ = ["MOMENTS", "Rule", "Update", "build", "moment_bytes", "num_moments", "sharded"]


def sharded(flat: Flat, rule: Rule, *, seed: int = 0) -> Update:
    """The update of all units' shards of one rank; `seed` is that of weights that are rounded by chance."""
    split = any(
        isinstance(unit.master, SplitMaster)
        or unit.master.dtype == torch.bfloat16
        or unit.gradient_type != unit.master.dtype
        for unit in flat.units
    )
    on_a_gpu = any(unit.full.is_cuda and unit.master.dtype == torch.float32 for unit in flat.units)
    short = bool(flat.units) and rule.states == "bfloat16"  # a stage of a pipeline may have no parameter
    if rule.name == "adamw" and (split or on_a_gpu or short):
        return OnePassAdamW(flat, rule, seed)
    if rule.name == "sgd" and (split or on_a_gpu):
        return PlainSGD(flat, rule, seed)
    return WithTorch(flat, rule)
