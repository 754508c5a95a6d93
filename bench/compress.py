"""What compression of saved activations keeps, costs and changes, beside plain torch.

    python bench/compress.py --model vgg16 --batch 64 --dtype bfloat16 --channels-last --pairs 30 --curve 200
    python bench/compress.py --model vgg16 --batch 1 --pairs 0

For each kind: bytes that forward leaves for backward and their ratio to plain torch's, the error of the gradient
(lossless must be equal, bit by bit), the step's time in interleaved pairs with plain torch (the median of the ratios),
and the peak of memory. bfloat16 is torch's autocast. `--curve N` trains N steps from the same start with each kind, and
gives the losses. Exits with 1 where a bar is missed: 1.7 times fewer bytes, 1.10 of the time (on a GPU).
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from pairs import WARM_UP, Pair, summary
from torch import Tensor, nn

import echelon as ec
from echelon import models
from echelon.data.synthetic_images import synthetic_images
from echelon.memory.compression import cost as compression_cost
from echelon.models.vision import cnn

SMALLER, SLOWER = 1.7, 1.10
"""bars: of bytes, at least, losslessly with values in fewer bits; of time, at most"""
NETS: dict[str, Callable[..., nn.Module]] = {"vgg16": cnn.vgg16, "alexnet": cnn.alexnet}
CHECKED = 4
"""rows of which gradients are compared"""


@dataclass(frozen=True)
class Problem:
    asked: Any

    @property
    def device(self) -> torch.device:
        return torch.device(self.asked.device)

    def model(self) -> nn.Module:
        return copy.deepcopy(self._start)

    @cached_property
    def _start(self) -> nn.Module:
        torch.manual_seed(0)
        asked = self.asked
        if asked.model == "resnet50":
            found: nn.Module = cnn.resnet50(asked.classes, asked.share)
        elif asked.model in NETS:
            found = NETS[asked.model](asked.classes, asked.side, asked.share, dropout=asked.dropout)
        else:
            found = models.build(models.find_model(asked.model), "cpu")
        found = found.to(self.device)
        return found.to(memory_format=torch.channels_last) if asked.channels_last else found

    def batch(self, step: int, rows: int | None = None) -> dict[str, Tensor]:
        rows = rows or self.asked.batch
        samples = torch.arange(step * rows, (step + 1) * rows, device=self.device)
        if self.asked.model in models.SIZES:
            size = models.find_model(self.asked.model)
            tokens = torch.stack([(samples + 7 * i * i) % size.vocab for i in range(129)], 1)
            return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        pixels, labels = synthetic_images(samples, side=self.asked.side, classes=self.asked.classes)
        if self.asked.channels_last:
            pixels = pixels.contiguous(memory_format=torch.channels_last)
        return {"images": pixels, "labels": labels}

    def types(self) -> AbstractContextManager[object]:
        wanted = self.asked.dtype == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16) if wanted else nullcontext()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def saving(kind: str) -> AbstractContextManager[Any]:
    return ec.compressed(kind) if kind != compression_cost.NONE else nullcontext()


class Trainer:
    """Plain torch: a model, AdamW, and a step with any kind of compression."""

    def __init__(self, problem: Problem):
        self.problem, self.net = problem, problem.model()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=problem.asked.lr, fused=True)

    def step(self, kind: str, batch: dict[str, Tensor]) -> Tensor:
        with self.problem.types(), saving(kind):
            total, count = self.net(**batch)
        loss = total / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def seconds(self, kind: str, batch: dict[str, Tensor]) -> tuple[float, float]:
        self.problem.wait()
        start = time.perf_counter()
        loss = self.step(kind, batch)
        self.problem.wait()
        return time.perf_counter() - start, float(loss)


def kept(problem: Problem, net: nn.Module, kind: str) -> int:
    """Bytes between forward and backward."""
    with problem.types(), ec.compressed(kind) as held:
        total, _ = net(**problem.batch(0))
    found: int = held.bytes
    del total
    return found


def gradient(problem: Problem, net: nn.Module, kind: str) -> Tensor:
    torch.manual_seed(1)  # of dropout
    with problem.types(), saving(kind):
        total, _ = net(**problem.batch(0, min(CHECKED, problem.asked.batch)))
    total.backward()
    found = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    net.zero_grad()
    return found


def timed(problem: Problem, kind: str) -> dict[str, float]:
    """Pairs of a step with this kind and a step of plain torch, first place alternating."""
    trainer, batches = Trainer(problem), [problem.batch(step) for step in range(2)]
    pairs: list[Pair] = []
    for index in range(-WARM_UP, problem.asked.pairs):
        order = (kind, compression_cost.NONE) if index % 2 else (compression_cost.NONE, kind)
        found = {one: trainer.seconds(one, batches[index % 2]) for one in order}
        (ours, our_loss), (peer, peer_loss) = found[kind], found[compression_cost.NONE]
        if index >= 0:
            pairs.append(Pair(ours=ours, peer=peer, our_loss=our_loss, peer_loss=peer_loss))
    values = asdict(summary(pairs))
    return {key: values[key] for key in ("ratio", "low", "high", "ours_s", "peer_s")}


def peak(problem: Problem, kind: str) -> int:
    """Of a step's memory beyond what is there before it, on a GPU."""
    if problem.device.type != "cuda":
        return 0
    trainer, batch = Trainer(problem), problem.batch(0)
    for _ in range(2):
        trainer.step(kind, batch)
    problem.wait()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trainer.step(kind, batch)
    problem.wait()
    return int(torch.cuda.max_memory_allocated() - before)


