"""Channels: the ways that messages take between stages on different ranks.

    stage 2 on rank 2  ==  (SF, 2)  ==>  stage 3 on rank 3      what forward made
                       <==  (SB, 3)  ==                         the gradient of the input

A channel carries one kind of message from one stage to its neighbour, first in, first out. Neighbours on one rank have
no channel: the runtime hands tensors over.
"""

from __future__ import annotations

from collections.abc import Sequence

from echelon.pipeline.actions import Action, Kind

Channel = tuple[Kind, int]
"""the kind of its sends and the stage that sends; the homes of the stages say the two ranks"""

Message = tuple[int, int]
"""microbatch and slice"""

RECEIVE = {Kind.SEND_FORWARD: Kind.RECEIVE_FORWARD, Kind.SEND_BACKWARD: Kind.RECEIVE_BACKWARD}
"""the receives of a channel, by its sends"""


def out_of(homes: Sequence[int], action: Action) -> Channel | None:
    """The channel that takes away what an action makes."""
    stage, kind, _, _, _ = action
    if kind is Kind.FORWARD and stage + 1 < len(homes) and homes[stage + 1] != homes[stage]:
        return (Kind.SEND_FORWARD, stage)
    if (kind is Kind.BACKWARD or kind is Kind.INPUT) and stage and homes[stage - 1] != homes[stage]:
        return (Kind.SEND_BACKWARD, stage)
    return None


def into(homes: Sequence[int], action: Action) -> Channel | None:
    """The channel that brings what an action needs."""
    stage, kind, _, _, _ = action
    if kind is Kind.FORWARD and stage and homes[stage - 1] != homes[stage]:
        return (Kind.SEND_FORWARD, stage - 1)
    if (kind is Kind.BACKWARD or kind is Kind.INPUT) and stage + 1 < len(homes) and homes[stage + 1] != homes[stage]:
        return (Kind.SEND_BACKWARD, stage + 1)
    return None


def through(action: Action) -> Channel:
    """The channel of a send or a receive."""
    stage, kind, _, _, _ = action
    if kind is Kind.RECEIVE_FORWARD:
        return (Kind.SEND_FORWARD, stage - 1)
    if kind is Kind.RECEIVE_BACKWARD:
        return (Kind.SEND_BACKWARD, stage + 1)
    return (kind, stage)
