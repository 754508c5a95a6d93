"""Operator lists of transformers, written by hand: what a trace gives the sharding solver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from echelon.parallel.auto_sharding.sharding import (
    BROADCAST,
    PARTIAL,
    REPLICATE,
    ShardableOp,
    Sharding,
    Strategy,
    shard,
)
from echelon.parallel.auto_sharding.sharding_problem import AxisLink, ShardingProblem

R, B, P = REPLICATE, BROADCAST, PARTIAL
S0, S1, S2 = shard(0), shard(1), shard(2)
H100S = AxisLink(size=4, bandwidth=3e11, latency=1e-5, flops_rate=5e14, memory_bandwidth=2.5e12)
"""four GPUs of a node"""


class OpList:
    """Operators of activations [batch, sequence, width] in bf16 on `ranks` ranks."""

    def __init__(
        self,
        *,
        ranks: int = 4,
        batch: int = 1,
        seq_len: int = 4096,
        width: int = 4096,
        tokens: bool = False,
        token_linears: bool = False,
        residual_slices: bool = False,
    ):
        self.ops: list[ShardableOp] = []
        self.repeats: dict[int, int] = {}
        self.tokens = tokens
        """norms and elementwise operators may run on slices of the sequence"""
        self.token_linears = token_linears
        """linears too, with partial gradients of their weights"""
        self.residual_slices = residual_slices
        """residual additions may run on slices of the width, and on partial sums"""
        self.share = 1 / ranks
        self.batch, self.seq_len, self.width = batch, seq_len, width

    def add(
        self,
        name: str,
        op: str,
        inputs: Sequence[int],
        strategies: Sequence[tuple[tuple[Sharding, ...], Sharding]],
        shape: tuple[int, ...],
        *,
        flops: float = 0.0,
        saved: float | None = None,
        param: str = "",
        element_bytes: int = 2,
    ) -> int:
        size = prod(shape) * element_bytes
        read = sum(prod(self.ops[i].shape) * self.ops[i].element_bytes for i in inputs)
        activations = sum(prod(self.ops[i].shape) * self.ops[i].element_bytes for i in inputs if not self.ops[i].param)
        self.ops.append(
            ShardableOp(
                name=name,
                op=op,
                inputs=tuple(inputs),
                strategies=tuple(
                    Strategy(states, output, self.share if "S" in {s.kind for s in (*states, output)} else 1.0)
                    for states, output in strategies
                ),
                shape=shape,
                element_bytes=element_bytes,
                flops=flops,
                traffic_bytes=float(read + size) if inputs else 0.0,
                saved_bytes=float(activations) if saved is None else saved,
                param=param,
            )
        )
        return len(self.ops) - 1

    def input(self, name: str, shape: tuple[int, ...], element_bytes: int = 2) -> int:
        return self.add(name, "input", (), [((), R)], shape, element_bytes=element_bytes)

    def param(self, name: str, *shape: int) -> int:
        states = [R, B, *(shard(dim) for dim in range(len(shape)) if len(shape) > 1)]
        return self.add(name, "param", (), [((), state) for state in states], shape, param=name)

    def linear(self, name: str, x: int, width: int, weight: int | None = None) -> int:
        shape = self.ops[x].shape
        if weight is None:
            weight = self.param(f"{name}.weight", width, shape[-1])
        strategies = [
            ((R, R), R),
            ((B, B), B),
            ((B, S0), S2),  # column-parallel
            ((S2, S1), P),  # row-parallel
            *([((S1, B), S1)] if self.token_linears else []),
        ]
        flops = 2.0 * prod(shape) * width
        return self.add(name, "linear", (x, weight), strategies, (*shape[:-1], width), flops=flops)

    def elementwise(self, name: str, op: str, *inputs: int) -> int:
        states = [R, B, *([S1] if self.tokens else [])]
        if op != "add" or self.residual_slices:
            states += [S2, *([P] if op == "add" else [])]
        strategies = [((state,) * len(inputs), state) for state in states]
        saved = 0.0 if op == "add" else None
        return self.add(name, op, inputs, strategies, self.ops[inputs[0]].shape, saved=saved)

    def norm(self, name: str, x: int) -> int:
        weight = self.param(f"{name}.weight", self.ops[x].shape[-1])
        strategies = [((R, R), R), ((B, B), B), *([((S1, B), S1)] if self.tokens else [])]
        return self.add(name, "rms_norm", (x, weight), strategies, self.ops[x].shape)

    def attention(self, name: str, x: int, heads: int) -> int:
        """Add q, k, v, attention by heads, and the output projection."""
        batch, seq_len, width = self.ops[x].shape
        heads_shape = (batch, heads, seq_len, width // heads)
        views = [((R,), R), ((B,), B), ((S2,), S1), ((S1,), S2)]
        split = [
            self.add(f"{name}.{part}_heads", "view", (self.linear(f"{name}.{part}", x, width),), views, heads_shape)
            for part in ("q", "k", "v")
        ]
        flops = 2.0 * batch * seq_len * seq_len * width
        states = [((state,) * 3, state) for state in (R, B, S1)]
        mixed = self.add(f"{name}.scores", "attention", split, states, heads_shape, flops=flops)
        back = [((R,), R), ((B,), B), ((S1,), S2), ((S2,), S1)]
        joined = self.add(f"{name}.joined", "view", (mixed,), back, self.ops[x].shape, saved=0.0)
        return self.linear(f"{name}.o", joined, width)

    def mlp(self, name: str, x: int, ffn: int, gated: bool) -> int:
        up = self.linear(f"{name}.up", x, ffn)
        if gated:
            gate = self.elementwise(f"{name}.silu", "silu", self.linear(f"{name}.gate", x, ffn))
            inner = self.elementwise(f"{name}.mul", "mul", gate, up)
        else:
            inner = self.elementwise(f"{name}.gelu", "gelu", up)
        return self.linear(f"{name}.down", inner, self.width)

    def block(self, name: str, x: int, *, heads: int, ffn: int, gated: bool) -> int:
        """Add a pre-norm transformer layer."""
        attended = self.attention(f"{name}.attn", self.norm(f"{name}.norm1", x), heads)
        x = self.elementwise(f"{name}.add1", "add", x, attended)
        return self.elementwise(
            f"{name}.add2", "add", x, self.mlp(f"{name}.mlp", self.norm(f"{name}.norm2", x), ffn, gated)
        )

    def layers(self, x: int, count: int, build: Callable[[str, int], int]) -> int:
        """Add equal layers; those behind the first repeat it."""
        first = len(self.ops)
        x = build("blocks.0", x)
        length = len(self.ops) - first
        for number in range(1, count):
            start = len(self.ops)
            x = build(f"blocks.{number}", x)
            self.repeats.update({start + place: first + place for place in range(length)})
        return x

    def output(self, x: int) -> int:
        return self.add("output", "output", (x,), [((R,), R)], self.ops[x].shape, saved=0.0)

    def problem(self, microbatches: int = 8) -> ShardingProblem:
        return ShardingProblem(tuple(self.ops), self.repeats, microbatches=microbatches)


def mlp_problem(**sizes: int | bool) -> ShardingProblem:
    """An MLP of two linears between a replicated input and output."""
    model = OpList(**sizes)  # type: ignore[arg-type]
    x = model.input("x", (model.batch, model.seq_len, model.width))
    model.output(model.mlp("mlp", x, 4 * model.width, gated=False))
    return model.problem()


def attention_problem(**sizes: int | bool) -> ShardingProblem:
    """Attention between a replicated input and output."""
    model = OpList(**sizes)  # type: ignore[arg-type]
    x = model.input("x", (model.batch, model.seq_len, model.width))
    model.output(model.attention("attn", x, heads=32))
    return model.problem()


def transformer_problem(
    *, layers: int, gated: bool, tied: bool, vocab: int = 32_000, microbatches: int = 8, **sizes: int | bool
) -> ShardingProblem:
    """A Llama-like (gated) or GPT-like transformer with embedding, head and cross-entropy."""
    model = OpList(**sizes)  # type: ignore[arg-type]
    tokens = (model.batch, model.seq_len)
    ids, targets = (model.add(n, "input", (), [((), R), ((), S1)], tokens, element_bytes=8) for n in ("ids", "targets"))
    table = model.param("embed.weight", vocab, model.width)
    looked_up = [
        ((R, R), R),
        ((R, S0), P),  # vocabulary-parallel
        *([((R, S1), S2)] if model.residual_slices else []),
        *([((S1, B), S1)] if model.token_linears else []),
    ]
    x = model.add("embed", "embedding", (ids, table), looked_up, (*tokens, model.width), saved=0.0)
    heads, ffn = model.width // 128, model.width * (11 if gated else 16) // 4
    x = model.layers(x, layers, lambda name, x: model.block(name, x, heads=heads, ffn=ffn, gated=gated))
    logits = model.linear("head", model.norm("norm", x), vocab, table if tied else None)
    losses = [((R, R), R), ((S2, R), R), *([((S1, S1), P)] if model.tokens else [])]
    model.output(model.add("loss", "cross_entropy", (logits, targets), losses, (), element_bytes=4))
    return model.problem(microbatches)