def curve(problem: Problem, kind: str) -> list[float]:
    torch.manual_seed(2)
    trainer = Trainer(problem)
    losses = [trainer.step(kind, problem.batch(step)) for step in range(problem.asked.curve)]
    return [float(loss) for loss in losses]


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def asked() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vgg16", help="vgg16, alexnet, resnet50, or a named language model")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--share", type=float, default=1.0, help="of the channels")
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument(
        "--kinds", nargs="+", choices=compression_cost.COMPRESSIONS[1:], default=compression_cost.COMPRESSIONS[1:]
    )
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--curve", type=int, default=0, help="steps to train with each kind")
    parser.add_argument("--out", default="", help="a file for the JSON; else it is printed")
    return parser.parse_args()


def main() -> int:
    wanted = asked()
    problem = Problem(wanted)
    net = problem.model()
    torch.backends.cudnn.deterministic = True  # for the comparison of gradients
    truth, plain = gradient(problem, net, compression_cost.NONE), kept(problem, net, compression_cost.NONE)
    print(f"{wanted.model}, batch {wanted.batch}, {wanted.dtype}, {wanted.device}; the peer is plain torch")
    print(f"{compression_cost.NONE:14} {plain / 2**20:9.1f} MiB")
    rows: list[dict[str, Any]] = [{"compress": compression_cost.NONE, "bytes": plain, "peak_bytes": 0}]
    missed = False
    for kind in wanted.kinds:
        found = gradient(problem, net, kind)
        row: dict[str, Any] = {"compress": kind, "bytes": kept(problem, net, kind), "equal": torch.equal(found, truth)}
        row["smaller"] = plain / row["bytes"]
        row["error"] = float((found - truth).double().norm() / truth.double().norm())
        rows.append(row)
        missed |= row["smaller"] < SMALLER and compression_cost.value_format(kind) != ""
        missed |= kind == "lossless" and not row["equal"]
    del net, truth, found
    torch.backends.cudnn.deterministic = False
    rows[0]["peak_bytes"] = peak(problem, compression_cost.NONE)
    for row in rows[1:]:
        row["peak_bytes"] = peak(problem, row["compress"])
        row |= timed(problem, row["compress"]) if wanted.pairs else {}
        missed |= problem.device.type == "cuda" and row.get("ratio", 0.0) > SLOWER
        print(
            f"{row['compress']:14} {row['bytes'] / 2**20:9.1f} MiB  {row['smaller']:5.2f} x smaller  "
            f"gradient {'equal' if row['equal'] else format(row['error'], '.1e')}  "
            f"peak {row['peak_bytes'] / 2**20:.0f} (plain {rows[0]['peak_bytes'] / 2**20:.0f}) MiB"
            + (f"  time {row['ratio']:.3f} x ({row['low']:.3f}-{row['high']:.3f})" if "ratio" in row else "")
        )
    if wanted.curve:
        for row in rows:
            row["losses"] = curve(problem, row["compress"])
            shown = row["losses"][:: max(1, wanted.curve // 8)]
            print(f"{row['compress']:14} loss {' '.join(f'{loss:.3f}' for loss in shown)}")
    given = {key: value for key, value in vars(wanted).items() if key != "out"}
    report = json.dumps({"asked": given, "torch": torch.__version__, "on": name_of(problem.device), "rows": rows})
    if wanted.out:
        with open(wanted.out, "w", encoding="utf-8") as file:
            file.write(report + "\n")
    else:
        print(report)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
