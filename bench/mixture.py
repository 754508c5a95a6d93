"""An MoE layer on one GPU: forward and backward against dense matmuls of the same FLOPs and a loop over experts.

    python bench/mixture.py

The dense peer multiplies as many rows by matrices of the same sizes, in as many products as experts do in all; the loop
is what a person writes first: for each expert, find its tokens, multiply, add up where they belong. Median of
interleaved rounds. FLOPs are those of the experts' products alone, forward and both gradients.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.moe import build_gate
from echelon.moe.experts import Experts
from echelon.moe.moe_layer import MoELayer

WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class Shape:
    name: str
    experts: int
    k: int
    width: int
    ffn: int
    tokens: int
    loop_bar: float
    """how much faster than the loop it must be"""
    dense_bar: float
    """the share of the dense matmuls' rate that it must reach"""

    @property
    def flops(self) -> float:
        return 3 * 2 * 3 * self.tokens * self.k * self.width * self.ffn


SHAPES = (
    Shape(name="8 top-2", experts=8, k=2, width=4096, ffn=14336, tokens=16384, loop_bar=1.0, dense_bar=0.8),
    Shape(name="64 top-6", experts=64, k=6, width=2048, ffn=1408, tokens=16384, loop_bar=2.0, dense_bar=0.0),
)


def loop(layer: MoELayer, x: Tensor) -> Tensor:
    """A plain loop over experts."""
    routing = layer.gate(x)
    tokens = x.flatten(0, 1)
    experts, weights = routing.experts.view(len(tokens), -1), routing.weights.view(len(tokens), -1)
    out = torch.zeros_like(tokens)
    up, down = layer.experts.up, layer.experts.down
    for expert in range(len(up)):
        rows, slot = torch.where(experts == expert)
        h = F.silu(tokens[rows] @ up[expert, 0].t()) * (tokens[rows] @ up[expert, 1].t())
        out = out.index_add(0, rows, (h @ down[expert].t()) * weights[rows, slot, None].to(x.dtype))
    return out.view_as(x)


def dense(shape: Shape, rows: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The matmuls alone, of all tokens at once."""
    h = rows @ up.t()
    return h[:, : shape.ffn] @ down.t()


def both(call: Callable[[], Tensor], inputs: list[Tensor]) -> Callable[[], object]:
    def run() -> object:
        out = call()
        return torch.autograd.grad(out, inputs, torch.ones_like(out))

    return run


def seconds(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def measure(shape: Shape, rounds: int) -> dict[str, float]:
    torch.manual_seed(0)
    gate = build_gate("mixtral", shape.width, shape.experts, shape.k)
    layer = MoELayer(gate, Experts(shape.experts, shape.width, shape.ffn))
    for parameter in layer.experts.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    layer = layer.to("cuda", torch.bfloat16)
    x = torch.randn(4, shape.tokens // 4, shape.width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    inputs = [x, *layer.parameters()]
    rows = torch.randn(shape.tokens * shape.k, shape.width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    up = torch.randn(2 * shape.ffn, shape.width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    down = torch.randn(shape.width, shape.ffn, device="cuda", dtype=torch.bfloat16).requires_grad_()
    sides = {
        "ours": both(lambda: layer(x)[0], inputs),
        "loop": both(lambda: loop(layer, x), inputs),
        "dense": both(lambda: dense(shape, rows, up, down), [rows, up, down]),
    }
    found: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(-WARM_UP, rounds):
        for name, call in sides.items():
            took = seconds(call)
            if index >= 0:
                found[name].append(took)
    error = (layer(x)[0] - loop(layer, x)).abs().max() / loop(layer, x).abs().max()
    return {name: statistics.median(times) for name, times in found.items()} | {"error": float(error)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    asked = parser.parse_args()
    held, rows = True, []
    for shape in SHAPES:
        took = measure(shape, asked.rounds)
        share, faster = took["dense"] / took["ours"], took["loop"] / took["ours"]
        held &= share >= shape.dense_bar and faster >= shape.loop_bar
        rate = shape.flops / took["ours"] / 1e12
        print(
            f"{shape.name:10} ours {took['ours'] * 1e3:7.2f} ms ({rate:.0f} TFLOP/s)  of dense {share:.2f}  "
            f"loop / ours {faster:.2f}  difference from the loop {took['error']:.1e}",
            flush=True,
        )
        rows.append({**asdict(shape), **took, "of_dense": share, "loop_over_ours": faster})
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}))
    raise SystemExit(0 if held else 1)


if __name__ == "__main__":
    main()
