"""Point-to-point messages between the stages of a pipeline.

[Note: channels]

A channel carries what one stage sends in one direction. Messages of a channel arrive in the order in which they were
sent; between channels nothing is promised, so nobody may wait for anybody's other channel. Gloo tells channels apart by
tags, which no two engines share: they may take turns, and one that is dropped in the middle of its stream leaves
messages that nobody takes. NCCL runs the messages of one communicator one after another, so there each channel has one
of its own.

[Note: shapes]

The first message of each kind of microbatch is preceded by a header with the shapes. Both ends hold the same batch, so
both know which microbatch is the first of its kind. Gradients have the shapes of what they are gradients of.
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
from echelon.faults.flight_recorder import Recorded, here
from echelon.parallel.comm.mesh_axis import Axis
from echelon.pipeline.execution.stage_io import HOLDERS

flight_recorder.hide(__file__)

HEADER = 64
DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
)
"""what both gloo and NCCL send"""

_next_tag: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""the first tag of a group that no engine has; all its ranks make their engines in the same order"""


@dataclass(frozen=True)
class Form:
    """What a message looks like."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    differentiable: tuple[bool, ...]
    length: int
    """positions of the whole sequence, where sequence parallelism sends slices of it"""
    holder: type = tuple
    """what the tensors were in (handed.py)"""

    def encoded(self) -> Tensor:
        if unknown := [str(dtype) for dtype in self.dtypes if dtype not in DTYPES]:
            raise ValueError(
                f"a link hands on a tensor of a type that no message carries ({unknown[0]}); "
                f"use one of {', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}"
            )
        numbers = [len(self.shapes), self.length, HOLDERS.index(self.holder)]
        for shape, dtype, differentiable in zip(self.shapes, self.dtypes, self.differentiable, strict=True):
            numbers += [DTYPES.index(dtype), int(differentiable), len(shape), *shape]
        if len(numbers) > HEADER:
            raise ValueError(
                f"a link hands on more tensors than a message can describe ({len(self.shapes)}); cut elsewhere"
            )
        return torch.tensor(numbers + [0] * (HEADER - len(numbers)))

    @classmethod
    def decoded(cls, header: Tensor) -> Form:
        numbers = deque(header.tolist())
        count, length, holder = (numbers.popleft() for _ in range(3))
        shapes, dtypes, differentiable = [], [], []
        for _ in range(count):
            dtypes.append(DTYPES[numbers.popleft()])
            differentiable.append(bool(numbers.popleft()))
            shapes.append(tuple(numbers.popleft() for _ in range(numbers.popleft())))
        return cls(tuple(shapes), tuple(dtypes), tuple(differentiable), length, HOLDERS[holder])

    def empty(self, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(
            torch.empty(shape, dtype=dtype, device=device)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )


class Arriving:
    """A message that was asked for. Until its header is there, only the header is under way."""

    def __init__(self, pipes: Pipes, channel: int, sender: int, kind: Hashable):
        self._pipes, self._channel, self._sender, self._kind = pipes, channel, sender, kind
        self._header: Tensor | None = None
        self._works: list[Recorded] = []
        self.tensors: tuple[Tensor, ...] = ()
        self.form: Form | None = None

    def start(self) -> None:
        """Asks for what is known to come next."""
        if self._works:
            return
        self.form = self._pipes.form(self._channel, self._kind)
        if self.form is None:
            self._header = torch.empty(HEADER, dtype=torch.int64, device=self._pipes.device)
            self._works = [self._ask(self._header)]
        else:
            self.tensors = self.form.empty(self._pipes.device)
            self._works = [self._ask(tensor) for tensor in self.tensors]

    def wait(self) -> None:
        self.start()
        for work in self._works:
            work.wait()
        if self._header is not None:
            self._pipes.learn(self._channel, self._kind, Form.decoded(self._header))
            self._header, self._works = None, []
            self.wait()

    def _ask(self, tensor: Tensor) -> Recorded:
        return self._pipes.ask(tensor, self._sender, self._channel)


class Pipes:
    """One rank's ends of the channels."""

    def __init__(self, axis: Axis, device: torch.device, channels: int):
        self.axis, self.device = axis, device
        assert axis.group is not None
        self._first_tag = _next_tag.get(axis.group, 0)
        _next_tag[axis.group] = self._first_tag + channels
        self._groups = [axis.group if device.type == "cpu" else axis.again() for _ in range(channels)]
        self._lanes = [here.lane(axis.ranks, f" channel {channel}") for channel in range(channels)]
        self._forms: dict[tuple[int, Hashable], Form] = {}
        self._asked: dict[int, deque[Arriving]] = {}
        self._sending: list[tuple[Recorded, Tensor]] = []
        self._before: deque[list[tuple[Recorded, Tensor]]] = deque()

    def form(self, channel: int, kind: Hashable) -> Form | None:
        return self._forms.get((channel, kind))

    def learn(self, channel: int, kind: Hashable, form: Form) -> None:
        self._forms[channel, kind] = form

    def send(self, channel: int, to: int, kind: Hashable, tensors: Sequence[Tensor], form: Form) -> None:
        """Starts sending to a place on the axis; `kind` is the microbatch's, which the other end knows too."""
        known = self.form(channel, kind)
        if known is None:
            self.learn(channel, kind, form)
            self._start(form.encoded().to(self.device), to, channel)
        elif known != form:
            raise ValueError(
                f"a stage handed on another shape than for the same inputs before ({form.shapes}, was {known.shapes}); "
                "shapes may depend on nothing but the shapes of the inputs"
            )
        for tensor in tensors:
            self._start(tensor.contiguous(), to, channel)

    def _start(self, tensor: Tensor, to: int, channel: int) -> None:
        # The tensor is kept until it is sent: isend does not copy.
        tag = self._first_tag + channel
        slot = self._begin("send", tensor, to, channel)
        if here.on_sent is not None:
            here.on_sent("send", self.axis.label, tensor)
        work = dist.isend(tensor, self.axis.ranks[to], group=self._groups[channel], tag=tag)
        assert work is not None
        self._sending.append((Recorded(here, slot, work, tensor.is_cuda), tensor))

    def _begin(self, op: str, tensor: Tensor, other: int, channel: int) -> int:
        peer, lane = str(self.axis.ranks[other]), self._lanes[channel]
        return here.begin(op, self.axis.label, lane, tensor.shape, tensor.dtype, peer)

    def receive(self, channel: int, sender: int, kind: Hashable) -> Arriving:
        """Asks for the next message of a channel."""
        waiting = self._asked.setdefault(channel, deque())
        arriving = Arriving(self, channel, sender, kind)
        waiting.append(arriving)
        if all(other.tensors for other in waiting if other is not arriving):  # else a header is awaited before it
            arriving.start()
        return arriving

    def take(self, channel: int, arriving: Arriving) -> Arriving:
        """Waits for a message, and for those of the channel before it."""
        waiting = self._asked[channel]
        while waiting:
            first = waiting.popleft()
            first.wait()
            if first is arriving:
                break
        return arriving

    def ask(self, tensor: Tensor, sender: int, channel: int) -> Recorded:
        tag = self._first_tag + channel
        slot = self._begin("receive", tensor, sender, channel)
        work = dist.irecv(tensor, self.axis.ranks[sender], group=self._groups[channel], tag=tag)
        assert work is not None
        brings = ("receive", self.axis.label, tensor) if here.on_received is not None else None
        return Recorded(here, slot, work, tensor.is_cuda, brings)

    def flush(self) -> None:
        """Waits until everything that was sent is out."""
        self.retire(0)

    def retire(self, windows: int) -> None:
        """Waits for what was sent before the last calls: in an endless stream, what came later may not be taken yet."""
        self._before.append(self._sending)
        self._sending = []
        while len(self._before) > windows:
            for work, _ in self._before.popleft():
                work.wait()
