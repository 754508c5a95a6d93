"""The pictures of a run: its timeline, planned over measured, if it had a pipeline; its expert load if it is MoE."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.text import Text

from echelon.draw import svg_writer
from echelon.pipeline import draw, timeline
from echelon.pipeline.timeline import Timeline

if TYPE_CHECKING:
    from echelon.report.expert_load_history import ExpertLoadHistory


@dataclass(frozen=True)
class RunPicture:
    """The timeline or the expert load of a run, or both."""

    planned: Timeline | None = None
    """or the measured one, if nothing was planned"""
    measured: Timeline | None = None
    expert_load: ExpertLoadHistory | None = None

    @classmethod
    def from_run(cls, folder: Path) -> Self:
        """Read a run's directory. A run that was killed has no timeline, but a log."""
        from echelon.report.expert_load_history import ExpertLoadHistory

        has_timeline = (folder / timeline.TIMELINE_FILE).exists()
        loads = ExpertLoadHistory.read(folder)
        if not has_timeline and not loads.layers:
            raise ValueError(
                f"nothing to draw in the run ({folder}): it has no timeline, which runs with pp > 1 write at their "
                "end, and no expert load, which runs of MoE models log"
            )
        planned, measured = timeline.read_timelines(folder) if has_timeline else (None, None)
        return cls(planned or measured, measured if planned else None, loads if loads.layers else None)

    def as_text(self, *, width: int, colour: bool) -> Text:
        parts = []
        if self.planned is not None:
            parts.append(draw.as_text(self.planned, self.measured, width=width, colour=colour))
        if self.expert_load is not None:
            from echelon.report import expert_load_text

            parts.append(expert_load_text.as_text(self.expert_load, width=width, colour=colour))
        return Text("\n").join(parts)

    def as_svg(self) -> str:
        first = draw.as_svg(self.planned, self.measured) if self.planned is not None else ""
        if self.expert_load is None:
            return first
        from echelon.report import expert_load_svg

        second = expert_load_svg.as_svg(self.expert_load, light=bool(first))
        return svg_writer.stack(first, second) if first else second

    def as_html(self) -> str:
        page = draw.as_html(self.planned, self.measured) if self.planned is not None else ""
        if self.expert_load is None:
            return page
        from echelon.report import expert_load_html

        if not page:
            return expert_load_html.as_html(self.expert_load)
        before, end, after = page.rpartition("</html>")
        section = expert_load_html.html_section(self.expert_load, light=True)
        return f'{before}<hr style="border:0;height:28px">\n{section}{end}{after}'
