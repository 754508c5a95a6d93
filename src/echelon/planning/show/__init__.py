"""Plans for people: a ranked table with bars in a terminal, and one page with pictures. No torch."""

from echelon.planning.show.plan_html import page
from echelon.planning.show.plan_text import shown

__all__ = ["page", "shown"]
