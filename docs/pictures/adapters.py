"""A drawing of LoRA adapters beside the two kinds of tensor-parallel linears."""

from __future__ import annotations

from svg import BLUE, FAINT, GREEN, ORANGE, Canvas

KINDS = (
    (
        "column-parallel (q, k, v; gate, up)",
        ("W: local rows", "A: replicated", "B: local rows"),
        (False, True, False),
        "local outputs",
        "x, all features",
    ),
    (
        "row-parallel (o; down)",
        ("W: local columns", "A: local columns", "B: replicated"),
        (False, False, True),
        "a partial sum",
        "x, local features",
    ),
)
"""title, parts, which of them are replicated with a partial gradient, output, input"""


def split() -> str:
    c = Canvas(356, "LoRA under tensor parallelism: one rank of tp, two kinds of linears")
    c.text(
        24,
        56,
        "y = x Wᵀ + scale · (dropout(x) Aᵀ) Bᵀ.  W is frozen: no gradient, no state, no master weight.",
        colour=FAINT,
    )
    for index, (title, (w, a, b), (_, a_copy, b_copy), result, given) in enumerate(KINDS):
        x = 24 + index * 388
        c.rect(x, 72, 364, 228)
        c.text(x + 12, 94, title, weight="bold")
        c.box(x + 20, 108, 140, 30, given, FAINT, size=12)
        c.box(x + 20, 160, 140, 66, w, BLUE)
        c.box(x + 204, 160, 140, 26, a, ORANGE if a_copy else GREEN, size=12)
        c.box(x + 204, 200, 140, 26, b, ORANGE if b_copy else GREEN, size=12)
        c.arrow(x + 90, 138, x + 90, 160)
        c.line(x + 160, 123, x + 274, 123)
        c.arrow(x + 274, 123, x + 274, 160)
        c.arrow(x + 274, 186, x + 274, 200)
        c.box(x + 20, 254, 140, 30, result, FAINT, size=12)
        c.arrow(x + 90, 226, x + 90, 254)
        c.line(x + 274, 226, x + 274, 269)
        c.arrow(x + 274, 269, x + 160, 269)
    replicated = "trained, replicated: gradient all-reduced once a step"
    c.legend(24, 330, {"frozen": BLUE, "trained, split as W is": GREEN, replicated: ORANGE})
    return c.finish()
