"""Pictures of a timeline: coloured text, SVG, an HTML page with zoom and hover; of two, planned over measured."""

from echelon.pipeline.draw.timeline_html import as_html
from echelon.pipeline.draw.timeline_svg import as_svg
from echelon.pipeline.draw.timeline_text import as_text

__all__ = ["as_html", "as_svg", "as_text"]
