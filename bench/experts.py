"""Does an MoE model learn more than a dense model of as many active parameters, and do balance losses balance?

    python bench/experts.py                                   on the demo's text
    python bench/experts.py --corpus FILE --json FILE         on a text or token file, with all curves

Every model is Llama's of one width, with as many layers and heads, on the same batches in the same order: a seed is a
pair. A token passes through as many parameters of experts as of the dense feed-forward part; a router comes on top. The
models differ in what is in place of that part:

    dense         one of `ffn` hidden units
    mixture       2 of 8 experts of ffn/2, Mixtral's gate, with its balance loss
    unbalanced    the same, its coefficient 0
    loss-free     2 of 8 experts of ffn/2, balanced by a bias that is no loss
    shared        3 of 16 experts of ffn/4 and one of ffn/4 that every token passes through, DeepSeek-V3's gate

Losses are cross entropies in nats a token, without balance losses. Entropy is that of a batch's shares of all experts,
1 where they are even, mean over layers. Exits with 1 where the mixture is not below the dense model, or balance losses
leave the entropy no higher, in the mean over seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from echelon import data, models
from echelon.config.lr_schedule import learning_rate
from echelon.config.run_config import Config
from echelon.config.sections import LRScheduleConfig, OptimizerConfig
from echelon.data.token_file import IntArray
from echelon.models.model_config import ModelConfig
from echelon.models.moe_config import MoEConfig
from echelon.parallel.parallel_options import ParallelOptions
from echelon.training.batch_sharding import Microbatch
from echelon.training.engine import Engine

DENSE, MIXTURE, UNBALANCED = "dense", "mixture", "unbalanced"
BALANCE = 0.005
"""coefficient of the balance loss in each layer: for two choices of a token what Switch's 0.01 is for one"""
SPEED = 0.001
"""by which the bias changes in a step"""
POINTS = 100
"""of a curve, each the mean of some steps"""
LAST = 0.05
"""share of the steps at the end over which training losses and loads are averaged"""
HELD_OUT = 0.02


