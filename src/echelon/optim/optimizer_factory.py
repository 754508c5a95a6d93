"""From a rule to the update of a rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from echelon.layout.placement import Entry
from echelon.optim import cost
from echelon.optim.host_optimizer import OnHost, Together
from echelon.optim.optimizer_groups import is_muons
from echelon.optim.optimizer_protocol import Update
from echelon.optim.param_shards import Held, Run, held_of, is_rounded, runs_of
from echelon.optim.rules.adafactor import Adafactor
from echelon.optim.rules.adamw import OnePassAdamW
from echelon.optim.rules.adamw_int8 import AdamW8
from echelon.optim.rules.lamb import LAMB
from echelon.optim.rules.lion import Lion
from echelon.optim.rules.muon import Muon
from echelon.optim.rules.sgd import PlainSGD
from echelon.optim.rules.sm3 import SM3
from echelon.optim.stochastic_rounding_update import Counted
from echelon.optim.torch_optimizer import WithTorch
from echelon.optim.update_rule import Rule
from echelon.parallel.apply import Parallel
from echelon.parallel.dp.master_weights import WholeMaster
from echelon.parallel.dp.param_group import FlatUnit


def sharded(parallel: Parallel, rule: Rule, units: Sequence[FlatUnit] | None = None) -> Update:
    """The update of all units' shards of one rank, or of some of them, where they live."""
    units = parallel.flat.units if units is None else units
    here, away = ([unit for unit in units if (unit.host is not None) is there] for there in (False, True))
    if not away:
        return _on_one_device(parallel, rule, here)
    held = partial(cost.held_bytes, rule, parallel.placement, master_bytes=parallel.options.master.itemsize)
    there = OnHost(
        away,
        lambda host: _on_one_device(parallel, rule, [cast(FlatUnit, host)]),
        lambda host: held(units=[host.unit.name]),
    )
    return Together(_on_one_device(parallel, rule, here), there)


def _on_one_device(parallel: Parallel, rule: Rule, units: Sequence[FlatUnit]) -> Update:
    device = units[0].full.device if units else parallel.options.device
    if not any(is_rounded(unit) for unit in units):
        return _update(parallel, rule, units, device, None)
    step = torch.zeros((), dtype=torch.int64, device=device)
    held = [one for one in held_of(parallel, rule, units) if is_rounded(one.unit)]
    return Counted(_update(parallel, rule, units, device, step), step, held)


def _update(
    parallel: Parallel, rule: Rule, units: Sequence[FlatUnit], device: torch.device, step: Tensor | None
) -> Update:
    """`step` counts updates where weights are rounded by chance."""

    def held(only: Callable[[Entry], bool] = lambda _: True) -> list[Held]:
        return [one for one in held_of(parallel, rule, units, step) if only(one.entry)]

    def runs(only: Callable[[Entry], bool] = lambda _: True) -> list[Run]:
        return runs_of(parallel, rule, units, only, step)

    def adamw(only: Callable[[Entry], bool]) -> Update:
        return OnePassAdamW(runs(only), rule, device)

    match rule.name:
        case "lion":
            return Lion(runs(), rule)
        case "lamb":
            return LAMB(held(), rule, device)
        case "adafactor":
            return Adafactor(held(), rule, device)
        case "sm3":
            return SM3(held(), rule)
        case "muon":
            mine = held(lambda entry: is_muons(rule, entry.name, entry.shape))
            return Muon(parallel, mine, rule, adamw(lambda entry: not is_muons(rule, entry.name, entry.shape)))
        case "adamw" if rule.states == "int8":
            short = held(lambda entry: cost.is_short(rule, entry))
            return AdamW8(short, rule, device, adamw(lambda entry: not cost.is_short(rule, entry)))
    plain = all(
        isinstance(unit.master, WholeMaster) and unit.master.dtype == unit.gradient_type and not is_rounded(unit)
        for unit in units
    )
    on_a_gpu = any(unit.full.is_cuda and unit.master.dtype == torch.float32 for unit in units)
    if rule.name == "adamw" and (not plain or on_a_gpu or rule.states == "bfloat16"):
        return OnePassAdamW(runs(), rule, device)
    if rule.name == "sgd" and (not plain or on_a_gpu):
        return PlainSGD(runs(), rule)
    return WithTorch(runs(), rule)
