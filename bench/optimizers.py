"""What an update takes on a GPU, beside `torch.optim.AdamW(fused=True)` on as many elements, and whether it is right.

    python bench/optimizers.py                                   matrices like llama-1b's layers: 0.97B elements
    python bench/optimizers.py --layers 2 --only lion            fewer, and one rule
    python bench/optimizers.py --device cpu --layers 1 --width 64 --repeats 1          anywhere

Every rule updates the same made-up model of matrices, in bfloat16, with gradients in bfloat16. `split` has a float32
master in two halves, `alone` no master weights: stochastic rounding. Difference is the largest between weights after
two steps with our kernels and with plain torch on the same device, over the largest weight. Torch's AdamW has float32
weights and gradients. Exits with 1 where a kernel that is promised to agree bit for bit does not.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from echelon.config.sections import OptimizerConfig
from echelon.kernels import dispatch
from echelon.optim.flat_segments import build_flat_segments
from echelon.optim.optimizer_factory import build_optimizer
from echelon.optim.rules.ema import WeightEMA
from echelon.parallel.parallel_model import ParallelModel
from echelon.parallel.parallel_options import ParallelOptions
from echelon.training.engine import Engine

RULES = {
    "adamw": OptimizerConfig(),
    "adamw, bfloat16": OptimizerConfig(states="bfloat16"),
    "adamw, int8": OptimizerConfig(states="int8"),
    "lion": OptimizerConfig(name="lion"),
    "sgd": OptimizerConfig(name="sgd", momentum=0.9),
    "ema": OptimizerConfig(ema=0.99),
    "lamb": OptimizerConfig(name="lamb"),
    "adafactor": OptimizerConfig(name="adafactor"),
    "sm3": OptimizerConfig(name="sm3"),
    "muon": OptimizerConfig(name="muon"),
}
EXACT = ("adamw", "adamw, bfloat16", "adamw, int8", "lion", "sgd", "ema")
MASTERS = {"split": torch.float32, "alone": torch.bfloat16}


class Layer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        shapes = {"qkv": (width * 3 // 2, width), "out": (width, width), "gate_up": (8 * width, width)}
        for name, shape in {**shapes, "down": (width, 4 * width), "norm": (width,)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * 0.02))


class Layers(nn.Module):
    def __init__(self, layers: int, width: int):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=RULES, action="append", help="may be given again")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    elements, beside = None, 0.0
    wrong = False
    for master, dtype in MASTERS.items():
        options = ParallelOptions(
            device=device, compute_dtype=torch.bfloat16, master_dtype=dtype, reduce_dtype=torch.bfloat16
        )
        torch.manual_seed(0)
        with device:
            model = Layers(asked.layers, asked.width)
        if elements is None:
            elements = sum(p.numel() for p in model.parameters())
            beside = torchs(elements, device, asked.repeats)
            print(f"{elements / 1e9:.3f}B elements; torch's AdamW, fused, float32: {beside * 1e3:.2f} ms")
            print(f"{'rule':<18}{'master':<8}{'ms':>9}{'to torch':>10}{'plain ms':>10}{'difference':>12}", flush=True)
        parallel = Engine(model, "", options=options).parallel
        del model
        first = [unit.master.values().clone() for unit in parallel.sharded_model.param_groups]
        draw = torch.Generator(device).manual_seed(0)
        for unit in parallel.sharded_model.param_groups:
            unit.grad.normal_(generator=draw)
        for name in asked.only or RULES:
            seconds, found = measured(parallel, first, RULES[name], asked.repeats, plain=False)
            slow, wanted = measured(parallel, first, RULES[name], 0, plain=True)
            off = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True))
            wrong = wrong or (name in EXACT and off != 0.0)
            figures = f"{seconds * 1e3:>9.2f}{seconds / beside:>10.2f}{slow * 1e3:>10.2f}{off:>12.1e}"
            print(f"{name:<18}{master:<8}{figures}", flush=True)
            del found, wanted
            _release(device)
        del parallel, first, unit
        _release(device)
    return int(wrong)


def torchs(elements: int, device: torch.device, repeats: int) -> float:
    weights = torch.zeros(elements, device=device, requires_grad=True)
    weights.grad = torch.ones_like(weights)
    optimizer = torch.optim.AdamW([weights], fused=True)
    return fastest(optimizer.step, device, repeats + 1)


def measured(
    parallel: ParallelModel, first: list[Tensor], rule: OptimizerConfig, repeats: int, *, plain: bool
) -> tuple[float, list[Tensor]]:
    """(seconds of an update, the weights after two); with `ema`, seconds and values of the average."""
    device = parallel.options.device
    for unit, values in zip(parallel.sharded_model.param_groups, first, strict=True):
        unit.master.set_values(0, values)
    with dispatch.plain_torch(plain):
        update = build_optimizer(parallel, rule)
        average = WeightEMA(build_flat_segments(parallel, rule), rule.ema) if rule.ema else None
        one = torch.ones((), dtype=torch.float64, device=device)
        live = torch.ones((), dtype=torch.bool, device=device)

        def step() -> None:
            update.step(1e-2, one, live)

        def follow() -> None:
            if average is not None:
                average.step(live)

        taken = []
        for _ in range(2):
            taken = [fastest(part, device) for part in (step, follow)]
        held = average.states() if average else [unit.master.values() for unit in parallel.sharded_model.param_groups]
        found = [values.float().clone() for values in held]
        timed = follow if average else step
        seconds = min([taken[average is not None], *(fastest(timed, device) for _ in range(repeats))])
    return seconds, found


def fastest(step: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    """Seconds, of the fastest."""
    taken = []
    for _ in range(repeats):
        _wait(device)
        begun = time.perf_counter()
        step()
        _wait(device)
        taken.append(time.perf_counter() - begun)
    return min(taken)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    raise SystemExit(main())
