"""Builds the optimizer of a rank's shards from an update rule.

A new optimizer is a file in rules/ and a case here; CONTRIBUTING.md lists its name, defaults and costs elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from echelon.layout.placement import LogicalParam
from echelon.optim import cost, offload_support
from echelon.optim.flat_segments import FlatSegment, build_flat_segments
from echelon.optim.host_optimizer import HostOptimizer
from echelon.optim.optimizer_groups import is_muon_matrix
from echelon.optim.optimizer_protocol import CombinedOptimizer, ShardedOptimizer
from echelon.optim.paged_optimizer import PagedOptimizer
from echelon.optim.param_shards import ParamShard, build_param_shards, uses_stochastic_rounding
from echelon.optim.rules.adafactor import Adafactor
from echelon.optim.rules.adamw import FusedAdamW
from echelon.optim.rules.adamw_int8 import AdamWInt8
from echelon.optim.rules.lamb import LAMB
from echelon.optim.rules.lion import Lion
from echelon.optim.rules.muon import Muon
from echelon.optim.rules.sgd import FusedSGD
from echelon.optim.rules.sm3 import SM3
from echelon.optim.stochastic_rounding import StochasticRoundingOptimizer
from echelon.optim.torch_optimizer import TorchOptimizer
from echelon.optim.update_rule import UpdateRule
from echelon.parallel.dp.master_weights import UnsplitMasterWeights
from echelon.parallel.dp.offloaded_param_group import OffloadedParamGroup
from echelon.parallel.dp.param_group import ParamGroup
from echelon.parallel.parallel_model import ParallelModel

Include = Callable[[LogicalParam], bool]


def build_optimizer(
    parallel: ParallelModel, rule: UpdateRule, param_groups: Sequence[ParamGroup] | None = None
) -> ShardedOptimizer:
    """Build the optimizer of all parameter groups of a rank, or of some, on the device and on the host."""
    groups = parallel.sharded_model.trainable_groups if param_groups is None else param_groups
    on_device = [group for group in groups if group.offloaded is None]
    on_host = [group for group in groups if group.offloaded is not None]
    if not on_host:
        return _build_on_one_device(parallel, rule, on_device)
    state_bytes = partial(
        cost.rank_state_bytes, rule, parallel.placement, master_bytes=parallel.options.master_dtype.itemsize
    )

    def group_state_bytes(group: OffloadedParamGroup) -> int:
        return state_bytes(param_groups=[group.spec.name])

    def build(groups: Sequence[OffloadedParamGroup]) -> ShardedOptimizer:
        return _build_on_one_device(parallel, rule, cast(Sequence[ParamGroup], groups))

    host: ShardedOptimizer
    if offload_support.updates_on_device(rule):
        per_element = cost.state_bytes_per_element(rule, parallel.options.master_dtype.itemsize)
        host = PagedOptimizer(on_host, build, group_state_bytes, per_element)
    else:
        host = HostOptimizer(on_host, lambda group: build([group]), group_state_bytes)
    return CombinedOptimizer([_build_on_one_device(parallel, rule, on_device), host])


def _build_on_one_device(
    parallel: ParallelModel, rule: UpdateRule, param_groups: Sequence[ParamGroup]
) -> ShardedOptimizer:
    device = param_groups[0].unsharded_param.device if param_groups else parallel.options.device
    if not any(uses_stochastic_rounding(group) for group in param_groups):
        return _build_rule(parallel, rule, param_groups, device, None)
    step = torch.zeros((), dtype=torch.int64, device=device)
    shards = build_param_shards(parallel, rule, param_groups)
    rounded = [shard for shard in shards if uses_stochastic_rounding(shard.param_group)]
    return StochasticRoundingOptimizer(_build_rule(parallel, rule, param_groups, device, step), step, rounded)


def _build_rule(
    parallel: ParallelModel,
    rule: UpdateRule,
    param_groups: Sequence[ParamGroup],
    device: torch.device,
    step: Tensor | None,
) -> ShardedOptimizer:
    """Build the rule's optimizer; `step` counts updates for stochastic rounding."""

    def shards(include: Include = lambda _: True) -> list[ParamShard]:
        return [shard for shard in build_param_shards(parallel, rule, param_groups, step) if include(shard.param)]

    def segments(include: Include = lambda _: True) -> list[FlatSegment]:
        return build_flat_segments(parallel, rule, param_groups, include, step)

    def is_muon(param: LogicalParam) -> bool:
        return is_muon_matrix(rule, param.name, param.shape)

    def is_int8(param: LogicalParam) -> bool:
        return cost.has_int8_state(rule, param)

    def adamw_without(excluded: Include) -> ShardedOptimizer:
        return FusedAdamW(segments(lambda param: not excluded(param)), rule, device)

    match rule.name:
        case "lion":
            return Lion(segments(), rule)
        case "lamb":
            return LAMB(shards(), rule, device)
        case "adafactor":
            return Adafactor(shards(), rule, device)
        case "sm3":
            return SM3(shards(), rule, device)
        case "muon":
            return Muon(parallel, shards(is_muon), rule, adamw_without(is_muon))
        case "adamw" if rule.states == "int8":
            return AdamWInt8(shards(is_int8), rule, device, adamw_without(is_int8))
    torch_compatible = all(
        isinstance(group.master, UnsplitMasterWeights)
        and group.master.dtype == group.grad_dtype
        and not uses_stochastic_rounding(group)
        for group in param_groups
    )
    on_gpu = any(group.unsharded_param.is_cuda and group.master.dtype == torch.float32 for group in param_groups)
    if rule.name == "adamw" and (not torch_compatible or on_gpu or rule.states == "bfloat16"):
        return FusedAdamW(segments(), rule, device)
    if rule.name == "sgd" and (not torch_compatible or on_gpu):
        return FusedSGD(segments(), rule)
    return TorchOptimizer(segments(), rule)
