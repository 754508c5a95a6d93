"""Point-to-point transfers between pipeline stages.

[Note: channels]

A channel carries what one stage sends in one direction, in the order of the sends. Channels are independent: waiting
for one must not block another. Gloo separates channels by tags, which no two engines share: engines may take turns,
and one that is dropped in the middle of its stream leaves transfers that are never received. NCCL runs the transfers of
one communicator in sequence, so there each channel has a communicator of its own.

[Note: headers]

A header with the shapes precedes the first transfer of each kind of microbatch. Both ends hold the same batch, so both
know which microbatch is the first of its kind. Gradients have the shapes of their tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.faults import flight_recorder
from echelon.faults.flight_recorder import RecordedWork
from echelon.parallel.comm.mesh_axis import MeshAxis
from echelon.pipeline.execution.stage_io import CONTAINERS

flight_recorder.hide_call_sites_in(__file__)

HEADER_SIZE = 64
TRANSFER_DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
)
"""dtypes that both gloo and NCCL send"""

_next_tag: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""the first free tag of a group; all its ranks create their engines in the same order"""


@dataclass(frozen=True)
class TransferSpec:
    """The shapes and dtypes of a transfer."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    differentiable: tuple[bool, ...]
    full_length: int
    """positions of the unsharded sequence, where sequence parallelism sends slices of it"""
    container: type = tuple
    """of the tensors (stage_io.py)"""

    def encode(self) -> Tensor:
        if unknown := [str(dtype) for dtype in self.dtypes if dtype not in TRANSFER_DTYPES]:
            raise ValueError(
                f"a layer returned a tensor whose dtype cannot be sent ({unknown[0]}); "
                f"use one of {', '.join(str(dtype).removeprefix('torch.') for dtype in TRANSFER_DTYPES)}"
            )
        numbers = [len(self.shapes), self.full_length, CONTAINERS.index(self.container)]
        for shape, dtype, differentiable in zip(self.shapes, self.dtypes, self.differentiable, strict=True):
            numbers += [TRANSFER_DTYPES.index(dtype), int(differentiable), len(shape), *shape]
        if len(numbers) > HEADER_SIZE:
            raise ValueError(
                f"a layer returned too many tensors for a header ({len(self.shapes)}); split the model elsewhere"
            )
        return torch.tensor(numbers + [0] * (HEADER_SIZE - len(numbers)))

    @classmethod
    def decode(cls, header: Tensor) -> TransferSpec:
        numbers = deque(header.tolist())
        count, length, holder = (numbers.popleft() for _ in range(3))
        shapes, dtypes, differentiable = [], [], []
        for _ in range(count):
            dtypes.append(TRANSFER_DTYPES[numbers.popleft()])
            differentiable.append(bool(numbers.popleft()))
            shapes.append(tuple(numbers.popleft() for _ in range(numbers.popleft())))
        return cls(tuple(shapes), tuple(dtypes), tuple(differentiable), length, CONTAINERS[holder])

    def allocate(self, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(
            torch.empty(shape, dtype=dtype, device=device)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )


class PendingReceive:
    """A posted receive. Until its header has arrived, only the header is posted."""

    def __init__(self, p2p: P2PChannels, channel: int, sender: int, shape_key: Hashable):
        self._p2p, self._channel, self._sender, self._shape_key = p2p, channel, sender, shape_key
        self._header: Tensor | None = None
        self._works: list[RecordedWork] = []
        self.tensors: tuple[Tensor, ...] = ()
        self.spec: TransferSpec | None = None

    def start(self) -> None:
        """Post the receive of the header, or of the tensors if their shapes are known."""
        if self._works:
            return
        self.spec = self._p2p.specs.get((self._channel, self._shape_key))
        if self.spec is None:
            self._header = torch.empty(HEADER_SIZE, dtype=torch.int64, device=self._p2p.device)
            self._works = [self._p2p.irecv(self._header, self._sender, self._channel)]
        else:
            self.tensors = self.spec.allocate(self._p2p.device)
            self._works = [self._p2p.irecv(tensor, self._sender, self._channel) for tensor in self.tensors]

    def wait(self) -> None:
        self.start()
        for work in self._works:
            work.wait()
        if self._header is not None:
            self._p2p.specs[self._channel, self._shape_key] = TransferSpec.decode(self._header)
            self._header, self._works = None, []
            self.wait()


class P2PChannels:
    """One rank's ends of all channels."""

    def __init__(self, axis: MeshAxis, device: torch.device, channels: int):
        self.axis, self.device = axis, device
        assert axis.group is not None
        self._first_tag = _next_tag.get(axis.group, 0)
        _next_tag[axis.group] = self._first_tag + channels
        self._groups = [axis.group if device.type == "cpu" else axis.new_process_group() for _ in range(channels)]
        self._sequences = [axis.recorder.new_sequence(axis.ranks, f" channel {channel}") for channel in range(channels)]
        self.specs: dict[tuple[int, Hashable], TransferSpec] = {}
        """by channel and shape key, from the first transfer on"""
        self._pending: dict[int, deque[PendingReceive]] = {}
        self._sending: list[tuple[RecordedWork, Tensor]] = []
        self._earlier_sends: deque[list[tuple[RecordedWork, Tensor]]] = deque()

    def send(
        self, channel: int, receiver: int, shape_key: Hashable, tensors: Sequence[Tensor], spec: TransferSpec
    ) -> None:
        """Start a send to an index on the axis; `shape_key` is the microbatch's, which the receiver knows too."""
        known = self.specs.get((channel, shape_key))
        if known is None:
            self.specs[channel, shape_key] = spec
            self._isend(spec.encode().to(self.device), receiver, channel)
        elif known != spec:
            raise ValueError(
                f"a stage returned other shapes for equal input shapes ({spec.shapes}, expected {known.shapes}); make "
                "shapes depend on input shapes alone"
            )
        for tensor in tensors:
            self._isend(tensor.contiguous(), receiver, channel)

    def _isend(self, tensor: Tensor, receiver: int, channel: int) -> None:
        # Keep the tensor until it is sent: isend does not copy.
        tag = self._first_tag + channel
        slot = self._record_start("send", tensor, receiver, channel)
        recorder = self.axis.recorder
        if recorder.on_send is not None:
            recorder.on_send("send", self.axis.label, tensor)
        work = dist.isend(tensor, self.axis.ranks[receiver], group=self._groups[channel], tag=tag)
        assert work is not None
        self._sending.append((RecordedWork(recorder, slot, work, tensor.is_cuda), tensor))

    def _record_start(self, op: str, tensor: Tensor, peer_index: int, channel: int) -> int:
        peer, sequence = str(self.axis.ranks[peer_index]), self._sequences[channel]
        return self.axis.recorder.record_start(op, self.axis.label, sequence, tensor.shape, tensor.dtype, peer)

    def receive(self, channel: int, sender: int, shape_key: Hashable) -> PendingReceive:
        """Post the receive of the next transfer of a channel."""
        posted = self._pending.setdefault(channel, deque())
        pending = PendingReceive(self, channel, sender, shape_key)
        posted.append(pending)
        if all(other.tensors for other in posted if other is not pending):  # else an earlier header has not arrived
            pending.start()
        return pending

    def wait_for(self, channel: int, pending: PendingReceive) -> PendingReceive:
        """Wait for a receive, and for those of its channel before it."""
        posted = self._pending[channel]
        while posted:
            first = posted.popleft()
            first.wait()
            if first is pending:
                break
        return pending

    def irecv(self, tensor: Tensor, sender: int, channel: int) -> RecordedWork:
        tag = self._first_tag + channel
        slot = self._record_start("receive", tensor, sender, channel)
        work = dist.irecv(tensor, self.axis.ranks[sender], group=self._groups[channel], tag=tag)
        assert work is not None
        recorder = self.axis.recorder
        received = ("receive", self.axis.label, tensor) if recorder.on_receive is not None else None
        return RecordedWork(recorder, slot, work, tensor.is_cuda, received)

    def flush(self, windows: int = 0) -> None:
        """Wait for sends before the last `windows` calls: in an endless stream, later ones may not be received yet."""
        self._earlier_sends.append(self._sending)
        self._sending = []
        while len(self._earlier_sends) > windows:
            for work, _ in self._earlier_sends.popleft():
                work.wait()
