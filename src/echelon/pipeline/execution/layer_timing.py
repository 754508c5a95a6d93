"""Measure the time of a model's layers and the bandwidth between ranks, before a run.

Layers run one after another on one device, each with only its own weights, so a model that is too large for the
device can be measured too. Weights are random: the time of a matmul does not depend on values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.layout import Mesh
from echelon.models.layers import check_loss_output
from echelon.models.pipeline_model import PipelineLayer, get_pipeline_model, is_within
from echelon.parallel.init_weights import move_buffers
from echelon.pipeline.execution.stage_io import NonLeafAlias, pack_tensors, unpack_tensors
from echelon.pipeline.layer_profile import LayerProfile, PipelineProfile
from echelon.pipeline.partition import StageSplit
from echelon.pipeline.schedules import schedule_for_layout
from echelon.pipeline.stage_replication import split_by_profile

REPEATS = 3
"""timed repetitions after one to warm up; the shortest counts"""


def measure_profile(
    model: nn.Module, inputs: Mapping[str, Tensor], *, device: torch.device, dtype: torch.dtype, repeats: int = REPEATS
) -> PipelineProfile:
    """Time every layer on these inputs. The model loses its weights."""
    pipeline_model = get_pipeline_model(model)
    move_buffers(model, device, dtype)
    on_device = {key: value.to(device, dtype if value.is_floating_point() else None) for key, value in inputs.items()}
    shared, results = pipeline_model.shared(**on_device), []
    carried: object = None
    for layer in pipeline_model.layers:
        weights = _materialize_layer(model, layer, device, dtype)
        trial = _LayerTrial(layer, carried, shared, on_device, weights)
        carried = trial.output
        results.append(trial.profile(device, repeats))
        _free_layer(model, weights)
    return PipelineProfile(links=tuple(results), source="measured")


class _LayerTrial:
    """One layer with its inputs, weights and outputs."""

    def __init__(
        self,
        layer: PipelineLayer,
        activations: object,
        shared: object,
        inputs: Mapping[str, Tensor],
        weights: list[Tensor],
    ):
        self.layer, self.weights = layer, weights
        holder, tensors = unpack_tensors(activations, layer.name) if activations is not None else (tuple, ())
        self.inputs = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in tensors)

        def run() -> object:
            again = [NonLeafAlias.apply(tensor) for tensor in self.inputs]
            return layer.run(pack_tensors(holder, again) if again else None, shared, **inputs)

        self.run = run
        self.output: object = None
        self.outputs = self.forward()

    def forward(self) -> tuple[Tensor, ...]:
        out = self.output = self.run()
        # The last layer returns (loss, number of targets), of which only the loss has a gradient.
        if isinstance(out, tuple) and len(out) == 2 and isinstance(out[0], Tensor) and out[0].dim() == 0:
            return (check_loss_output(out)[0],)
        return unpack_tensors(out, self.layer.name)[1]

    def profile(self, device: torch.device, repeats: int) -> LayerProfile:
        made = [tensor for tensor in self.outputs if tensor.requires_grad]
        seeds = [torch.ones_like(tensor) for tensor in made]
        wanted = [tensor for tensor in self.inputs if tensor.requires_grad]
        weights = [weight for weight in self.weights if weight.requires_grad]

        def backward(to: list[Tensor]) -> None:
            if made and to:
                torch.autograd.grad(made, to, seeds, retain_graph=True, allow_unused=True)

        forward_s = _min_time(self.forward, device, repeats)
        input_s = _min_time(lambda: backward(wanted), device, repeats)
        both_s = _min_time(lambda: backward([*wanted, *weights]), device, repeats)
        return LayerProfile(
            name=self.layer.name,
            forward_s=forward_s,
            input_s=input_s,
            weight_s=max(both_s - input_s, 0.0),
            activation_bytes=sum(tensor.nbytes for tensor in self.outputs),
            parameter_bytes=sum(weight.nbytes for weight in self.weights),
        )


def broadcast_profile(measure: Callable[[], PipelineProfile]) -> PipelineProfile:
    """The profile that rank 0 measures, on every rank: all ranks must split alike."""
    profiles = [measure().to_json() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(profiles)
    return PipelineProfile.from_json(profiles[0])


def measure_split(profile: PipelineProfile, mesh: Mesh, device: torch.device) -> StageSplit:
    """Split a layout's stages by a profile and the measured bandwidth between ranks. Collective."""
    rank_of_stage = schedule_for_layout(mesh.layout).rank_of_stage
    size = max(layer.activation_bytes for layer in profile.links)
    bandwidths = measure_bandwidths(rank_of_stage, mesh.groups("pp")[0], size, device)
    return split_by_profile(profile, len(rank_of_stage), bandwidths, rank_of_stage=rank_of_stage)


def measure_bandwidths(
    rank_of_stage: Sequence[int], ranks: Sequence[int], size: int, device: torch.device
) -> list[float]:
    """Bytes per second of a round trip of `size` bytes between consecutive stages. Collective.

    `rank_of_stage` are indices of `ranks`. Two stages of one rank transfer nothing: the result is 1.
    """
    results = []
    for sender, receiver in pairwise(ranks[index] for index in rank_of_stage):
        seconds = torch.full((1,), float("inf"), dtype=torch.float64, device=device)
        message = torch.zeros(max(size, 1), dtype=torch.uint8, device=device)
        for _ in range(1 + REPEATS if sender != receiver else 0):
            start = time.perf_counter()
            if dist.get_rank() == sender:
                dist.send(message, receiver)
                dist.recv(message, receiver)
                _synchronize(device)
                seconds.clamp_(max=time.perf_counter() - start)
            elif dist.get_rank() == receiver:
                dist.recv(message, sender)
                dist.send(message, sender)
        dist.broadcast(seconds, sender)
        results.append(2 * message.numel() / float(seconds) if sender != receiver else 1.0)
    return results


def _materialize_layer(
    model: nn.Module, layer: PipelineLayer, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """The layer's parameters on the device; those on the meta device get random values."""
    weights: list[Tensor] = []
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for name in (name for name in names if any(is_within(name, module) for module in layer.modules)):
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        old = getattr(module, last)
        data = torch.randn(old.shape, device=device, dtype=dtype) * 0.02 if old.is_meta else old.to(device, dtype)
        setattr(module, last, nn.Parameter(data, requires_grad=old.requires_grad))
        weights.append(getattr(module, last))
    return weights


def _free_layer(model: nn.Module, weights: list[Tensor]) -> None:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if any(parameter is weight for weight in weights):
                setattr(module, name, nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad))


def _min_time(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    seconds = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        work()
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
