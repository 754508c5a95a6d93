"""Dropout and noise that a model draws in functions, by counters as dropout modules do.

`F.dropout(x, p)` and the dropout of `F.scaled_dot_product_attention` draw from torch's generator, so that their masks
would change with the layout. A layer's calls are counted once (layer_stack.py); each gets an `nn.Dropout` in the
layer's `functional_dropouts`, which rng.attach_stream replaces as it does others, and which the calls then use in
their order. Noise, which routers add to what they see, is drawn by an `rng.RandomDraws` in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from echelon.rng import Dropout, RandomDraws, RandomSite

SITES = "functional_dropouts"
"""attribute of a layer, or of the model for calls outside its layers"""


NOISE = 0.0
"""recorded for a call that draws random numbers, in place of a probability"""
FILLS = (Tensor.uniform_, Tensor.normal_, Tensor.exponential_)
LIKE = {torch.rand_like: Tensor.uniform_, torch.randn_like: Tensor.normal_}


class RecordDropoutCalls(TorchFunctionMode):
    """Records the probability of each call that drops something, and lets it drop nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[float] = []
        """of the layer that runs"""
        self.draws_scalars = False
        """a random number decides what the model does, such as to skip a layer"""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        p, others = dropout_probability(func, args, kwargs or {})
        if p:
            self.calls.append(p)
            return args[0] if func is F.dropout else func(*args, **others)
        if func is torch.rand and tuple(args) in ((), ([],), ((),)):
            self.draws_scalars = True
            return torch.zeros(())
        if func in FILLS or func in LIKE:
            self.calls.append(NOISE)
        return func(*args, **(kwargs or {}))


class CounterDropoutCalls(TorchFunctionMode):
    """Gives each call that drops something the next of a layer's sites, after some that drop nothing."""

    def __init__(self, sites: Iterable[nn.Module], skipped: int = 0) -> None:
        super().__init__()
        self.sites, self.skipped = iter(sites), skipped

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        p, others = dropout_probability(func, args, kwargs or {})
        is_noise = func in FILLS or func in LIKE
        if not p and not is_noise:
            return func(*args, **(kwargs or {}))
        if self.skipped:
            self.skipped -= 1
            return args[0] if func is F.dropout else func(*args, **others)
        site: Any = next(self.sites, None)
        if site is None:
            raise RuntimeError(f"a layer draws random numbers in more calls than when they were counted ({func})")
        if is_noise:
            return _draw(site, func, *args, **others)
        return _drop(site, args[0]) if func is F.dropout else attention_with_dropout(site, *args, **others)


def _drop(site: Dropout, x: Tensor) -> Tensor:
    """Drop values of [rows, tokens, ...], also where a layer has made one dimension of both."""
    return _by_rows(site, x, site)


def _draw(site: RandomDraws, func: Any, x: Tensor, first: float | None = None, second: float | None = None) -> Tensor:
    """Draw what a function of torch draws, by counters."""
    fill = LIKE.get(func, func)
    normal = fill is Tensor.normal_
    values = _by_rows(site, x.detach(), site.normal if normal else site.uniform)
    low, high = (0.0 if first is None else first), (1.0 if second is None else second)
    if fill is Tensor.exponential_:
        values = -torch.log1p(-values) / (1.0 if first is None else first)
    else:
        values = low + values * (high if normal else high - low)
    return values if func in LIKE else x.copy_(values)


def _by_rows(site: RandomSite, x: Tensor, call: Callable[[Tensor], Tensor]) -> Tensor:
    assert site.stream is not None
    rows = len(site.stream.samples) if site.stream.samples is not None else len(x)
    is_flat = len(x) != rows and len(x) % rows == 0
    out = call(x.unflatten(0, (rows, -1)) if is_flat else x)
    return out.flatten(0, 1) if is_flat else out


def dropout_probability(func: Any, args: Any, kwargs: Any) -> tuple[float, dict[str, Any]]:
    """The probability with which a call drops values, 0 if it does not, and its keywords without dropout."""
    if func is F.scaled_dot_product_attention:
        others = {key: value for key, value in kwargs.items() if key != "dropout_p"}
        return float(kwargs.get("dropout_p", 0.0)), others
    if func is F.dropout:
        given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
        return float(given.get("p", 0.5)) if given.get("training", True) else 0.0, {}
    return 0.0, kwargs


def attention_with_dropout(
    dropout: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(q k) v, whose probabilities `dropout` drops."""
    if enable_gqa:
        repeat = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        else:
            scores = scores + attn_mask
    wide = torch.promote_types(scores.dtype, torch.float32)
    out: Tensor = dropout(scores.softmax(-1, dtype=wide).to(value.dtype)) @ value
    return out


def add_sites(module: nn.Module, probabilities: Iterable[float]) -> None:
    """Give a layer a dropout, or a source of noise, for each of its calls."""
    sites = nn.ModuleList(RandomDraws() if p == NOISE else nn.Dropout(p) for p in probabilities)
    if len(sites):
        setattr(module, SITES, sites.train(module.training))


def _is_bound(site: nn.Module) -> bool:
    return isinstance(site, RandomSite) and site.stream is not None


@contextmanager
def counter_dropout(module: nn.Module, skipped: int = 0) -> Iterator[None]:
    """Run a layer's code with the dropouts of its calls, once they draw by counters.

    The first `skipped` calls drop nothing: their values are made anew for code that follows them.
    """
    own: Iterable[nn.Module] | None = getattr(module, "called_dropouts", None)
    sites = list(own if own is not None else getattr(module, SITES, ()))
    with CounterDropoutCalls(sites[skipped:], skipped) if any(map(_is_bound, sites)) else nullcontext():
        yield
