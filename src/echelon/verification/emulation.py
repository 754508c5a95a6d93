"""The truth of asynchronous schedules: their published update rules, on one device, one microbatch after another.

With d stages, counted from 0, and version v of the weights the result of v updates:

    pipedream         microbatch m is computed on version max(0, m - (d - 1 - s)) of stage s's weights, and is an update
    pipedream-vsync   ... on version max(0, m - d + 1) of all stages' weights
    2bw               batch t of k microbatches is computed on version max(0, t - 1), and is an update

Every update applies to the latest weights. Clipping is by the norm of each stage. This code knows no actions; it shares
with the pipeline only the parameters of each stage.
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
from echelon.models.layers import check_loss_output
from echelon.models.pipeline_model import is_within
from echelon.pipeline.execution.stage_assignment import PipelineStages, cut_into_stages
from echelon.pipeline.schedule import looped_placement
from echelon.verification.reference_optimizer import ReferenceOptimizer, filter_names
from echelon.verification.verify_case import VerifyCase

WeightSnapshot = dict[str, Tensor]


def version_of(schedule: str, stage: int, stages: int, microbatch: int, per_update: int) -> int:
    """The published rule: the weight version that a stage uses for a microbatch."""
    if schedule == "pipedream":
        return max(0, microbatch - (stages - 1 - stage))
    if schedule == "pipedream-vsync":
        return max(0, microbatch - stages + 1)
    return max(0, microbatch // per_update - 1)


def write_emulation(case: VerifyCase, layout_text: str, path: Path) -> None:
    """Run the rule of a layout's schedule, and write each step's loss and the final weights."""
    layout = Layout.parse(layout_text)
    num_sequences = layout.batch
    per_update = layout.accumulate if layout.schedule == "2bw" else 1
    model = case.build("cpu")
    stream = rng.RandomStream(case.seed)
    rng.attach_stream(model, stream)
    model.train()
    stage_of = stage_of_parameters(cut_into_stages(model, looped_placement(layout.pp)), model)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = ReferenceOptimizer(case.optimizer, trainable, filter_names(model))
    versions: list[WeightSnapshot] = [snapshot(model)]
    record: dict[str, Tensor] = {}
    size, microbatch = num_sequences // layout.accumulate, 0
    gradients, count = zero_gradients(trainable), 0
    for step in range(case.steps):
        batch = case.batch(step, num_sequences)
        loss, targets = 0.0, 0
        for start in range(0, num_sequences, size):
            weights = {
                name: versions[version_of(layout.schedule, stage, layout.pp, microbatch, per_update)][name]
                for name, stage in stage_of.items()
            }
            leaves = {name: value.clone().requires_grad_(name in trainable) for name, value in weights.items()}
            stream.samples = torch.arange(start, start + size) + step * num_sequences
            inputs = {key: value[start : start + size] for key, value in batch.items()}
            total, valid = check_loss_output(functional_call(model, leaves, kwargs=inputs))
            if total.requires_grad:
                # Parameters that a microbatch does not use have a gradient of zero.
                wrt = [leaves[name] for name in trainable]
                grads = torch.autograd.grad(total, wrt, allow_unused=True, materialize_grads=True)
                for name, gradient in zip(trainable, grads, strict=True):
                    gradients[name] += gradient
            loss, targets, count = loss + total.item(), targets + int(valid), count + int(valid)
            microbatch += 1
            if microbatch % per_update == 0:
                apply_update(trainable, optimizer, gradients, stage_of, count, case.clip, case.learning_rate(step))
                versions.append(snapshot(model))
                gradients, count = zero_gradients(trainable), 0
        record[f"{step}/loss"] = torch.tensor(loss / max(targets, 1), dtype=torch.float64)
    record |= {f"{case.steps - 1}/parameter/{name}": value for name, value in versions[-1].items()}
    save_file(record, path)


def apply_update(
    trainable: Mapping[str, nn.Parameter],
    optimizer: ReferenceOptimizer,
    gradients: Mapping[str, Tensor],
    stage_of: Mapping[str, int],
    count: int,
    clip: float,
    lr: float,
) -> None:
    if not count:
        return
    for name, parameter in trainable.items():
        parameter.grad = gradients[name] / count
    for stage in set(stage_of.values()) if clip else ():
        torch.nn.utils.clip_grad_norm_([p for name, p in trainable.items() if stage_of[name] == stage], clip)
    optimizer.step(lr)


def zero_gradients(trainable: Mapping[str, nn.Parameter]) -> WeightSnapshot:
    return {name: torch.zeros_like(parameter) for name, parameter in trainable.items()}


def snapshot(model: nn.Module) -> WeightSnapshot:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def stage_of_parameters(stages: PipelineStages, model: nn.Module) -> dict[str, int]:
    """The stage of every parameter."""
    return {
        name: stage
        for name, _ in model.named_parameters()
        for stage in range(stages.split.stages)
        if any(is_within(name, module) for link in stages.layers(stage) for module in link.modules)
    }
