"""`train`: reads the configuration, starts the ranks it needs, and returns the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.config.run_config import Config
from echelon.config.size_rules import size_issues
from echelon.faults import injection_spec
from echelon.faults.graceful_stop import EXIT_STATUS
from echelon.faults.injection_spec import Injection
from echelon.layout import Layout, ValidationError, ValidationIssue
from echelon.models.foreign.hf_source import is_hf_model
from echelon.models.user_model import factory_spec, refuse_while_loading
from echelon.parallel.refused_layouts import find_hf_layout_issues
from echelon.training.run.run_dir import Run

if TYPE_CHECKING:
    from echelon.training.logging.step_logger import RunSummary

MAX_RANKS_PER_CORE = 64
"""ranks per core of one machine: more is a typing error, and would exhaust its memory"""


def train(
    model: str | Path | Config | Callable[[], Any], *, procs: int | None = None, quiet: bool = False, **settings: Any
) -> Run:
    """Train and return the run.

    `model` is a configuration (a `Config` or the path of a TOML file), a named size, or a function that builds your
    model, with a function `batch(rows, step)` in the same file. Settings are configuration keys, with `_` for the dot:
    `optimizer_lr=1e-3`.

    >>> from pathlib import Path
    >>> _ = Path("notes.txt").write_text("the quick brown fox " * 200)
    >>> run = ec.train("gpt-tiny", steps=2, batch=2, seq_len=16, data_path=["notes.txt"], device="cpu", quiet=True)
    >>> [record["step"] for record in run.records("step")]
    [1, 2]
    """
    refuse_while_loading("train")
    config = build_config(model, settings, procs)
    summary = run_training(config, procs=procs, quiet=quiet)
    if summary.stopped is not None:
        raise SystemExit(EXIT_STATUS)  # SIGTERM asked this process to end, and the run is saved
    return Run.open(summary.run)


def build_config(model: str | Path | Config | Callable[[], Any], settings: dict[str, Any], procs: int | None) -> Config:
    """Return the configuration that the arguments of `train` describe."""
    if isinstance(model, Config):
        if settings:
            raise ValueError(
                f"a Config has all its settings already (also given: {', '.join(settings)}); use dataclasses.replace"
            )
        return model
    names = {key.name.replace(".", "_"): key.name for key in list(Config.keys())}
    given = [f"{names.get(key, key)}={_setting_text(value)}" for key, value in settings.items()]
    if not callable(model) and str(model).endswith(".toml"):
        return load_config(model, given, procs)
    return load_config(None, [*given, f"model={factory_spec(model) if callable(model) else model}"], procs)


def load_config(path: str | Path | None, settings: Sequence[str], procs: int | None) -> Config:
    """Load the configuration; raise its issues and those of `procs` together."""
    issues = [] if procs is None else _procs_issues(procs)
    try:
        config = Config.load(path, settings, world=None if issues else procs, to_train=True)
    except ValidationError as error:
        raise ValidationError([*issues, *error.issues]) from None
    if issues:
        raise ValidationError(issues)
    return config


def _setting_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple | list) else str(value)


def run_training(
    config: Config,
    *,
    procs: int | None = None,
    quiet: bool = False,
    inject: Sequence[str] = (),
    resume: str = "",
) -> RunSummary:
    """Train on the ranks that a launcher started; without one on `procs` new ranks, or as many as the layout names.

    `inject` lists faults to inject, e.g. `kill:rank=2,step=7`; `resume` is a run's directory or one of its checkpoints.
    """
    from echelon.launch.world import refuse_bad_environment, under_launcher

    refuse_bad_environment()
    from echelon.training.elastic.supervisor import supervise
    from echelon.training.loop import train_on_rank
    from echelon.training.run.resume import parse_resume_path, refuse_if_running

    if procs is None:
        procs = int(os.environ["WORLD_SIZE"]) if under_launcher() else default_procs(config, resume)
    if issues := _procs_issues(procs):
        raise ValidationError(issues)
    count = 1 if under_launcher() else procs
    world = None if under_launcher() else count
    issues = config.issues(world=world) + size_issues(config, world=world)
    if config.device == "cuda" and not under_launcher():
        issues += _device_issues(count)
    if not issues and "budget:" in config.layout:
        from echelon.training.run.budget_check import run_budget_issues

        issues += run_budget_issues(config, procs)
    if not issues and not under_launcher() and is_hf_model(config.model) and config.layout:
        issues += find_hf_layout_issues(config.model, Layout.parse(config.layout))
    injections: tuple[Injection, ...] = ()
    try:
        # torch's elastic agent may have restarted this process with fewer ranks.
        is_restarted = under_launcher() and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        world_size = None if is_restarted else procs
        injections = injection_spec.parse_injections(inject, world_size=world_size, steps=config.steps)
    except ValidationError as error:
        issues += error.issues
    if issues:
        raise ValidationError(issues)
    if resume and not under_launcher():
        with Run.open(parse_resume_path(resume)[0]) as run:
            refuse_if_running(run)  # before ranks are started
    if count == 1 and (under_launcher() or not config.elastic.restarts):
        return train_on_rank(config, quiet, injections, resume)
    return supervise(config, quiet=quiet, inject=injections, resume=resume, procs=count)


def _procs_issues(procs: int) -> list[ValidationIssue]:
    """Check the number of ranks. Under a launcher the ranks exist already."""
    from echelon.launch.world import available_cores, under_launcher

    cores = available_cores()
    if under_launcher():
        started = os.environ["WORLD_SIZE"]
        is_invalid = str(procs) != started
        message, legal = "is not the number of ranks that the launcher started", f"{started}, or leave it out"
    else:
        is_invalid = not 1 <= procs <= MAX_RANKS_PER_CORE * cores
        message = f"ranks cannot be started on {cores} core(s)"
        legal = f"1 or more, and at most {MAX_RANKS_PER_CORE * cores} here"
    return [ValidationIssue(key="procs", value=str(procs), message=message, legal=legal)] if is_invalid else []


def _device_issues(count: int) -> list[ValidationIssue]:
    import torch

    available = torch.cuda.device_count()
    if available >= count:
        return []
    message = f"requires one CUDA device per rank of this machine ({count} ranks, {available} devices)"
    legal = "cpu, auto, or as many ranks as devices"
    return [ValidationIssue(key="device", value="cuda", message=message, legal=legal)]


def default_procs(config: Config, resume: str = "") -> int:
    """Return the ranks of the layout, else one per GPU, else those of the resumed run, else 1."""
    if config.layout:
        return Layout.parse(config.layout).world
    if config.device != "cpu":
        import torch

        if count := torch.cuda.device_count():
            return count
    if not resume:
        return 1
    from echelon.training.elastic.attempts import last_layout
    from echelon.training.run.resume import parse_resume_path

    return Layout.parse(last_layout(Run.open(parse_resume_path(resume)[0]))).world
