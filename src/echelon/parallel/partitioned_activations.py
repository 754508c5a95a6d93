"""Inputs of layers that are repeated, divided over ranks that all have the same: ZeRO-R's partitioned activations.

With tp and sp=0 every rank has the whole stream between layers. Each keeps a part of it, flat and padded to equal
parts, and gathers them before the layer is repeated. What that costs is counted with tensor parallelism (tensor.py).
"""

from __future__ import annotations

from torch import Tensor

from echelon.memory.checkpointing.cost import partition_numel
from echelon.memory.checkpointing.saved_inputs import SavedInput
from echelon.parallel.comm.mesh_axis import MeshAxis


class PartitionedActivations:
    """A slice on each rank of `axis`, which all have the same tensor."""

    def __init__(self, axis: MeshAxis):
        self.axis = axis

    def __call__(self, tensor: Tensor) -> SavedInput:
        size = partition_numel(tensor.numel(), self.axis.size)
        flat, start = tensor.reshape(-1), self.axis.index * size
        part = flat.new_zeros(size)
        mine = flat[start : start + size]
        part[: len(mine)].copy_(mine)
        shape = tensor.shape

        def back(part: Tensor) -> Tensor:
            gathered = part.new_empty(size * self.axis.size)
            self.axis.start_all_gather(gathered, part).wait()
            return gathered[: shape.numel()].view(shape)

        return part, back
