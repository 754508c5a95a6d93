"""Channels: the ways that messages take between stages on different ranks.

    stage 2 on rank 2  ==  (SF, 2)  ==>  stage 3 on rank 3      what forward made
                       <==  (SB, 3)  ==                         the gradient of the input

A channel carries one kind of message from one stage to its neighbour, first in, first out. Neighbours on one rank have
no channel: the runtime hands tensors over.
"""

from __future__ import annotations

from collections.abc import Sequence

from echelon.pipeline.actions import Action, ActionKind

Channel = tuple[ActionKind, int]
"""the kind of its sends and the stage that sends; the homes of the stages say the two ranks"""

TransferKey = tuple[int, int]
"""microbatch and slice"""

RECEIVE_KIND = {
    ActionKind.SEND_FORWARD: ActionKind.RECEIVE_FORWARD,
    ActionKind.SEND_BACKWARD: ActionKind.RECEIVE_BACKWARD,
}
"""the receives of a channel, by its sends"""


def outgoing_channel(rank_of_stage: Sequence[int], action: Action) -> Channel | None:
    """The channel that takes away what an action makes."""
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
    """The channel that brings what an action needs."""
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
