"""What is run twice: once by one device, once by a layout. A case is data, so that it travels to every rank."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from echelon.models.sizes import ModelConfig
from echelon.train.config import OptimizerConfig

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, a rule and a few steps, all in float64."""

    model: ModelConfig | str
    """a named shape, or `file.py:factory` of the user's own"""
    batches: str = ""
    """`file.py:function` that makes the user's batches: (rows, seed) to a dict of tensors"""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-2))
    clip: float = 1.0
    steps: int = 5
    seq_len: int = 33
    """odd on purpose: it divides by no tp"""
    seed: int = 1234

    def build(self, device: str) -> nn.Module:
        """The one-device model; on "meta" (a model of ours) with shapes only, or as the user's factory makes it."""
        import torch

        from echelon import models

        if isinstance(self.model, ModelConfig):
            return models.build(self.model, device, dtype=torch.float64, seed=self.seed)
        torch.manual_seed(self.seed)
        model: nn.Module = load(self.model)()
        return model.double()

    def batch(self, step: int, rows: int) -> dict[str, Tensor]:
        """The global batch of a step, the same wherever it is made."""
        import torch

        if not isinstance(self.model, ModelConfig):
            made: dict[str, Any] = load(self.batches)(rows, self.seed + step)
            return {key: value.double() if value.is_floating_point() else value for key, value in made.items()}
        source = torch.Generator().manual_seed(self.seed + step)
        if self.model.family == "conv":
            images = torch.randn(rows, 3, 16, 16, generator=source, dtype=torch.float64)
            return {"images": images, "labels": torch.randint(0, 10, (rows,), generator=source)}
        tokens = torch.randint(0, self.model.vocab, (rows, self.seq_len + 1), generator=source)
        targets = tokens[:, 1:].clone()
        # Ranks and microbatches with different numbers of valid targets tell a mean of means from the mean.
        targets[torch.rand(targets.shape, generator=source) < 0.3] = -100
        targets[::3, : self.seq_len // 2] = -100
        return {"tokens": tokens[:, :-1], "targets": targets}


def load(spec: str) -> Callable[..., Any]:
    """The function that `file.py:name` means."""
    path, _, name = spec.rpartition(":")
    if not path or not name:
        raise ValueError(f"a model of your own is named file.py:factory ({spec!r}); add the name of the function")
    module = _module(Path(path))
    if not hasattr(module, name):
        raise ValueError(f"{path} has no function {name!r}; it has {', '.join(n for n in vars(module) if not n.startswith('_'))}")
    found: Callable[..., Any] = getattr(module, name)
    return found


def _module(path: Path) -> ModuleType:
    key = f"echelon_user_{path.resolve().stem}"
    if key in sys.modules and getattr(sys.modules[key], "__file__", None) == str(path.resolve()):
        return sys.modules[key]
    if not path.is_file():
        raise ValueError(f"there is no such file ({path}); give the path of a Python file")
    spec = importlib.util.spec_from_file_location(key, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def spec_of(function: Callable[..., Any]) -> str:
    """`file.py:name` of a function of the user's, so that ranks can find it."""
    path, name = inspect.getsourcefile(function), function.__qualname__
    if path is None or "<" in name or "." in name:
        raise ValueError(f"ranks must be able to import the function ({name}); define it at the top level of a file")
    return f"{path}:{name}"
