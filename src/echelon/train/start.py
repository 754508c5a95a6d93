"""`train` from outside: reads the configuration, starts the ranks it needs, and gives back the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.layout import Fault, FaultError, Layout
from echelon.models.own import spec_of
from echelon.train.config import Config
from echelon.train.run import Run

if TYPE_CHECKING:
    from echelon.train.loop import Summary


def train(
    model: str | Path | Config | Callable[[], Any], *, procs: int | None = None, quiet: bool = False, **settings: Any
) -> Run:
    """Trains and returns the run.

    `model` is a configuration (a `Config` or the path of a TOML file), a named size, or a function that makes your
    own module, with a function `batch(rows, step)` beside it in the same file. Settings are configuration keys, with
    `_` for the dot: `optimizer_lr=1e-3`.
    """
    config = read(model, settings, procs)
    return Run.open(run(config, procs=procs, quiet=quiet).run)


def read(model: str | Path | Config | Callable[[], Any], settings: dict[str, Any], procs: int | None) -> Config:
    if isinstance(model, Config):
        if settings:
            raise ValueError(
                f"a Config has all its settings already (also given: {', '.join(settings)}); use dataclasses.replace"
            )
        return model
    names = {key.name.replace(".", "_"): key.name for key in list(Config.keys())}
    given = [f"{names.get(key, key)}={_text(value)}" for key, value in settings.items()]
    path = None
    if callable(model):
        given.append(f"model={spec_of(model)}")
    elif str(model).endswith(".toml"):
        path = model
    else:
        given.append(f"model={model}")
    return Config.load(path, given, world=procs)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple | list) else str(value)


def run(config: Config, *, procs: int | None = None, quiet: bool = False) -> Summary:
    """On the ranks a launcher started, if one did; else on `procs` new ones, or as many as the layout names."""
    from echelon.launch.local import start
    from echelon.launch.world import under_launcher
    from echelon.train.loop import train_here

    count = 1 if under_launcher() else procs or default_procs(config)
    faults = config.faults(world=None if under_launcher() else count)
    if config.device == "cuda" and not under_launcher():
        faults += _device_faults(count)
    if faults:
        raise FaultError(faults)
    if count == 1:
        return train_here(config, quiet)
    return start(train_here, (config, quiet), count)


def _device_faults(count: int) -> list[Fault]:
    import torch

    found = torch.cuda.device_count()
    if found >= count:
        return []
    rule = f"needs one CUDA device for each rank of this machine ({count} ranks, {found} devices)"
    return [Fault(key="device", value="cuda", rule=rule, legal="cpu, auto, or as many ranks as devices")]


def default_procs(config: Config) -> int:
    """As many ranks as the layout names, or one per GPU, or one."""
    if config.layout:
        return Layout.parse(config.layout).world
    if config.device == "cpu":
        return 1
    import torch

    return max(1, torch.cuda.device_count())
