"""Drawings of what lives off the device: where, and when it moves."""

from __future__ import annotations

from svg import BLUE, FAINT, GREEN, INK, ORANGE, RED, VIOLET, Canvas

KINDS = {
    "none": ("parameters", "gradients", "master, moments", "activations"),
    "optimizer": ("parameters", "gradients", "", "activations"),
    "params": ("two layers", "two layers", "", "activations"),
    "activations": ("parameters", "gradients", "master, moments", "two layers"),
}
HOSTS = {"none": (), "optimizer": (2,), "params": (0, 1, 2), "activations": (3,)}
WORDS = ("parameters", "gradients", "master, moments", "activations")
COLOURS = (BLUE, ORANGE, GREEN, VIOLET)


def places() -> str:
    c = Canvas(352, "What lives where")
    c.text(270, 66, "on the device", size=12, colour=FAINT)
    c.text(24, 66, "offload=", mono=True, size=12, colour=FAINT)
    for row, (kind, here) in enumerate(KINDS.items()):
        top = 78 + row * 62
        c.text(24, top + 28, kind, mono=True, size=13)
        for column, (word, colour) in enumerate(zip(here, COLOURS, strict=True)):
            x = 130 + column * 100
            if word:
                c.box(x, top, 94, 46, word.replace(", ", "\n"), colour, size=11)
            else:
                c.rect(x, top, 94, 46, dash=True)
        for place, column in enumerate(HOSTS[kind]):
            c.box(560 + place * 74, top, 70, 46, WORDS[column].replace(", ", "\n"), COLOURS[column], size=10)
        if HOSTS[kind]:
            c.line(530, top + 17, 556, top + 17, FAINT, arrow=True)
            c.line(556, top + 31, 530, top + 31, FAINT, arrow=True)
    c.text(600, 66, "on the host, or with disk in files", size=12, colour=FAINT)
    c.text(24, 340, "Kinds are joined by +. With memory.host=0.5 half of the states leave: the last layers'.", size=12)
    return c.finish()


def timeline() -> str:
    c = Canvas(330, "A step with offload=optimizer (a drawing, not a measurement)")
    rows = {"device": 92, "down": 148, "host": 190, "up": 236}
    for word, top in rows.items():
        c.text(24, top + 20, word, weight="bold", size=12)
    c.box(90, 92, 180, 36, "backward: 3 2 1 0", BLUE, size=12)
    c.box(274, 92, 50, 36, "norm", VIOLET, size=12)
    c.line(327, 80, 327, 282, INK, dash=True)
    c.text(331, 78, "the next step", size=12, colour=FAINT)
    x = 332.0
    for layer in range(4):
        on_host = layer >= 1
        if on_host:
            start = 328 + (layer - 1) * 96
            c.box(start, 148, 44, 28, f"g {layer}", ORANGE, size=11)
            c.box(start + 46, 190, 88, 34, f"update {layer}", GREEN, size=11)
            c.box(start + 136, 236, 36, 28, f"p {layer}", ORANGE, size=11)
            ready = start + 174
            c.line(ready - 2, 250, max(ready, x) + 2, 130, FAINT, dash=True, arrow=True)
            x = max(x, ready)
        c.box(x, 92, 62, 36, f"forward {layer}", BLUE, size=11)
        x += 64
    words = "A layer's forward waits for that layer alone. Layer 0's states are on the device: it runs at once."
    c.text(24, 296, words, size=12)
    words = "What the host has not done when the device needs it shows: the gaps above are that time."
    c.text(24, 314, words, size=12, colour=RED)
    return c.finish()
