"""From a rule to the update of a rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from echelon.layout.placement import LogicalParam
from echelon.optim import cost
from echelon.optim.host_optimizer import DeviceAndHostOptimizer, HostOptimizer
from echelon.optim.optimizer_groups import is_muon_matrix
from echelon.optim.optimizer_protocol import ShardedOptimizer
from echelon.optim.param_shards import (
    FlatSegment,
    ParamShard,
    build_flat_segments,
    build_param_shards,
    uses_stochastic_rounding,
)
from echelon.optim.rules.adafactor import Adafactor
from echelon.optim.rules.adamw import FusedAdamW
from echelon.optim.rules.adamw_int8 import AdamWInt8
from echelon.optim.rules.lamb import LAMB
from echelon.optim.rules.lion import Lion
from echelon.optim.rules.muon import Muon
from echelon.optim.rules.sgd import FusedSGD
from echelon.optim.rules.sm3 import SM3
from echelon.optim.stochastic_rounding_update import StochasticRoundingOptimizer
from echelon.optim.torch_optimizer import TorchOptimizer
from echelon.optim.update_rule import UpdateRule
from echelon.parallel.dp.master_weights import UnsplitMasterWeights
from echelon.parallel.dp.param_group import ParamGroup
from echelon.parallel.parallel_model import ParallelModel


def build_optimizer(
    parallel: ParallelModel, rule: UpdateRule, units: Sequence[ParamGroup] | None = None
) -> ShardedOptimizer:
    """The update of all units' shards of one rank, or of some of them, where they live."""
    units = parallel.sharded_model.param_groups if units is None else units
    here, away = ([unit for unit in units if (unit.offloaded is not None) is there] for there in (False, True))
    if not away:
        return _build_on_one_device(parallel, rule, here)
    held = partial(cost.rank_state_bytes, rule, parallel.placement, master_bytes=parallel.options.master_dtype.itemsize)
    there = HostOptimizer(
        away,
        lambda host: _build_on_one_device(parallel, rule, [cast(ParamGroup, host)]),
        lambda host: held(units=[host.spec.name]),
    )
    return DeviceAndHostOptimizer(_build_on_one_device(parallel, rule, here), there)


def _build_on_one_device(parallel: ParallelModel, rule: UpdateRule, units: Sequence[ParamGroup]) -> ShardedOptimizer:
    device = units[0].unsharded_param.device if units else parallel.options.device
    if not any(uses_stochastic_rounding(unit) for unit in units):
        return _build_update(parallel, rule, units, device, None)
    step = torch.zeros((), dtype=torch.int64, device=device)
    held = [one for one in build_param_shards(parallel, rule, units) if uses_stochastic_rounding(one.param_group)]
    return StochasticRoundingOptimizer(_build_update(parallel, rule, units, device, step), step, held)


def _build_update(
    parallel: ParallelModel, rule: UpdateRule, units: Sequence[ParamGroup], device: torch.device, step: Tensor | None
) -> ShardedOptimizer:
    """`step` counts updates where weights are rounded by chance."""

    def held(only: Callable[[LogicalParam], bool] = lambda _: True) -> list[ParamShard]:
        return [one for one in build_param_shards(parallel, rule, units, step) if only(one.entry)]

    def runs(only: Callable[[LogicalParam], bool] = lambda _: True) -> list[FlatSegment]:
        return build_flat_segments(parallel, rule, units, only, step)

    def adamw(only: Callable[[LogicalParam], bool]) -> ShardedOptimizer:
        return FusedAdamW(runs(only), rule, device)

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
            mine = held(lambda entry: is_muon_matrix(rule, entry.name, entry.shape))
            return Muon(parallel, mine, rule, adamw(lambda entry: not is_muon_matrix(rule, entry.name, entry.shape)))
        case "adamw" if rule.states == "int8":
            short = held(lambda entry: cost.has_int8_state(rule, entry))
            return AdamWInt8(short, rule, device, adamw(lambda entry: not cost.has_int8_state(rule, entry)))
    plain = all(
        isinstance(unit.master, UnsplitMasterWeights)
        and unit.master.dtype == unit.grad_dtype
        and not uses_stochastic_rounding(unit)
        for unit in units
    )
    on_a_gpu = any(unit.unsharded_param.is_cuda and unit.master.dtype == torch.float32 for unit in units)
    if rule.name == "adamw" and (not plain or on_a_gpu or rule.states == "bfloat16"):
        return FusedAdamW(runs(), rule, device)
    if rule.name == "sgd" and (not plain or on_a_gpu):
        return FusedSGD(runs(), rule)
    return TorchOptimizer(runs(), rule)
