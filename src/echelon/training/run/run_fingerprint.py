"""Fingerprint of a run's data and model: equal on every rank, and when the run resumes.

A checkpoint stores it. Tokens that have changed, or another rope base in the model's file, would continue a run that
no single run equals, without an error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from echelon.launch.world import World
    from echelon.models.model_config import ModelConfig

NEW_RUN = "or start a new run; `echelon export` writes the weights of this one"
MAX_LISTED_FIELDS = 4
SAMPLED_ELEMENTS = 1 << 16
"""of a large tensor of a batch"""


@dataclass(frozen=True, kw_only=True)
class RunFingerprint:
    """What must not change under a run, besides the keys of its configuration."""

    data: str = ""
    """hash of the tokens and their order; empty for the batches of a user's file"""
    model: Mapping[str, Any]
    """every field of the model's definition; {} for a user's model"""
    source: str = ""
    """hash of the user's file; empty for a built-in model"""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def model_fields(model: ModelConfig) -> dict[str, Any]:
    """Return every field of a model as JSON has it, without the name, which may be a path."""
    fields: dict[str, Any] = json.loads(json.dumps(asdict(model)))
    return {name: value for name, value in fields.items() if name != "name"}


def file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def batch_fingerprint(batch: Mapping[str, Tensor], before: float = 0.0, *, sampled: bool = False) -> float:
    """Return a hash of all tensors of a batch and of `before`, as an integer that float64 holds exactly.

    With `sampled`, of evenly spaced elements of large tensors.
    """
    import torch
    from torch import Tensor

    digest = hashlib.blake2b(repr(before).encode(), digest_size=6)
    for name, tensor in sorted(batch.items()) if isinstance(batch, Mapping) else ():
        if not isinstance(tensor, Tensor):
            continue  # the engine refuses it
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        elements = tensor.detach().reshape(-1)
        if sampled:
            elements = elements[:: max(1, len(elements) // SAMPLED_ELEMENTS)]
        digest.update(elements.cpu().contiguous().view(torch.uint8).numpy().data)
    return float(int.from_bytes(digest.digest(), "little"))


def refuse_if_ranks_differ(
    fingerprint: RunFingerprint, world: World, gather_context: AbstractContextManager[None]
) -> None:
    """Raise ValueError on every rank if one has other data, another model or another user's file than rank 0."""
    if world.world_size == 1:
        return
    import torch.distributed as dist

    gathered: list[RunFingerprint] = [fingerprint] * world.world_size
    with gather_context:
        dist.all_gather_object(gathered, fingerprint)
    for name, what in (("data", "data"), ("model", "a model"), ("source", "a file of the model")):
        values = [getattr(one, name) for one in gathered]
        other = [str(rank) for rank, value in enumerate(values) if value != values[0]]
        if other:
            raise ValueError(
                f"rank {', '.join(other)} has {what} that differs from that of rank 0; "
                "every machine must have the same files (data.path, model)"
            )


def compare_with_checkpoint(saved: object, current: RunFingerprint, *, model: str) -> list[str]:
    """Compare with what a checkpoint stored; raise ValueError, or return notes for the user."""
    if saved is None:
        return ["the checkpoint is of an earlier version and has no fingerprint: data and model are not compared"]
    if not isinstance(saved, Mapping) or not isinstance(saved.get("model"), Mapping):
        raise ValueError(f"the fingerprint of a checkpoint is damaged ({str(saved)[:80]}); resume from another one")
    if saved.get("data") != current.data:
        raise ValueError(
            f"the data has changed since the checkpoint was written (data fingerprint {current.data}, was "
            f"{saved.get('data')}); restore the text of data.path, {NEW_RUN}"
        )
    changes = list(_field_changes(saved["model"], current.model))
    if changes:
        more = f" and {len(changes) - MAX_LISTED_FIELDS} more" if len(changes) > MAX_LISTED_FIELDS else ""
        raise ValueError(
            f"the model has changed since the checkpoint was written ({model}: "
            f"{', '.join(changes[:MAX_LISTED_FIELDS])}{more}); restore its definition, {NEW_RUN}"
        )
    if saved.get("source") != current.source:
        return [f"the file of the model has changed since the checkpoint was written ({model.rpartition(':')[0]})"]
    return []


def _field_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[str]:
    """Describe fields that differ; a field that an earlier version did not have has its default in both."""
    before, after = _flatten(saved), _flatten({name: value for name, value in current.items() if name in saved})
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            yield f"{name} is {after.get(name)}, was {before.get(name)}"


def _flatten(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat
