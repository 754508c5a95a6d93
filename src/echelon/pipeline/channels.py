"""Channels: the routes of transfers between stages on different ranks.

    stage 2 on rank 2  ==  (SF, 2)  ==>  stage 3 on rank 3      the output of forward
                       <==  (SB, 3)  ==                         the gradient of the input

A channel carries one kind of transfer from one stage to its neighbour, first in, first out. Neighbours on one rank have
no channel: they exchange tensors in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from echelon.pipeline.actions import Action, ActionKind

Channel = tuple[ActionKind, int]
"""the kind of its sends and the stage that sends; the schedule knows the ranks of both stages"""

TransferKey = tuple[int, int]
"""microbatch and slice"""

RECEIVE_KIND = {
    ActionKind.SEND_FORWARD: ActionKind.RECEIVE_FORWARD,
    ActionKind.SEND_BACKWARD: ActionKind.RECEIVE_BACKWARD,
}
"""the kind of a channel's receives, by that of its sends"""

_DIRECTION = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.INPUT_GRAD: -1}
"""from the stage of an action to the stage that takes its output"""


def outgoing_channel(rank_of_stage: Sequence[int], action: Action) -> Channel | None:
    """The channel that carries the output of an action."""
    step = _DIRECTION.get(action.kind)
    return _channel(rank_of_stage, action.stage, action.stage + step) if step else None


def incoming_channel(rank_of_stage: Sequence[int], action: Action) -> Channel | None:
    """The channel that carries the input of an action."""
    step = _DIRECTION.get(action.kind)
    return _channel(rank_of_stage, action.stage - step, action.stage) if step else None


def _channel(rank_of_stage: Sequence[int], sender: int, receiver: int) -> Channel | None:
    if min(sender, receiver) < 0 or max(sender, receiver) >= len(rank_of_stage):
        return None
    if rank_of_stage[sender] == rank_of_stage[receiver]:
        return None
    return (ActionKind.SEND_FORWARD if sender < receiver else ActionKind.SEND_BACKWARD, sender)


def transfer_channel(action: Action) -> Channel:
    """The channel of a send or a receive."""
    if action.kind is ActionKind.RECEIVE_FORWARD:
        return (ActionKind.SEND_FORWARD, action.stage - 1)
    if action.kind is ActionKind.RECEIVE_BACKWARD:
        return (ActionKind.SEND_BACKWARD, action.stage + 1)
    return (action.kind, action.stage)
