"""The colours of actions, the same in every picture.

The colours differ in lightness as well as in hue, so that colour-blind readers can tell them apart; a test simulates
colour blindness. A rank's later chunks have the same hues, lighter.
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.pipeline.actions import ActionKind


@dataclass(frozen=True, kw_only=True)
class ActionStyle:
    """The name and colour of one kind of action."""

    name: str
    colour: str
    """of a rank's first chunk, as #rrggbb"""


ACTION_STYLES = {
    ActionKind.FORWARD: ActionStyle(name="forward", colour="#1f5fa8"),
    ActionKind.BACKWARD: ActionStyle(name="backward", colour="#c8551b"),
    ActionKind.INPUT_GRAD: ActionStyle(name="input gradient", colour="#f2b632"),
    ActionKind.WEIGHT_GRAD: ActionStyle(name="weight gradient", colour="#3fa796"),
    ActionKind.UPDATE: ActionStyle(name="update", colour="#7b2d6f"),
}
"""the kinds that are drawn as cells, in the order of the legend"""
IDLE_COLOUR = "#eef1f5"
LIGHT_INK, DARK_INK = "#ffffff", "#1c2230"
"""text on a cell"""
TRANSFER_COLOUR = "#8a93a5"
"""of a transfer"""


def cell_colour(kind: ActionKind, chunk: int = 0, chunks: int = 1) -> str:
    """The colour of a cell of a rank's `chunk`, of `chunks`."""
    # The lightest still differs from idle. Updates of all chunks coincide, so they share a colour.
    share = 0.55 * chunk / max(1, chunks - 1) if kind is not ActionKind.UPDATE else 0.0
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in rgb(ACTION_STYLES[kind].colour))


def text_colour(background: str) -> str:
    """The colour of readable text on a background."""
    red, green, blue = rgb(background)
    return DARK_INK if 0.299 * red + 0.587 * green + 0.114 * blue > 125 else LIGHT_INK


def rgb(colour: str) -> tuple[int, int, int]:
    """Red, green and blue, 0 to 255."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
