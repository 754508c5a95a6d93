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


def outgoing_channel(rank_of_stage: Sequence[int], action: Action) -> Channel | None:
    """The channel that carries the output of an action."""
    stage, kind, _, _, _ = action
    if (
        kind is ActionKind.FORWARD
        and stage + 1 < len(rank_of_stage)
        and rank_of_stage[stage + 1] != rank_of_stage[stage]
    ):
        return (ActionKind.SEND_FORWARD, stage)
    if (
        (kind is ActionKind.BACKWARD or kind is ActionKind.INPUT_GRAD)
        and stage
        and rank_of_stage[stage - 1] != rank_of_stage[stage]
    ):
        return (ActionKind.SEND_BACKWARD, stage)
    return None


def incoming_channel(rank_of_stage: Sequence[int], action: Action) -> Channel | None:
    """The channel that carries the input of an action."""
    stage, kind, _, _, _ = action
    if kind is ActionKind.FORWARD and stage and rank_of_stage[stage - 1] != rank_of_stage[stage]:
        return (ActionKind.SEND_FORWARD, stage - 1)
    if (
        (kind is ActionKind.BACKWARD or kind is ActionKind.INPUT_GRAD)
        and stage + 1 < len(rank_of_stage)
        and rank_of_stage[stage + 1] != rank_of_stage[stage]
    ):
        return (ActionKind.SEND_BACKWARD, stage + 1)
    return None


def transfer_channel(action: Action) -> Channel:
    """The channel of a send or a receive."""
    stage, kind, _, _, _ = action
    if kind is ActionKind.RECEIVE_FORWARD:
        return (ActionKind.SEND_FORWARD, stage - 1)
    if kind is ActionKind.RECEIVE_BACKWARD:
        return (ActionKind.SEND_BACKWARD, stage + 1)
    return (kind, stage)
