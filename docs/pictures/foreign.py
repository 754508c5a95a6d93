"""A drawing of a foreign model's forward in three parts."""

from __future__ import annotations

from svg import BLUE, FAINT, GREEN, ORANGE, VIOLET, Canvas

PARTS = (
    ("embedding", "tokens -> input of the first layer", (True, False, False)),
    ("context", "zeros -> masks, rotary tables, positions of every layer", (False, False, False)),
    ("head", "hidden states -> norm, head, loss", (False, False, True)),
)
"""name, what it gives, and which of (before the layers, the layers, after them) run for real"""


def parts() -> str:
    c = Canvas(352, "One forward of a class of transformers, run in three parts and layer by layer")
    c.text(24, 56, "A dashed box is a stub: a shallow copy of the model has it in place of its module.", colour=FAINT)
    boxes = (("embedding", 150, BLUE), ("layers", 306, GREEN), ("norm, head", 150, VIOLET))
    for row, (name, gives, real) in enumerate(PARTS):
        y = 78 + row * 62
        c.text(24, y + 26, name, size=13)
        x = 116
        for (label, width, colour), runs in zip(boxes, real, strict=True):
            if runs:
                c.box(x, y, width, 40, label, colour)
            else:
                c.rect(x, y, width, 40, dash=True)
                c.text(x + 10, y + 25, label, colour=FAINT)
            x += width + 8
        c.text(116, y + 55, gives, size=11, colour=FAINT)
    y = 78 + len(PARTS) * 62
    c.text(24, y + 26, "layers", size=13)
    for layer in range(4):
        c.box(116 + layer * 156, y, 146, 40, f"layer {layer}", GREEN)
        if layer < 3:
            c.arrow(116 + layer * 156 + 146, y + 20, 116 + (layer + 1) * 156, y + 20)
    c.text(
        116, y + 58, "each called with what its stub kept, on the pipeline stage that holds it", size=11, colour=ORANGE
    )
    return c.finish()
