"""Plans for people: a ranked table with bars in a terminal, and one page with pictures. No torch."""

from echelon.plan.show.page import page
from echelon.plan.show.terminal import shown

__all__ = ["page", "shown"]
