"""Plans for people: a ranked table with bars in a terminal, and one page with pictures. No torch."""

from echelon.planning.show.plan_html import plans_html
from echelon.planning.show.plan_text import plans_text

__all__ = ["plans_html", "plans_text"]
