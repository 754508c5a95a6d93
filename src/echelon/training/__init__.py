"""Training: the loop and what it needs. Nothing is imported here, so that reading a configuration loads no torch."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.training.run_dir import Run


class _Room(ModuleType):
    """Makes `ec.train(...)` work. Importing anything from here puts this module at `echelon.training`, where users expect
    the function, so the module is both."""

    def __call__(self, *args: Any, **kwargs: Any) -> Run:
        from echelon.training.start_training import train

        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _Room
