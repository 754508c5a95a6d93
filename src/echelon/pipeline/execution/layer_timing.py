"""What a model's links and the wires between ranks really take, tried before a run.

Links are tried one after another on one device, each with its own weights alone, so a model that is too large for the
device can be tried too. Weights are random: a product takes as long whatever it multiplies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.layout import Layout, Mesh
from echelon.models.lm_head import loss_pair
from echelon.models.pipeline_model import Link, chain_of, inside
from echelon.parallel.init_weights import move_buffers
from echelon.pipeline.execution.stage_io import Alias, put_together, taken_apart
from echelon.pipeline.layer_profile import LinkProfile, Profile
from echelon.pipeline.partition import Split
from echelon.pipeline.schedules import of_layout
from echelon.pipeline.stage_replication import by_profile

REPEATS = 3
"""times that everything is tried, after once to warm up; the shortest is the truest"""


def profile_of(
    model: nn.Module, inputs: Mapping[str, Tensor], *, device: torch.device, dtype: torch.dtype, repeats: int = REPEATS
) -> Profile:
    """Tries every link on these inputs. The model is used up: its weights are gone afterwards."""
    chain = chain_of(model)
    move_buffers(model, device, dtype)
    here = {key: value.to(device, dtype if value.is_floating_point() else None) for key, value in inputs.items()}
    shared, found = chain.shared(**here), []
    carried: object = None
    for link in chain.links:
        weights = _filled(model, link, device, dtype)
        trial = _Trial(link, carried, shared, here, weights)
        carried = trial.given_on
        found.append(trial.profile(device, repeats))
        _emptied(model, weights)
    return Profile(links=tuple(found), source="measured")


class _Trial:
    """One link with its inputs, weights and outputs."""

    def __init__(
        self, link: Link, carried: object, shared: object, inputs: Mapping[str, Tensor], weights: list[Tensor]
    ):
        self.link, self.weights = link, weights
        holder, tensors = taken_apart(carried, link.name) if carried is not None else (tuple, ())
        self.carried = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in tensors)

        def run() -> object:
            again = [Alias.apply(tensor) for tensor in self.carried]
            return link.run(put_together(holder, again) if again else None, shared, **inputs)

        self.run = run
        self.given_on: object = None
        self.outputs = self.forward()

    def forward(self) -> tuple[Tensor, ...]:
        out = self.given_on = self.run()
        # The last link gives the loss and the number of targets: of these only the loss has a gradient.
        if isinstance(out, tuple) and len(out) == 2 and isinstance(out[0], Tensor) and out[0].dim() == 0:
            return (loss_pair(out)[0],)
        return taken_apart(out, self.link.name)[1]

    def profile(self, device: torch.device, repeats: int) -> LinkProfile:
        made = [tensor for tensor in self.outputs if tensor.requires_grad]
        seeds = [torch.ones_like(tensor) for tensor in made]
        wanted = [tensor for tensor in self.carried if tensor.requires_grad]
        weights = [weight for weight in self.weights if weight.requires_grad]

        def backward(to: list[Tensor]) -> None:
            if made and to:
                torch.autograd.grad(made, to, seeds, retain_graph=True, allow_unused=True)

        forward_s = _shortest(self.forward, device, repeats)
        input_s = _shortest(lambda: backward(wanted), device, repeats)
        both_s = _shortest(lambda: backward([*wanted, *weights]), device, repeats)
        return LinkProfile(
            name=self.link.name,
            forward_s=forward_s,
            input_s=input_s,
            weight_s=max(both_s - input_s, 0.0),
            activation_bytes=sum(tensor.nbytes for tensor in self.outputs),
            parameter_bytes=sum(weight.nbytes for weight in self.weights),
        )


def everywhere(profile: Callable[[], Profile]) -> Profile:
    """The first rank's profile, on every rank: all must cut alike."""
    told = [profile().to_json() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(told)
    return Profile.from_json(told[0])


def measured_split(profile: Profile, layout: Layout, device: torch.device) -> Split:
    """The stages of a layout by a profile of its layers and the speed of the wires, which is tried; on every rank."""
    homes = of_layout(layout).homes
    size = max(link.activation_bytes for link in profile.links)
    wires = speeds(homes, Mesh(layout).groups("pp")[0], size, device)
    return by_profile(profile, len(homes), wires, homes=homes)


def speeds(homes: Sequence[int], ranks: Sequence[int], size: int, device: torch.device) -> list[float]:
    """Bytes per second of `size` bytes and as many back, between each two consecutive stages; every rank must ask.

    `homes` are places among `ranks`. Between two stages at home on one rank nothing is sent: there the speed is 1.
    """
    found = []
    for here, there in pairwise(ranks[home] for home in homes):
        seconds = torch.full((1,), float("inf"), dtype=torch.float64, device=device)
        message = torch.zeros(max(size, 1), dtype=torch.uint8, device=device)
        for _ in range(1 + REPEATS if here != there else 0):
            begun = time.perf_counter()
            if dist.get_rank() == here:
                dist.send(message, there)
                dist.recv(message, there)
                _wait(device)
                seconds.clamp_(max=time.perf_counter() - begun)
            elif dist.get_rank() == there:
                dist.recv(message, here)
                dist.send(message, here)
        dist.broadcast(seconds, here)
        found.append(2 * message.numel() / float(seconds) if here != there else 1.0)
    return found


def _filled(model: nn.Module, link: Link, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """The link's parameters, on the device; those that were nowhere get random values."""
    found: list[Tensor] = []
    for name in _parameters(model, link):
        module, last = _holder(model, name)
        old = getattr(module, last)
        data = torch.randn(old.shape, device=device, dtype=dtype) * 0.02 if old.is_meta else old.to(device, dtype)
        setattr(module, last, nn.Parameter(data, requires_grad=old.requires_grad))
        found.append(getattr(module, last))
    return found


def _emptied(model: nn.Module, weights: list[Tensor]) -> None:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if any(parameter is weight for weight in weights):
                setattr(module, name, nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad))


def _parameters(model: nn.Module, link: Link) -> list[str]:
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return [name for name in names if any(inside(name, other) for other in link.modules)]


def _holder(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last


def _shortest(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    seconds = []
    for _ in range(1 + repeats):
        begun = time.perf_counter()
        work()
        _wait(device)
        seconds.append(time.perf_counter() - begun)
    return min(seconds[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
