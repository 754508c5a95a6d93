"""Drawing of the states of a tensor over the ranks of an axis, and of the collectives between them."""

from __future__ import annotations

from svg import BLUE, FAINT, GREEN, ORANGE, VIOLET, Canvas

from echelon.parallel.auto_sharding.sharding import Sharding, conversion

RANKS = 2
NAMES = {"R": "replicate", "B": "broadcast", "S0": "shard", "P": "partial"}
COLOURS = {"R": BLUE, "B": VIOLET, "S0": GREEN, "P": ORANGE}
HELD = {
    "R": ("all", "all"),
    "B": ("all", "a sum's part"),
    "S0": ("a slice", "a slice"),
    "P": ("a sum's part", "all"),
}
"""what a rank holds of the tensor, and of its gradient"""


def states() -> str:
    """Draw what each rank holds in each state, and the table of conversions."""
    c = Canvas(520, "Four states of a tensor over a mesh axis, and what moves it between them")
    for column, (state, name) in enumerate(NAMES.items()):
        left = 24 + column * 190
        c.text(left, 66, f"{state}  {name}", weight="bold")
        for row, held in enumerate(HELD[state]):
            top = 84 + row * 88
            c.text(left, top + 10, ("tensor in forward", "gradient in backward")[row], size=11, colour=FAINT)
            for rank in range(RANKS):
                _tensor(c, left + rank * 82, top + 18, held, rank, COLOURS[state])
    c.text(24, 286, "from, to", size=12, colour=FAINT)
    targets = [*NAMES, "S1"]
    for column, target in enumerate(targets):
        c.text(110 + column * 136, 286, target, weight="bold", size=12)
    for row, source in enumerate(NAMES):
        top = 296 + row * 50
        c.text(24, top + 25, f"{source}  {NAMES[source]}", weight="bold", size=12)
        for column, target in enumerate(targets):
            _conversion(c, 110 + column * 136, top, source, target)
    c.text(
        24, 510, "Upper line: the collective of forward. Lower line: that of the gradient. local: no rank waits.",
        size=11, colour=FAINT,
    )  # fmt: skip
    return c.finish()


def _tensor(c: Canvas, x: float, y: float, held: str, rank: int, colour: str) -> None:
    """Draw what one rank holds of a matrix of four rows."""
    width, height = 70, 48
    c.rect(x, y, width, height, "#ffffff", dash=True)
    if held == "a slice":
        part = height / RANKS
        c.box(x, y + rank * part, width, part, f"rank {rank}", colour, size=11)
    elif held == "all":
        c.box(x, y, width, height, f"rank {rank}", colour, size=11)
    else:
        c.box(x, y, width, height, f"rank {rank}:\n1 of {RANKS} terms", colour, size=11)


def _conversion(c: Canvas, x: float, top: float, source: str, target: str) -> None:
    found = conversion(Sharding.parse(source), Sharding.parse(target))
    if source == target:
        c.box(x, top, 126, 42, "as it is", FAINT, size=11)
    elif found is None:
        c.rect(x, top, 126, 42, dash=True)
        c.text(x + 63, top + 25, "-", size=11, colour=FAINT, anchor="middle")
    else:
        lines = [(step or "local").replace("_", "-") for step in (found.forward, found.backward)]
        c.box(x, top, 126, 42, "\n".join(lines), COLOURS[source], size=11)
