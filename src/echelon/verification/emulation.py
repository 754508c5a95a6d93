"""The truth of asynchronous schedules: their published update rules, on one device, one microbatch after another.

With d stages, counted from 0, and version v of the weights the one that v updates have made:

    pipedream         microbatch m is computed on version max(0, m - (d - 1 - s)) of stage s's weights, and is an update
    pipedream-vsync   ... on version max(0, m - d + 1) of all stages' weights
    2bw               batch t of k microbatches is computed on version max(0, t - 1), and is an update

Every update is applied to the newest weights. Clipping is by the norm of each stage. Nothing here knows a list of
actions; it shares with the pipeline only which parameters are on which stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call

from echelon import rng
from echelon.layout import Layout
from echelon.models.lm_head import loss_pair
from echelon.models.pipeline_model import inside
from echelon.optim.torch_rules import build
from echelon.pipeline.execution.stage import Stages, cut
from echelon.pipeline.schedule import loop
from echelon.verification.verify_case import Case

Weights = dict[str, Tensor]


def version_of(schedule: str, stage: int, stages: int, microbatch: int, per_update: int) -> int:
    """The published rule: the weights that a stage uses for a microbatch."""
    if schedule == "pipedream":
        return max(0, microbatch - (stages - 1 - stage))
    if schedule == "pipedream-vsync":
        return max(0, microbatch - stages + 1)
    return max(0, microbatch // per_update - 1)


def write_emulation(case: Case, layout_text: str, rows: int, path: Path) -> None:
    """Runs the rule of a layout's schedule and writes each step's loss, and the weights when all updates are made."""
    layout = Layout.parse(layout_text)
    per_update = layout.accumulate if layout.schedule == "2bw" else 1
    model = case.build("cpu")
    stream = rng.Stream(case.seed)
    rng.attach(model, stream)
    model.train()
    stage_of = homes(cut(model, loop(layout.pp)), model)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = build(case.optimizer, trainable)
    made: list[Weights] = [snapshot(model)]
    record: dict[str, Tensor] = {}
    size, microbatch = rows // layout.accumulate, 0
    gradients, count = zeros(trainable), 0
    for step in range(case.steps):
        batch = case.batch(step, rows)
        loss, targets = 0.0, 0
        for start in range(0, rows, size):
            weights = {
                name: made[version_of(layout.schedule, stage, layout.pp, microbatch, per_update)][name]
                for name, stage in stage_of.items()
            }
            leaves = {name: value.clone().requires_grad_(name in trainable) for name, value in weights.items()}
            stream.samples = torch.arange(start, start + size) + step * rows
            inputs = {key: value[start : start + size] for key, value in batch.items()}
            total, valid = loss_pair(functional_call(model, leaves, kwargs=inputs))
            if total.requires_grad:
                # What a microbatch does not use has a gradient of zero.
                wanted = [leaves[name] for name in trainable]
                found = torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)
                for name, gradient in zip(trainable, found, strict=True):
                    gradients[name] += gradient
            loss, targets, count = loss + total.item(), targets + int(valid), count + int(valid)
            microbatch += 1
            if microbatch % per_update == 0:
                apply_update(trainable, optimizer, gradients, stage_of, count, case.clip)
                made.append(snapshot(model))
                gradients, count = zeros(trainable), 0
        record[f"{step}/loss"] = torch.tensor(loss / max(targets, 1), dtype=torch.float64)
    record |= {f"{case.steps - 1}/parameter/{name}": value for name, value in made[-1].items()}
    save_file(record, path)


def apply_update(
    trainable: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    gradients: Mapping[str, Tensor],
    stage_of: Mapping[str, int],
    count: int,
    clip: float,
) -> None:
    if not count:
        return
    for name, parameter in trainable.items():
        parameter.grad = gradients[name] / count
    for stage in set(stage_of.values()):
        if clip:
            mine = [p for name, p in trainable.items() if stage_of[name] == stage]
            torch.nn.utils.clip_grad_norm_(mine, clip)
    optimizer.step()


def zeros(trainable: Mapping[str, nn.Parameter]) -> Weights:
    return {name: torch.zeros_like(parameter) for name, parameter in trainable.items()}


def snapshot(model: nn.Module) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def homes(stages: Stages, model: nn.Module) -> dict[str, int]:
    """The stage of every parameter."""
    return {
        name: stage
        for name, _ in model.named_parameters()
        for stage in range(stages.split.stages)
        if any(inside(name, module) for link in stages.links(stage) for module in link.modules)
    }
