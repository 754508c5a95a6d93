"""Expert load as a section of a page: layers on click, cells on hover. `expert_load.html` is its template.

The data have one byte per expert and column, so that 60 layers of 256 experts fit into 2 MB.
"""

from __future__ import annotations

import base64
import math
from typing import Any

from echelon.draw.html_page import fill_template, page
from echelon.report import load_colours
from echelon.report.expert_load_history import ExpertLoadHistory, LayerLoadHistory
from echelon.training.logging.expert_load import short_layer_name

TEMPLATE = "expert_load.html"


def as_html(history: ExpertLoadHistory) -> str:
    """The text of an HTML file."""
    style = "body{margin:0;padding:20px 24px 28px;background:#fff}"
    style += "@media (prefers-color-scheme:dark){body{background:#11151c}}"
    return page(f"{history.name}: loads of experts", html_section(history), style)


def html_section(history: ExpertLoadHistory, *, light: bool = False) -> str:
    """A section of any page; `light` keeps light colours in dark mode, beside pictures without a dark mode."""
    shown = {layer.name for layer in history.shown_layers()}
    data = {
        "name": history.title,
        "heading": history.heading(),
        "edges": load_colours.LOAD_EDGES,
        "names": load_colours.LOAD_LABELS,
        "nothing": load_colours.NO_TOKEN,
        "spans": history.spans,
        "figures": list(history.layers[0].columns[0].mean_figures),
        "layers": [_layer(layer, layer.name in shown) for layer in history.layers],
    }
    marks = {"MODE": "light" if light else ""}
    for name, colours in (("LIGHT", load_colours.ON_LIGHT), ("DARK", load_colours.ON_DARK)):
        marks[name] = "; ".join(f"--s{index}: {colour}" for index, colour in enumerate(colours))
    return fill_template(__package__, TEMPLATE, data, marks)


def _layer(layer: LayerLoadHistory, shown: bool) -> dict[str, Any]:
    loads = [load for column in layer.columns for load in column.relative_loads or [0.0] * layer.experts]
    figures = [column.mean_figures for column in layer.columns]
    return {
        "name": short_layer_name(layer.name),
        "experts": layer.experts,
        "shown": shown,
        "last": layer.last["most"],
        "worst": layer.worst_max_over_mean,
        "worstStep": layer.worst_step,
        "never": layer.unused_experts(),
        "lines": [[round(figure[name], 4) for figure in figures] for name in figures[0]],
        "loads": base64.b64encode(bytes(map(_encode_load, loads))).decode(),
    }


def _encode_load(load: float) -> int:
    """0 for no token, else 1 + 16 for each doubling above 1/128 of the mean."""
    return min(255, max(1, 1 + round(16 * (math.log2(load) + 7)))) if load > 0 else 0
