"""Small modules that run one family of operators each, for the rules of sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS, TIME, WIDTH = 4, 8, 16


class Operators(nn.Module):
    """Runs a function on parameters and the inputs `x` [ROWS, TIME, WIDTH] and `ids` [ROWS, TIME] below WIDTH."""

    def __init__(self, function: Callable[[Any, Tensor, Tensor], Any], **shapes: tuple[int, ...]):
        super().__init__()
        self.function = function
        for number, (name, shape) in enumerate(shapes.items()):
            values = torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64) / 2
            setattr(self, name, nn.Parameter(values))
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        return self.function(self, x, ids)


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, TIME, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "ids": torch.randint(0, WIDTH, (ROWS, TIME), generator=generator)}


def classes(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.w).flatten(0, 1)


def images(m: Any, x: Tensor) -> Tensor:
    """[ROWS, 8, 4, 4] from x and a weight of its width."""
    return (x * m.w).view(ROWS, TIME, 4, 4)


def heads(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of four heads, [ROWS, 4, TIME, 4]."""
    q, k, v = (F.linear(x, w).view(ROWS, TIME, 4, 4).transpose(1, 2) for w in (m.q, m.k, m.v))
    return q, k, v


def written_in_place(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    y = (x * m.w).clone()
    y[:, 0] = m.u
    y[:, 2:4] += x[:, 4:6]
    y.mul_(2.0)
    return y


def rotated(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    """Rotary positions with complex numbers, as Llama's first code."""
    q = torch.view_as_complex(F.linear(x, m.q).view(ROWS, TIME, 4, 2, 2))
    turns = torch.polar(torch.ones(TIME, 1, 2, dtype=x.dtype), torch.arange(TIME * 2.0, dtype=x.dtype).view(TIME, 1, 2))
    return torch.view_as_real(q * turns).flatten(2) @ F.linear(x, m.k).transpose(1, 2)


def quantized(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    """A straight-through estimator."""
    y = F.linear(x, m.w)
    return y + (y.round() - y).detach()


def without_gradient(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    with torch.no_grad():
        teacher = F.linear(x, m.w).softmax(-1)
    return teacher * F.linear(x, m.w)


def flags(m: Any, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    y = F.linear(x, m.w)
    return y.amax(-1), y.argmax(-1), (y > 0).any(1), (y > -9).all(2), y.logsumexp(1), y.amin(0)


SQUARE = {"w": (WIDTH, WIDTH)}
QKV = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH)}

UNARY = (
    *(torch.abs, torch.acos, torch.asin, torch.asinh, torch.atan, torch.atanh, torch.ceil, torch.cos, torch.cosh),
    *(torch.erf, torch.erfc, torch.erfinv, torch.exp2, torch.expm1, torch.floor, torch.frac, torch.lgamma, torch.log1p),
    *(torch.nan_to_num, torch.relu, torch.sign, torch.sgn, torch.sin, torch.sinc, torch.sinh, torch.square, torch.tan),
    *(torch.trunc, torch.deg2rad, torch.zeros_like, torch.ones_like, F.celu, F.elu, F.gelu, F.hardsigmoid, F.hardswish),
    *(F.hardtanh, F.leaky_relu, F.logsigmoid, F.mish, F.relu6, F.selu, F.silu, F.softplus, F.softshrink),
    lambda x: F.threshold(x, 0.1, 0.3),
    lambda x: x.pow(3) - (1 - x) + torch.full_like(x, 2.0) + x.to(torch.float32).to(x.dtype),
)
BINARY = (
    *(torch.atan2, torch.copysign, torch.fmod, torch.hypot, torch.logaddexp, torch.maximum),
    *(torch.minimum, torch.remainder, torch.xlogy, torch.pow),
)
COMPARISONS = (torch.eq, torch.ge, torch.gt, torch.le, torch.lt, torch.ne, torch.logical_and, torch.logical_xor)

OPERATORS: dict[str, Operators] = {
    # losses
    "mean-loss": Operators(lambda m, x, ids: F.cross_entropy(classes(m, x), ids.flatten()), **SQUARE),
    "some-targets": Operators(
        lambda m, x, ids: F.cross_entropy(classes(m, x), ids.masked_fill(ids < 5, -100).flatten()), **SQUARE
    ),
    "loss-by-token": Operators(
        lambda m, x, ids: F.cross_entropy(classes(m, x), ids.flatten(), reduction="none"), **SQUARE
    ),
    "own-ignored": Operators(
        lambda m, x, ids: F.cross_entropy(classes(m, x), ids.flatten(), ignore_index=3, reduction="sum"), **SQUARE
    ),
    "probabilities": Operators(
        lambda m, x, ids: F.cross_entropy(classes(m, x), x.flatten(0, 1).softmax(-1), reduction="sum"), **SQUARE
    ),
    "smoothed": Operators(
        lambda m, x, ids: F.cross_entropy(classes(m, x), ids.flatten(), label_smoothing=0.1), **SQUARE
    ),
    "weighted": Operators(
        lambda m, x, ids: F.cross_entropy(classes(m, x), ids.flatten(), weight=m.u.detach().exp()), **SQUARE, u=(WIDTH,)
    ),
    "loss-of-classes-inside": Operators(
        lambda m, x, ids: F.cross_entropy(F.linear(x, m.w).transpose(1, 2), ids, reduction="sum"), **SQUARE
    ),
    "log-likelihood": Operators(
        lambda m, x, ids: -F.log_softmax(F.linear(x, m.w), -1).gather(-1, ids[..., None]).mean(), **SQUARE
    ),
    "l1": Operators(lambda m, x, ids: F.l1_loss(F.linear(x, m.w), x), **SQUARE),
    "squares": Operators(lambda m, x, ids: F.mse_loss(F.linear(x, m.w), x, reduction="none"), **SQUARE),
    "smooth-l1": Operators(lambda m, x, ids: F.smooth_l1_loss(F.linear(x, m.w), x), **SQUARE),
    # lookups
    "padded-lookup": Operators(lambda m, x, ids: F.embedding(ids, m.w, padding_idx=3), **SQUARE),
    "counted-lookup": Operators(lambda m, x, ids: F.embedding(ids, m.w, scale_grad_by_freq=True), **SQUARE),
    "select": Operators(lambda m, x, ids: F.linear(x, m.w).index_select(1, ids[0] % TIME), **SQUARE),
    "gather": Operators(lambda m, x, ids: F.linear(x, m.w).gather(1, ids[..., None].expand_as(x) % TIME), **SQUARE),
    "index": Operators(lambda m, x, ids: m.w[ids] + x[:, ids[0] % TIME], **SQUARE),
    # products
    "einsum": Operators(
        lambda m, x, ids: torch.einsum("bti,oi,bto->bt", x, m.w, torch.einsum("bsi,io->bso", x, m.u)),
        **SQUARE,
        u=(WIDTH, WIDTH),
    ),
    "outer": Operators(lambda m, x, ids: torch.einsum("bti,bsi->bts", x @ m.w, x), **SQUARE),
    "broadcast-product": Operators(lambda m, x, ids: (x[:, None] @ m.w) @ x.transpose(1, 2)[None, 0], w=(4, 16, 16)),
    "vector-product": Operators(lambda m, x, ids: x @ m.w, w=(16,)),
    "batched": Operators(lambda m, x, ids: torch.bmm(x * m.w, x.transpose(1, 2)), w=(16,)),
    "matrices": Operators(lambda m, x, ids: torch.mm(torch.addmm(m.u, x[0], m.w), m.w.t()), **SQUARE, u=(16,)),
    # convolutions and images
    "convolution": Operators(
        lambda m, x, ids: F.conv2d(images(m, x), m.c, m.b, padding=1), w=(16,), c=(8, 8, 3, 3), b=(8,)
    ),
    "one-image": Operators(
        lambda m, x, ids: F.conv2d(images(m, x)[0], m.c, m.b, padding=1), w=(16,), c=(8, 8, 3, 3), b=(8,)
    ),
    "groups": Operators(
        lambda m, x, ids: F.conv2d(images(m, x), m.c, m.b, groups=4), w=(16,), c=(16, 2, 3, 3), b=(16,)
    ),
    "volume": Operators(
        lambda m, x, ids: F.conv3d(images(m, x)[:, :, None], m.c, padding=1), w=(16,), c=(4, 8, 3, 3, 3)
    ),
    "same": Operators(lambda m, x, ids: F.conv1d(x, m.c, m.b, padding="same"), c=(8, 8, 3), b=(8,)),
    "transposed": Operators(lambda m, x, ids: F.conv_transpose2d(images(m, x), m.c, stride=2), w=(16,), c=(8, 4, 2, 2)),
    "pools": Operators(
        lambda m, x, ids: F.adaptive_avg_pool2d(F.max_pool2d(images(m, x), 2) + F.avg_pool2d(images(m, x), 2), 1),
        w=(16,),
    ),
    "pool-of-one": Operators(lambda m, x, ids: F.max_pool2d(images(m, x)[0], 3, stride=1, padding=1), w=(16,)),
    "resized": Operators(lambda m, x, ids: F.interpolate(images(m, x), scale_factor=2, mode="bilinear"), w=(16,)),
    "shuffled": Operators(lambda m, x, ids: F.pixel_shuffle(images(m, x), 2), w=(16,)),
    "group-norm": Operators(lambda m, x, ids: F.group_norm(images(m, x), 4, m.a, m.b), w=(16,), a=(8,), b=(8,)),
    "instance-norm": Operators(lambda m, x, ids: F.instance_norm(images(m, x)), w=(16,)),
    # attention
    "causal": Operators(lambda m, x, ids: F.scaled_dot_product_attention(*heads(m, x), is_causal=True), **QKV),
    "full": Operators(lambda m, x, ids: F.scaled_dot_product_attention(*heads(m, x)), **QKV),
    "biased": Operators(
        lambda m, x, ids: F.scaled_dot_product_attention(*heads(m, x), attn_mask=m.bias), **QKV, bias=(4, TIME, TIME)
    ),
    "one-bias": Operators(
        lambda m, x, ids: F.scaled_dot_product_attention(*heads(m, x), attn_mask=m.bias, scale=0.3),
        **QKV,
        bias=(ROWS, 1, 1, TIME),
    ),
    "grouped": Operators(
        lambda m, x, ids: F.scaled_dot_product_attention(
            heads(m, x)[0], heads(m, x)[1][:, :2], heads(m, x)[2][:, :2], enable_gqa=True
        ),
        **QKV,
    ),
    "rotated": Operators(rotated, q=(WIDTH, WIDTH), k=(WIDTH, WIDTH)),
    # shapes
    "unequal-parts": Operators(
        lambda m, x, ids: [p * (i + 1) for i, p in enumerate(F.linear(x, m.w).split([6, 6, 4], -1))][2], **SQUARE
    ),
    "all-unequal-parts": Operators(
        lambda m, x, ids: torch.cat([p.cumsum(-1) for p in F.linear(x, m.w).split([8, 4, 3, 1], -1)], -1), **SQUARE
    ),
    "parts": Operators(lambda m, x, ids: torch.stack([p.tanh() for p in F.linear(x, m.w).chunk(4, -1)], 1), **SQUARE),
    "unbound": Operators(lambda m, x, ids: sum(t * (i + 1) for i, t in enumerate((x * m.w).unbind(1))), w=(16,)),
    "padded": Operators(
        lambda m, x, ids: F.pad(F.linear(x, m.w), (1, 1, 2, 0), value=3.0) + F.pad(x @ m.w, (2, 0, 1, 1)), **SQUARE
    ),
    "reflected": Operators(lambda m, x, ids: F.pad(F.linear(x, m.w), (1, 1), mode="reflect"), **SQUARE),
    "rolled": Operators(lambda m, x, ids: F.linear(x, m.w).roll(3, 1) + F.linear(x, m.w).roll(5), **SQUARE),
    "flipped": Operators(lambda m, x, ids: F.linear(x, m.w).flip(1).tril() + F.linear(x, m.w).triu(2), **SQUARE),
    "repeated": Operators(
        lambda m, x, ids: F.linear(x, m.w).repeat(2, 1, 1, 3) + F.linear(x, m.w).repeat_interleave(3, -1), **SQUARE
    ),
    "flattened": Operators(
        lambda m, x, ids: F.linear(x, m.w).unflatten(-1, (2, 4, 2)).movedim(2, 0).flatten(1, 2).contiguous(), **SQUARE
    ),
    "views": Operators(
        lambda m, x, ids: F.linear(x, m.w).view(ROWS, TIME, 2, 8).permute(2, 0, 1, 3).reshape(8, -1).t(), **SQUARE
    ),
    "bits": Operators(
        lambda m, x, ids: (F.linear(x, m.w) + x.view(torch.int64).remainder(7), x.view(torch.int64)), **SQUARE
    ),
    "squeezed": Operators(lambda m, x, ids: (x[:, :1] * m.w).squeeze(1).unsqueeze(0).expand(3, -1, -1), w=(16,)),
    "in-place": Operators(written_in_place, w=(WIDTH,), u=(WIDTH,)),
    "diagonal": Operators(lambda m, x, ids: torch.diagonal(x @ m.w, dim1=1, dim2=2), **SQUARE),
    # elements and reductions
    "sums-along": Operators(
        lambda m, x, ids: F.linear(x, m.w).cumsum(1) + F.linear(x, m.w).sigmoid().cumprod(2), **SQUARE
    ),
    "means": Operators(
        lambda m, x, ids: (F.linear(x, m.w).mean(), F.linear(x, m.w).mean((0, 2)), F.linear(x, m.w).sum(1, True)),
        **SQUARE,
    ),
    "norms": Operators(
        lambda m, x, ids: F.linear(x, m.w) / F.linear(x, m.w).norm(dim=(1, 2), keepdim=True) + m.w.norm(), **SQUARE
    ),
    "spread": Operators(lambda m, x, ids: (F.linear(x, m.w).var(-1), F.linear(x, m.w).std(1)), **SQUARE),
    "flags": Operators(flags, **SQUARE),
    "largest": Operators(lambda m, x, ids: F.linear(x, m.w).max(-1), **SQUARE),
    "sorted": Operators(lambda m, x, ids: (F.linear(x, m.w).topk(3).values, F.linear(x, m.w).sort(1).values), **SQUARE),
    "chosen": Operators(
        lambda m, x, ids: torch.where(x > 0, F.linear(x, m.w), m.u * 2 - x).masked_fill(ids[..., None] > 9, -1.0),
        **SQUARE,
        u=(WIDTH,),
    ),
    "mixed": Operators(
        lambda m, x, ids: torch.addcmul(x, F.linear(x, m.w), m.u).lerp(x, 0.3).clamp(-1, 1) - 2 / (m.u.exp() + 1),
        **SQUARE,
        u=(WIDTH,),
    ),
    "scaled": Operators(
        lambda m, x, ids: torch.sub(F.linear(x, m.w), F.linear(x, m.u), alpha=2) * m.u.sum() / (m.w.sum() + 40) + 1,
        **SQUARE,
        u=(WIDTH, WIDTH),
    ),
    "norm-weights": Operators(
        lambda m, x, ids: F.rms_norm(F.linear(x, m.w), (WIDTH,), m.u) + F.layer_norm(x, (TIME, WIDTH), m.a),
        **SQUARE,
        u=(WIDTH,),
        a=(TIME, WIDTH),
    ),
    "softmax": Operators(lambda m, x, ids: F.linear(x, m.w).softmax(1) * F.linear(x, m.w).log_softmax(-1), **SQUARE),
    "dropped": Operators(lambda m, x, ids: m.drop(F.linear(x, m.w)) * m.u, **SQUARE, u=(WIDTH,)),
    "number": Operators(lambda m, x, ids: F.linear(x, m.w) * m.w.detach().sum().item(), **SQUARE),
    "without-gradient": Operators(without_gradient, **SQUARE),
    "quantized": Operators(quantized, **SQUARE),
    "unary": Operators(lambda m, x, ids: sum(torch.stack([f(x.sigmoid() * m.w) for f in UNARY])), w=(WIDTH,)),
    "binary": Operators(
        lambda m, x, ids: sum(torch.stack([f(x.exp() * m.w.exp(), m.u.square() + 1) for f in BINARY])),
        w=(WIDTH,),
        u=(TIME, WIDTH),
    ),
    "comparisons": Operators(
        lambda m, x, ids: sum((f(x @ m.w, m.u) * (i + 1) for i, f in enumerate(COMPARISONS)), x * m.u),
        **SQUARE,
        u=(WIDTH,),
    ),
    "scalar": Operators(lambda m, x, ids: F.linear(x, m.w) * m.s + m.s.exp(), **SQUARE, s=()),
}


class Family(nn.Module):
    """Several of them, which is faster to trace."""

    def __init__(self, members: dict[str, Operators]):
        super().__init__()
        self.members = nn.ModuleDict(members)

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        results: list[Tensor] = []
        for member in self.members.values():
            out = member(x, ids)
            results += [out] if isinstance(out, Tensor) else out
        return tuple(results)


def families() -> list[Family]:
    """All of them, in modules of a few."""
    names = list(OPERATORS)
    return [Family({name: OPERATORS[name] for name in names[first : first + 8]}) for first in range(0, len(names), 8)]
