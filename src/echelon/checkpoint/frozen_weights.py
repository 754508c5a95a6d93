"""The hash of a model's frozen weights, which a checkpoint of adapters stores instead of the weights.

A run reads the base of its adapters from its directory again, or draws it by its seed. If that gives other weights than
those under which the adapters were trained, nothing would fail, and everything would be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from echelon.checkpoint.checksums import Checksum, add_checksums, box_checksum, state_hash
from echelon.checkpoint.coordination import CheckpointGroup, errors_on_all_ranks
from echelon.checkpoint.load import item_checksum
from echelon.checkpoint.training_state import TrainingState

FACT = "frozen"
"""the name of the hash among the facts of a checkpoint"""


def frozen_hash(state: TrainingState, group: CheckpointGroup) -> str:
    """Return the hash of all frozen weights, equal in every layout. All ranks must call it."""
    local: dict[str, Checksum] = {}
    with errors_on_all_ranks(group):
        for item in state.frozen_items():
            if item.is_writer:
                local[item.name] = item_checksum(item.read().cpu(), item)
    parts: dict[str, list[Checksum]] = {}
    for of_rank in group.all_gather(local):
        for name, checksum in of_rank.items():
            parts.setdefault(name, []).append(checksum)
    return state_hash({name: add_checksums(each) for name, each in parts.items()})


def hash_of_tensors(tensors: Mapping[str, Tensor], compute_dtype: torch.dtype) -> str:
    """Return the same hash of full tensors by parameter name, as a run in a compute dtype holds them."""
    dtype = torch.promote_types(compute_dtype, torch.float32)
    return state_hash(
        {
            f"model.{name}": box_checksum(
                tensor.to(compute_dtype).to(dtype).contiguous(), tuple((0, size) for size in tensor.shape), tensor.shape
            )
            for name, tensor in tensors.items()
        }
    )


def check_frozen_hash(stored: object, actual: Mapping[str, str], *, where: str) -> str:
    """Compare the frozen weights with a checkpoint's; raise ValueError where they differ, or return a note."""
    if not isinstance(stored, Mapping) or not isinstance(stored.get("hash"), str):
        raise ValueError(f"the checkpoint of adapters has no hash of the weights beneath them ({where})")
    if stored.get("dtype") != actual["dtype"]:
        return (
            f"the weights beneath the adapters were in {stored.get('dtype')} and are in {actual['dtype']} now: "
            "they are not compared"
        )
    if stored["hash"] != actual["hash"]:
        raise ValueError(
            f"the frozen weights differ from those under which the adapters were trained ({where}: {stored['hash']}, "
            f"now {actual['hash']}); restore the directory or file of the model, or start a new run"
        )
    return ""
