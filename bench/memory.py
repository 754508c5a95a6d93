"""What every way to save memory saves and costs, on one GPU, beside what the planner says: one model, step by step.

    python bench/memory.py --stack                      one technique on top of the other
    python bench/memory.py --alone --model llama-1b     each by itself
    python bench/memory.py --alone --only offload       those whose name has this word
    python bench/memory.py --stack --out stack.json     also writes what was measured, after every row

Memory is what torch's allocator counts: at the fullest moment of a step, and between steps, by whose the bytes are.
Gradients are those that live at the fullest moment, seen when one arrives. Exits with 1 where a prediction of memory is
off by more than 5 %.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from echelon import models
from echelon.config.run_config import Config
from echelon.layout import Layout
from echelon.models import model_config
from echelon.planning.cluster import cluster
from echelon.planning.priced_plan import price
from echelon.training.engine import Engine
from echelon.training.engine_options import loss_scale_settings, parallel_options
from echelon.training.run.prediction import scenario_of

GIB = 1 << 30
CLOSE = 0.05
BASE = {"dtype": "bfloat16", "clip": "1.0"}
IN_BACKWARD = {"optimizer.in_backward": "true", "clip": "0"}
ALONE: dict[str, dict[str, str]] = {
    "none": {},
    "recompute=ops": {"recompute": "ops"},
    "recompute=selective": {"recompute": "selective"},
    "recompute=full": {"recompute": "full"},
    "recompute=every:2": {"recompute": "every:2"},
    "recompute=sqrt": {"recompute": "sqrt"},
    "recompute=budget:8GiB": {"recompute": "budget:8GiB"},
    "compress=lossless+fp8": {"compress": "lossless+fp8"},
    "compress=lossless+int8": {"compress": "lossless+int8"},
    "memory.arena, recompute=full": {"memory.arena": "true", "recompute": "full"},
    "optimizer.states=bfloat16": {"optimizer.states": "bfloat16"},
    "optimizer.states=int8": {"optimizer.states": "int8"},
    "optimizer.name=lion": {"optimizer.name": "lion"},
    "optimizer.name=adafactor": {"optimizer.name": "adafactor"},
    "optimizer.name=sm3": {"optimizer.name": "sm3"},
    "optimizer.name=muon": {"optimizer.name": "muon"},
    "optimizer.ema=0.999": {"optimizer.ema": "0.999"},
    "optimizer.in_backward": IN_BACKWARD,
    "precision.master=none": {"precision.master": "none"},
    "dtype=float16": {"dtype": "float16"},
    "offload=optimizer": {"offload": "optimizer", "memory.host": "1"},
    "offload=params": {"offload": "params", "memory.host": "1"},
    "offload=activations": {"offload": "activations"},
}
"""settings of a configuration, and keys of the layout"""
STACK: dict[str, dict[str, str]] = {
    "bfloat16, AdamW": {},
    "+ recompute=ops": {"recompute": "ops"},
    "+ recompute=full": {"recompute": "full"},
    "+ update in backward": IN_BACKWARD,
    "+ moments in 8 bits": {"optimizer.states": "int8"},
    "+ no master copy": {"precision.master": "none"},
    "+ inputs of layers on the host": {"offload": "activations"},
    "+ parameters and states too": {
        "offload": "params+activations",
        "memory.host": "1",
        **dict.fromkeys(("precision.master", "optimizer.states"), ""),  # on the host they take nothing from the device
        **dict.fromkeys(IN_BACKWARD, ""),  # the host updates by itself
    },
}
"""each on top of those before it"""
OF_LAYOUT = ("recompute", "offload")


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    settings: dict[str, str]
    held: dict[str, int]
    """bytes between steps by category, and gradients at the fullest moment"""
    peak: int
    seconds: float
    predicted: dict[str, int]
    """bytes by category"""
    predicted_seconds: float
    failed: str = ""

    @property
    def off(self) -> float:
        return sum(self.predicted.values()) / self.peak - 1 if self.peak else 0.0


class Watched:
    """The gradients that live at the fullest moment of a step, as far as can be seen when one is whole."""

    def __init__(self, engine: Engine):
        self._units, self._peak, self.bytes = engine.parallel.sharded_model.param_groups, 0, 0
        for unit in self._units:
            unit.grads.mark_param_ready = self._seen(unit.grads.mark_param_ready)  # type: ignore[method-assign]

    def _seen(self, note: Callable[[], bool]) -> Callable[[], bool]:
        def seen() -> bool:
            peak = torch.cuda.max_memory_allocated()
            if peak > self._peak:  # since the gradient before this one
                self._peak = peak
                self.bytes = _bytes([unit.grads.tensor for unit in self._units if unit.grads.tensor is not None])
            return note()

        return seen


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    """On the GPU, each storage once."""
    found = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors if tensor.is_cuda
    }
    return sum(found.values())


def config_of(model: str, batch: int, seq_len: int, settings: Mapping[str, str]) -> Config:
    given = {**BASE, **settings}
    keys = {"microbatch": str(batch)} | {key: given.pop(key) for key in OF_LAYOUT if given.get(key)}
    layout = ",".join(f"{key}={value}" for key, value in keys.items())
    given |= {"model": model, "batch": str(batch), "seq_len": str(seq_len), "layout": layout, "device": "cuda"}
    return Config.load(None, [f"{key}={value}" for key, value in given.items()])


def measure(name: str, config: Config, settings: dict[str, str], steps: int) -> Row:
    device = torch.device("cuda")
    shape = config.override_model(model_config.find_model(config.model))
    layout = Layout.parse(config.layout)
    kind = "h200" if "H200" in torch.cuda.get_device_name() else "h100"
    plan = price(scenario_of(config, layout, shape, cluster.parse_cluster(f"1x{kind}")))
    parts = {key: size for key, size in plan.memory.parts.items() if key != "reserve"}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    engine = Engine(
        models.build(shape, "meta"),
        layout,
        config.optimizer,
        clip=config.clip,
        options=parallel_options(config, device),
        loss_scale=loss_scale_settings(config),
    )
    engine.model.train()
    ids = torch.randint(0, shape.vocab, (config.batch, config.seq_len + 1), device=device)
    batch = {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}
    for _ in range(2):
        engine.step(batch).wait()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    watched, taken = Watched(engine), []
    for _ in range(steps):
        begun = time.perf_counter()
        engine.step(batch).wait()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begun)
    units = engine.parallel.sharded_model.param_groups
    full = [unit.unsharded_param for unit in units]
    average = engine.ema.states() if engine.ema else []
    held = {
        "parameters": _bytes(full),
        "master": _bytes([*full, *(tensor for unit in units for tensor in unit.master.tensors())]) - _bytes(full),
        "moments": _bytes([*engine.optimizer.states(), *average]),
        "gradients": watched.bytes,
    }
    return Row(
        name=name,
        settings=settings,
        held=held,
        peak=torch.cuda.max_memory_allocated(),
        seconds=sorted(taken)[len(taken) // 2],
        predicted=parts,
        predicted_seconds=plan.seconds,
    )


def rows_of(plan: Mapping[str, dict[str, str]], given: argparse.Namespace, console: Console) -> Iterator[Row]:
    for name, settings in plan.items():
        try:
            config = config_of(given.model, given.batch, given.seq_len, settings)
            row = measure(name, config, settings, given.steps)
        except Exception as error:
            nothing: dict[str, Any] = {"held": {}, "peak": 0, "seconds": 0.0, "predicted": {}, "predicted_seconds": 0.0}
            row = Row(name=name, settings=settings, failed=f"{type(error).__name__}: {error}"[:2000], **nothing)
        gc.collect()
        torch.cuda.empty_cache()
        console.print(describe(row))
        yield row


def describe(row: Row) -> str:
    if row.failed:
        return f"{row.name}: {row.failed}"
    time = f"{row.seconds:.3f} s (predicted {row.predicted_seconds:.3f})"
    return f"{row.name}: {row.peak / GIB:.2f} GiB (predicted {row.off:+.1%}), {time}"


def stacked() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    together: dict[str, str] = {}
    for name, settings in STACK.items():
        together = {key: value for key, value in (together | settings).items() if value}
        found[name] = together
    return found


def table_of(title: str, rows: Sequence[Row]) -> Table:
    table = Table(
        "",
        "parameters",
        "master",
        "moments",
        "gradients",
        "rest",
        "peak GiB",
        "predicted",
        "s",
        "predicted",
        title=title,
    )
    for row in rows:
        if row.failed:
            table.add_row(row.name, row.failed)
            continue
        held = [size / GIB for size in row.held.values()]
        rest = row.peak / GIB - sum(held)
        numbers = [*held, rest, row.peak / GIB]
        off = [f"{row.off:+.1%}", f"{row.seconds:.3f}", f"{row.predicted_seconds:.3f}"]
        table.add_row(row.name, *(f"{number:.2f}" for number in numbers), *off)
    return table


def write(given: argparse.Namespace, found: Mapping[str, list[Row]]) -> None:
    if given.out is not None:
        rows = {name: [{**asdict(row), "off": row.off} for row in each] for name, each in found.items()}
        about = {"model": given.model, "batch": given.batch, "seq_len": given.seq_len}
        given.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), **about, **rows}), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stack", action="store_true")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--only", default="", help="techniques whose name has this word")
    parser.add_argument("--model", default="llama-3b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a JSON file")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("memory is measured on a GPU, and there is none here")
    console = Console()
    found: dict[str, list[Row]] = {}
    for name, plan in (("stack", stacked()), ("alone", ALONE)):
        if getattr(given, name):
            chosen = {key: value for key, value in plan.items() if given.only in key}
            found[name] = []
            for row in rows_of(chosen, given, console):
                found[name].append(row)
                write(given, found)
            console.print(table_of(f"{given.model}, {name}", found[name]))
    every = [row for each in found.values() for row in each]
    return int(any(row.failed or abs(row.off) > CLOSE for row in every))


if __name__ == "__main__":
    sys.exit(main())