def shapes(width: int, layers: int, seq_len: int, balance: float = BALANCE) -> dict[str, ModelConfig]:
    ffn = -(-width * 8 // (3 * 64)) * 64
    dense = replace(
        models.find_model("llama-tiny"),
        name=DENSE,
        layers=layers,
        width=width,
        heads=max(width // 32, 1),
        kv_heads=max(width // 32, 1),
        ffn=ffn,
        max_seq_len=seq_len,
    )

    def mixed(name: str, gate: str, experts: int, k: int, size: int, shared: int = 0, **options: float) -> ModelConfig:
        mixture = MoEConfig(
            experts=experts, k=k, ffn=size, gate=gate, shared_ffn=shared, options=tuple(options.items())
        )
        return replace(dense, name=name, moe=mixture)

    found = (
        dense,
        mixed(MIXTURE, "mixtral", 8, 2, ffn // 2, balance=balance),
        mixed(UNBALANCED, "mixtral", 8, 2, ffn // 2, balance=0.0),
        mixed("loss-free", "loss-free", 8, 2, ffn // 2, speed=SPEED),
        mixed("shared", "deepseek-v3", 16, 3, ffn // 4, shared=ffn // 4, num_groups=1, group_limit=1),
    )
    return {shape.name: shape for shape in found}


@dataclass(frozen=True, kw_only=True)
class Result:
    """One model from one seed. Curves have a number for every `every` steps."""

    model: str
    seed: int
    held_out: float
    """loss on all text that was held out, at the end"""
    last: float
    """training loss, mean of the last steps"""
    seconds: float
    loss: list[float]
    entropy: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)
    """tokens of the busiest expert to the mean, mean over layers"""
    dead: list[float] = field(default_factory=list)
    """experts without a token in a batch, sum over layers"""
    entropy_of_layers: list[float] = field(default_factory=list)
    """of each layer, in the last steps"""


class Losses:
    """Cross entropies as the head makes them, which a model's own loss adds balance losses to."""

    def __init__(self, head: nn.Module) -> None:
        self.found: list[Tensor] = []
        head.register_forward_hook(self._note)

    def _note(self, _head: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        self.found.append(torch.stack([output[0].detach().double(), output[1].double()]))

    def take(self) -> Tensor:
        """[calls, 2]: sum of losses and number of targets of each call so far."""
        found, self.found = torch.stack(self.found).cpu(), []
        return found


def train(shape: ModelConfig, dataset: data.TokenDataset, asked: argparse.Namespace) -> Result:
    seed = dataset.seed
    options = ParallelOptions(device=torch.device(asked.device), compute_dtype=getattr(torch, asked.dtype), seed=seed)
    config = Config(optimizer=OptimizerConfig(lr=asked.lr), schedule=LRScheduleConfig(warmup=asked.warmup))
    engine = Engine(models.build(shape, "meta"), "", config.optimizer, clip=config.clip, options=options)
    engine.model.train()
    losses, loads = Losses(engine.model.get_submodule("head")), []
    started = time.perf_counter()
    for step in range(asked.steps):
        indices = np.arange(step * asked.batch, (step + 1) * asked.batch)
        batch = Microbatch(tensors(dataset.batch(indices)), torch.from_numpy(indices))
        result = engine.step_microbatches([batch], lr=learning_rate(step, asked.steps, config))
        if engine.expert_loads.last_table is not None:
            loads.append(engine.expert_loads.last_table)
        if step % 100 == 0:
            result.wait()  # the host would be far ahead of a GPU
    sums = losses.take()
    training = (sums[:, 0] / sums[:, 1]).tolist()
    seconds = time.perf_counter() - started
    engine.evaluate(held_out(dataset, asked.batch))
    total, count = losses.take().sum(0).tolist()
    tail = max(round(asked.steps * LAST), 1)
    found = Result(
        model=shape.name,
        seed=seed,
        held_out=total / count,
        last=statistics.mean(training[-tail:]),
        seconds=seconds,
        loss=binned(training),
    )
    if not loads:
        return found
    load = torch.stack(loads).cpu().double()[..., :-1]  # [steps, layers, experts]
    shares = load / load.sum(-1, keepdim=True)
    entropy = -torch.xlogy(shares, shares).sum(-1) / np.log(load.shape[-1])
    return replace(
        found,
        entropy=binned(entropy.mean(-1).tolist()),
        most=binned((shares.amax(-1) * load.shape[-1]).mean(-1).tolist()),
        dead=binned((load == 0).sum((-1, -2)).tolist()),
        entropy_of_layers=entropy[-tail:].mean(0).tolist(),
    )


def held_out(dataset: data.TokenDataset, batch: int) -> Iterator[Microbatch]:
    for first in range(0, dataset.num_eval, batch):
        indices = np.arange(first, first + batch)
        yield Microbatch(tensors(dataset.eval_batch(indices)), torch.from_numpy(indices))


def tensors(batch: dict[str, IntArray]) -> dict[str, Tensor]:
    return {key: torch.from_numpy(value) for key, value in batch.items()}


def every(steps: int) -> int:
    """Steps of one point of a curve."""
    return -(-steps // POINTS)


def binned(numbers: Sequence[float]) -> list[float]:
    size = every(len(numbers))
    return [round(statistics.mean(numbers[i : i + size]), 4) for i in range(0, len(numbers), size)]


def counts(shape: ModelConfig) -> dict[str, int]:
    """Exact numbers of parameters: of all, of those that a token passes through, and of these the routers'."""
    router = shape.moe.experts * shape.width * shape.num_moe_layers if shape.moe else 0
    return {"total": shape.parameters, "active": shape.parameters - shape.idle_parameters, "router": router}


def tell(result: Result, steps: int) -> str:
    text = f"{result.model:11} seed {result.seed}  held out {result.held_out:.4f}  last steps {result.last:.4f}"
    if result.entropy:
        layers = " ".join(f"{entropy:.3f}" for entropy in result.entropy_of_layers)
        text += f"  entropy {statistics.mean(result.entropy_of_layers):.4f} (by layer {layers})"
        text += f"  most/mean {result.most[-1]:.2f}  dead {result.dead[-1]:g}"
    return f"{text}  {result.seconds / steps * 1e3:.1f} ms a step"


def table(results: Sequence[Result], chosen: dict[str, ModelConfig]) -> Iterator[str]:
    head = ("model", "active", "of them router", "total", "held out", "minus dense", "entropy", "most/mean", "dead")
    yield "{:11} {:>12} {:>15} {:>12} {:>17} {:>17} {:>9} {:>10} {:>6}".format(*head)
    dense = {result.seed: result.held_out for result in results if result.model == DENSE}
    for name, shape in chosen.items():
        mine = [result for result in results if result.model == name]
        if not mine:
            continue
        less = [result.held_out - dense[result.seed] for result in mine if result.seed in dense]
        cells = [f"{name:11}"]
        cells += [f"{counts(shape)[key]:{size},}" for key, size in (("active", 12), ("router", 15), ("total", 12))]
        cells += [f"{spread([result.held_out for result in mine]):>17}", f"{spread(less) if less else '-':>17}"]
        if shape.moe:
            entropy = statistics.mean(statistics.mean(result.entropy_of_layers) for result in mine)
            most, dead = (statistics.mean(getattr(result, key)[-1] for result in mine) for key in ("most", "dead"))
            cells += [f"{entropy:9.4f}", f"{most:10.2f}", f"{dead:6.2f}"]
        yield " ".join(cells)


def spread(numbers: Sequence[float]) -> str:
    """The mean, and how far the furthest seed is from it."""
    mean = statistics.mean(numbers)
    return f"{mean:.4f} +- {max(abs(number - mean) for number in numbers):.4f}"


def verdicts(results: Sequence[Result]) -> dict[str, bool]:
    """What was asked, where it was measured."""
    held: dict[str, list[float]] = {}
    entropy: dict[str, list[float]] = {}
    for result in results:
        held.setdefault(result.model, []).append(result.held_out)
        if result.entropy:
            entropy.setdefault(result.model, []).append(statistics.mean(result.entropy_of_layers))
    found = {}
    if DENSE in held and MIXTURE in held:
        found["a mixture is below a dense model"] = statistics.mean(held[MIXTURE]) < statistics.mean(held[DENSE])
    if MIXTURE in entropy and UNBALANCED in entropy:
        higher = statistics.mean(entropy[MIXTURE]) > statistics.mean(entropy[UNBALANCED])
        found["balance losses raise the entropy"] = higher
    return found


def as_json(results: Sequence[Result], chosen: dict[str, ModelConfig], asked: argparse.Namespace, tokens: int) -> str:
    settings = ("steps", "width", "layers", "batch", "seq_len", "lr", "warmup", "dtype")
    device = torch.cuda.get_device_name() if asked.device == "cuda" else "cpu"
    found = {
        "device": device,
        "torch": torch.__version__,
        **{key: getattr(asked, key) for key in settings},
        "tokens": tokens,
        "every": every(asked.steps),
        "verdicts": verdicts(results),
        "models": {
            name: {"ffn": shape.ffn, **counts(shape), **(asdict(shape.moe) if shape.moe else {})}
            for name, shape in chosen.items()
        },
        "runs": [asdict(result) for result in results],
    }
    return json.dumps(found) + "\n"


def token_file(corpus: str, folder: str) -> Path:
    if corpus:
        return data.prepare_token_file(corpus, folder, tokenizer=data.load_tokenizer("bytes"))
    from echelon.training.task import TOKEN_CACHE_DIR

    return data.default_corpus(TOKEN_CACHE_DIR)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"steps": 2000, "width": 256, "layers": 4, "seeds": 3, "batch": 64, "seq-len": 256, "warmup": 100}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate of all models (default 1e-3)")
    parser.add_argument("--balance", type=float, default=BALANCE, help=f"of the mixture's loss (default {BALANCE})")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="bfloat16 on a GPU")
    names = tuple(shapes(64, 1, 8))
    parser.add_argument("--only", action="append", choices=names, help="one of the models; repeatable")
    parser.add_argument("--corpus", default="", help="a text or token file (default: the demo's text)")
    parser.add_argument("--json", metavar="FILE", help="where to write everything, after every run")
    parser.add_argument("--limit", type=float, default=0.0, help="seconds; no run is begun that would end after them")
    asked = parser.parse_args()
    for name in numbers:
        value, least = getattr(asked, name.replace("-", "_")), 0 if name == "warmup" else 1
        if value < least:
            parser.error(f"there must be something to measure (--{name} {value}); use {least} or more")
    if asked.width % 64:
        parser.error(f"the width is no multiple of 64 (--width {asked.width}); use one, heads have 32 elements")
    if asked.device == "auto":
        asked.device = "cuda" if torch.cuda.is_available() else "cpu"
    if asked.dtype == "auto":
        asked.dtype = "bfloat16" if asked.device == "cuda" else "float32"
    return asked


def main() -> int:
    asked = arguments()
    torch.set_num_threads(1)
    chosen = shapes(asked.width, asked.layers, asked.seq_len, asked.balance)
    chosen = {name: shape for name, shape in chosen.items() if not asked.only or name in asked.only}
    results: list[Result] = []
    took: dict[str, float] = {}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = token_file(asked.corpus, folder)
        for seed in range(asked.seeds):
            dataset = data.TokenDataset([path], (), asked.seq_len, seed, eval_fraction=HELD_OUT)
            for name, shape in chosen.items():
                begun = time.perf_counter()
                if asked.limit and begun - started + took.get(name, max(took.values(), default=0.0)) > asked.limit:
                    print(f"{name:11} seed {seed}  left out: it would end after {asked.limit:g} s", flush=True)
                    continue
                results.append(train(shape, dataset, asked))
                took[name] = time.perf_counter() - begun
                print(tell(results[-1], asked.steps), flush=True)
                if asked.json:
                    text = as_json(results, chosen, asked, dataset.files[0].header.num_tokens)
                    Path(asked.json).write_text(text, encoding="utf-8")
    print(*table(results, chosen), sep="\n")
    found = verdicts(results)
    for what, holds in found.items():
        print(f"{'yes' if holds else 'NO '}  {what}")
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
