"""Every kernel against the plain torch beside it, on random input of awkward sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICE, ON_GPU
from torch import Tensor

from echelon.kernels import dispatch, tensor_metadata
from echelon.kernels.attention import rope
from echelon.kernels.gemm import fused_linear
from echelon.kernels.layers import cross_entropy, gelu, residual_norm, swiglu
from echelon.kernels.memory_limits import LOSS_CHUNK_BYTES
from echelon.models.layers import Linear, can_fuse_gemm

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, as a GPU's is silent
EPS = 1e-5
BOUND = 1e-5 if ON_GPU else 2e-6
"""of float32; a GPU adds in another order, and its exp is not the nearest float"""
SHAPES = [(1, 16), (3, 37), (5, 64), (2, 3, 96)]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels wherever they take the tensor but for its device."""
    monkeypatch.setattr(dispatch, "use_triton", lambda x: dispatch._enabled and x.dtype in dispatch.DTYPES)


def close(found: Tensor, wanted: Tensor, bound: float = BOUND) -> None:
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    found, wanted = found.detach(), wanted.detach()
    error = (found.double() - wanted.double()).abs().max() / max(1.0, float(wanted.double().abs().max()))
    assert float(error) <= bound, float(error)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_()


def of_both(call, *inputs: Tensor) -> list[list[Tensor]]:  # type: ignore[no-untyped-def]
    """[outputs and gradients] by the kernels and by plain torch, for the same random gradients of the outputs."""
    results = []
    for only_plain in (False, True):
        with dispatch.plain_torch(only_plain):
            given = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
            out = call(*given)
            outputs = [x for x in (out if isinstance(out, tuple) else (out,)) if x.requires_grad]
            torch.manual_seed(1)
            upstream = [torch.randn(x.shape, device=DEVICE).to(x.dtype) for x in outputs]
            wanted = [x for x in given if x.requires_grad]
            results.append([*outputs, *torch.autograd.grad(outputs, wanted, upstream)])
    return results


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_delta", [False, True])
def test_norm(shape: tuple[int, ...], with_delta: bool) -> None:
    torch.manual_seed(0)
    x, delta, weight = leaf(*shape), leaf(*shape), leaf(shape[-1])
    inputs = (x, delta, weight) if with_delta else (x, weight)

    def call(x: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        return residual_norm.residual_rms_norm(x, rest[0] if with_delta else None, rest[-1], EPS)

    for found, wanted in zip(*of_both(call, *inputs), strict=True):
        close(found, wanted)


@pytest.mark.usefixtures("kernels")
def test_norm_in_16_bits() -> None:
    # The interpreter cuts off where a GPU rounds, so only to a unit in the last place.
    torch.manual_seed(0)
    x, delta, weight = (leaf(*shape, dtype=torch.bfloat16) for shape in ((7, 48), (7, 48), (48,)))
    found, wanted = of_both(lambda *a: residual_norm.residual_rms_norm(*a, EPS), x, delta, weight)
    for a, b, bound in zip(found, wanted, (1e-2, 2e-2, 2e-2, 2e-2, 2e-2), strict=True):
        close(a, b, bound)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("remake", [False, True])
def test_norm_attaches_metadata(remake: bool) -> None:
    _, normed = residual_norm.residual_rms_norm(leaf(5, 40), leaf(5, 40), leaf(40), EPS, recompute=remake)
    known = tensor_metadata.read(normed)
    assert known.row_amax is not None
    close(known.row_amax, normed.detach().abs().amax(-1))
    assert (known.recompute is not None) == remake
    if known.recompute is not None:
        close(known.recompute(None), normed.detach())


@pytest.mark.usefixtures("kernels")
def test_an_unused_residual_output_has_no_gradient() -> None:
    x, weight = leaf(3, 32), leaf(32)
    with dispatch.plain_torch(False):
        _, normed = residual_norm.residual_rms_norm(x, None, weight, EPS)
    (found,) = torch.autograd.grad(normed.sum(), (x,))
    (wanted,) = torch.autograd.grad(F.rms_norm(x, (32,), weight, EPS).sum(), (x,))
    close(found, wanted)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_delta", [False, True])
def test_layer_norm(shape: tuple[int, ...], with_delta: bool) -> None:
    torch.manual_seed(0)
    x, delta, weight, bias = leaf(*shape), leaf(*shape), leaf(shape[-1]), leaf(shape[-1])
    inputs = (x + 3.0, delta, weight, bias) if with_delta else (x + 3.0, weight, bias)

    def call(x: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        return residual_norm.residual_layer_norm(x, rest[0] if with_delta else None, *rest[-2:], EPS)

    for found, wanted in zip(*of_both(call, *inputs), strict=True):
        close(found, wanted)


@pytest.mark.usefixtures("kernels")
def test_a_recomputed_layer_norm() -> None:
    torch.manual_seed(0)
    given = (leaf(5, 40), leaf(5, 40), leaf(40), leaf(40))
    _, normed = residual_norm.residual_layer_norm(*given, EPS, recompute=True)
    known = tensor_metadata.read(normed)
    assert known.row_amax is not None
    assert known.recompute is not None
    close(known.row_amax, normed.detach().abs().amax(-1))
    close(known.recompute(None), normed.detach())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", [(1, 32), (3, 74), (2, 2, 4200)])
def test_gelu(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.cat([leaf(*shape), leaf(*shape) * 60.0], dim=-2)  # its tails too
    for found, wanted in zip(*of_both(gelu.gelu, x), strict=True):
        assert found.isfinite().all()
        close(found, wanted)
    out = gelu.gelu(x, recompute=True)
    known = tensor_metadata.read(out)
    assert known.row_amax is not None
    assert known.recompute is not None
    close(known.row_amax, out.detach().abs().amax(-1).flatten())
    close(known.recompute(None), out.detach())


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("with_sums", [True, False])
def test_gradients_of_biases_are_sums_that_a_kernel_knows(with_sums: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """GELU and LayerNorm sum their gradients over tokens by the way."""
    torch.manual_seed(0)
    x, read, sums = leaf(6, 16), tensor_metadata.read, list[Tensor | None]()

    def reading(tensor: Tensor) -> tensor_metadata.TensorMetadata:
        sums.append(read(tensor).column_sums)
        return read(tensor) if with_sums else tensor_metadata.EMPTY

    def call(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, *norm: Tensor) -> object:
        hidden = gelu.gelu(fused_linear.fused_linear(x, [up], [up_bias]))
        delta = fused_linear.fused_linear(hidden, [down], [down_bias])
        return residual_norm.residual_layer_norm(x, delta, *norm, EPS)

    monkeypatch.setattr(tensor_metadata, "read", reading)
    given = (leaf(32, 16), leaf(32), leaf(16, 32), leaf(16), leaf(16), leaf(16))
    for found, wanted in zip(*of_both(call, x, *given), strict=True):
        close(found, wanted)
    assert sum(one is not None for one in sums) == 2


@pytest.mark.parametrize("vocab", [61, 64, 65])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_vocabulary_of_an_odd_size_is_padded_inside(vocab: int, with_bias: bool) -> None:
    """The loss and its gradients are those of the vocabulary; GEMMs see rows that are multiples of 128 bytes."""
    torch.manual_seed(0)
    x, weight = leaf(10, 16, dtype=torch.float64), leaf(vocab, 16, dtype=torch.float64)
    bias = leaf(vocab, dtype=torch.float64) if with_bias else None
    targets, seen = torch.randint(0, vocab, (10,), device=DEVICE), []

    def losses(logits: Tensor, targets: Tensor) -> Tensor:
        seen.append((logits.shape[1], logits.stride(0)))
        return F.cross_entropy(logits, targets, reduction="none")

    total = cross_entropy.chunked_linear_loss(x, weight, bias, targets, losses, chunk_tokens=4)
    wanted = F.cross_entropy(F.linear(x, weight, bias), targets, reduction="sum")
    given = [x, weight, *([] if bias is None else [bias])]
    for one, other in zip(torch.autograd.grad(total, given), torch.autograd.grad(wanted, given), strict=True):
        close(one, other, 1e-13)
    close(total, wanted, 1e-13)
    assert set(seen) == {(vocab, -(-vocab // 64) * 64)}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", [(1, 32), (3, 74), (2, 2, 4200)])
def test_swiglu(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    for found, wanted in zip(*of_both(swiglu.swiglu, leaf(*shape)), strict=True):
        close(found, wanted)


@pytest.mark.usefixtures("kernels")
def test_recomputing_swiglu_computes_its_backward() -> None:
    torch.manual_seed(0)
    both, gradient = leaf(3, 74), torch.randn(3, 37, device=DEVICE)
    out = swiglu.swiglu(both, recompute=True)
    again = tensor_metadata.read(out).recompute
    assert again is not None
    close(again(None), out)
    assert tensor_metadata.read(gradient).input_gradient is None
    close(again(gradient), out)
    behind = tensor_metadata.read(gradient).input_gradient
    assert behind is not None
    (wanted,) = torch.autograd.grad(F.silu(both[:, :37]) * both[:, 37:], both, gradient)
    close(behind, wanted)
    (found,) = torch.autograd.grad(out, both, gradient)
    assert found is behind
    gradient.add_(1.0)  # another gradient came on top: what was noted is not true any more
    assert tensor_metadata.read(gradient).input_gradient is None


@pytest.mark.usefixtures("kernels")
def test_swiglu_of_large_values_is_finite() -> None:
    both = (torch.tensor([[-200.0, 200.0, 0.0, -88.0] * 8], device=DEVICE) * 3).requires_grad_()
    for found, wanted in zip(*of_both(swiglu.swiglu, both), strict=True):
        assert found.isfinite().all()
        close(found, wanted)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (3, 1, 8), (2, 2, 64), (5, 5, 6)])
@pytest.mark.parametrize("rows", [1, 3])
def test_split_and_rotate_qkv(heads: int, kv_heads: int, head_dim: int, rows: int) -> None:
    torch.manual_seed(0)
    qkv = leaf(3, 7, (heads + 2 * kv_heads) * head_dim)
    angle = torch.randn(rows, 7, head_dim // 2, device=DEVICE)

    def call(qkv: Tensor) -> tuple[Tensor, ...]:
        # As in the model: what is rotated was made by an operator, and is used up.
        return rope.split_and_rotate_qkv(qkv * 1.0, (angle.cos(), angle.sin()), heads, kv_heads)

    for found, wanted in zip(*of_both(call, qkv), strict=True):
        close(found, wanted)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("rows", [256, 4, 7])
@pytest.mark.parametrize("targets", ["all", "some", "none"])
def test_linear_cross_entropy(rows: int, targets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "tokens_per_chunk", lambda *_: rows)
    torch.manual_seed(0)
    x, weight = leaf(3, 5, 24), leaf(301, 24)
    wanted_tokens = torch.randint(0, 301, (3, 5), device=DEVICE)
    if targets != "all":
        wanted_tokens[torch.rand(3, 5, device=DEVICE) < (0.5 if targets == "some" else 2)] = cross_entropy.IGNORE_INDEX
    for found, wanted in zip(
        *of_both(lambda x, w: cross_entropy.linear_cross_entropy(x, w, wanted_tokens), x, weight), strict=True
    ):
        close(found, wanted)


@pytest.mark.usefixtures("kernels")
def test_linear_cross_entropy_of_large_logits_without_gradient() -> None:
    logits = torch.tensor([[1e4, -1e4, 3.0, 0.0], [-1e30, -1e30, -1e30, -1e30]], device=DEVICE).repeat(1, 9)
    weight = torch.eye(36, device=DEVICE)
    tokens = torch.tensor([0, 3], device=DEVICE)
    with torch.no_grad():
        close(
            cross_entropy.linear_cross_entropy(logits, weight, tokens), cross_entropy.cross_entropy_sum(logits, tokens)
        )


def test_loss_chunks_are_powers_of_two_that_fit() -> None:
    for vocabulary in (257, 32_000, 128_256, 1_000_000_000):
        rows = cross_entropy.tokens_per_chunk(vocabulary, 2)
        assert rows & (rows - 1) == 0
        assert rows == 256 or rows * vocabulary * 2 <= LOSS_CHUNK_BYTES < rows * 2 * vocabulary * 2


@pytest.mark.usefixtures("kernels")
def test_consecutive_weights_are_one_gemm() -> None:
    torch.manual_seed(0)
    buffer = torch.randn(12 * 5 + 7, device=DEVICE)
    parts = [Linear(5, n, bias=False) for n in (4, 6, 2)]
    offset = 0
    for part in parts:
        part.weight = torch.nn.Parameter(buffer[offset : offset + part.weight.numel()].view_as(part.weight))
        offset += part.weight.numel()
    x = leaf(3, 4, 5)
    assert can_fuse_gemm(x, *parts)
    weights = [part.weight for part in parts]
    out = fused_linear.project(x, *parts)
    wanted = torch.cat([F.linear(x, w) for w in weights], dim=-1)
    upstream = torch.randn_like(wanted)
    found_grads = torch.autograd.grad(out, [x, *weights], upstream)
    wanted_grads = torch.autograd.grad(wanted, [x, *weights], upstream)
    for found, right in zip((out, *found_grads), (wanted, *wanted_grads), strict=True):
        close(found, right)
    assert not can_fuse_gemm(x, parts[1], parts[0])
    assert fused_linear.concat_view([parts[0].weight, torch.randn(3, 5, device=DEVICE)]) is None


# -- what a caller may do ---------------------------------------------------------------------------------------------


class Joined(torch.nn.Module):
    """Two linear layers whose weights lie side by side."""

    def __init__(self) -> None:
        super().__init__()
        buffer = torch.randn(2 * 6 * 16, device=DEVICE)
        self.a, self.b = Linear(16, 6, bias=False), Linear(16, 6, bias=False)
        self.a.weight, self.b.weight = (torch.nn.Parameter(part.view(6, 16)) for part in buffer.chunk(2))


@pytest.mark.usefixtures("kernels")
def test_layers_with_hooks_are_not_fused() -> None:
    x, pair = leaf(3, 16), Joined()
    assert can_fuse_gemm(x, pair.a, pair.b)
    handle = pair.b.register_forward_hook(lambda *_: None)
    assert not can_fuse_gemm(x, pair.a, pair.b)
    handle.remove()
    assert can_fuse_gemm(x, pair.a, pair.b)

    class Adapter(torch.nn.Module):
        def __init__(self, base: Linear) -> None:
            super().__init__()
            self.base, self.bias = base, None

        @property
        def weight(self) -> Tensor:
            return self.base.weight

    assert not can_fuse_gemm(x, pair.a, Adapter(pair.b))


@pytest.mark.usefixtures("kernels")
def test_neighbouring_storages_are_not_fused() -> None:
    memory = bytearray(2 * 6 * 16 * 4)
    first, second = (torch.frombuffer(memory, dtype=torch.float32, count=96, offset=at).view(6, 16) for at in (0, 384))
    assert second.data_ptr() == first.data_ptr() + 384
    assert fused_linear.concat_view([first, second]) is None


@pytest.mark.usefixtures("kernels")
def test_targets_and_weights_that_are_views() -> None:
    torch.manual_seed(0)
    x, wide = leaf(6, 24), torch.randint(0, 301, (12, 2), device=DEVICE)
    for targets in (wide[::2, 0], wide[:6, 1]):
        for weight in (leaf(301, 24), leaf(24, 301).t()):
            close(
                cross_entropy.linear_cross_entropy(x, weight, targets),
                cross_entropy.cross_entropy_sum(F.linear(x, weight), targets),
            )


@pytest.mark.usefixtures("kernels")
def test_a_target_outside_the_vocabulary_gives_nan() -> None:
    for target in (-1, 301):
        assert cross_entropy.linear_cross_entropy(
            leaf(2, 24), leaf(301, 24), torch.tensor([3, target], device=DEVICE)
        ).isnan()


@pytest.mark.usefixtures("kernels")
def test_leading_logits_of_minus_infinity() -> None:
    x = torch.ones(1, 16, device=DEVICE)
    weight = torch.full((20_000, 16), float("-inf"), device=DEVICE)
    weight[15_000:] = 0.0
    found = cross_entropy.linear_cross_entropy(x, weight, torch.tensor([15_003], device=DEVICE))
    close(found, torch.tensor(5000.0, device=DEVICE).log())


@pytest.mark.usefixtures("kernels")
def test_without_gradients_no_gradient_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    real = cross_entropy.chunked_cross_entropy
    monkeypatch.setattr(
        cross_entropy,
        "chunked_cross_entropy",
        lambda *a, backward, **n: asked.append(backward) or real(*a, backward=backward, **n),
    )
    x, weight, targets = leaf(4, 24), leaf(301, 24), torch.tensor([1, 2, 3, 4], device=DEVICE)
    with torch.no_grad():
        alone = cross_entropy.linear_cross_entropy(x, weight, targets)
    both = cross_entropy.linear_cross_entropy(x, weight, targets)
    assert asked == [False, True]
    assert torch.equal(alone, both.detach())


@pytest.mark.usefixtures("kernels")
def test_backward_twice() -> None:
    x, layer = leaf(3, 16), Linear(16, 6, bias=False).to(DEVICE)
    y = fused_linear.project(x, layer)
    first = torch.autograd.grad(y.sum(), layer.weight, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y.sum(), layer.weight, retain_graph=True)[0])
    with pytest.raises(RuntimeError):  # second derivatives are refused, not left out
        torch.autograd.grad(torch.autograd.grad(y.square().sum(), x, create_graph=True)[0].sum(), x)
    _, normed = residual_norm.residual_rms_norm(x, None, leaf(16), EPS, recompute=True)
    y = fused_linear.project(normed, layer)
    torch.autograd.grad(y.sum(), layer.weight, retain_graph=True)
    with pytest.raises(RuntimeError, match="recompute=none"):
        torch.autograd.grad(y.sum(), layer.weight)


def test_autocast_is_left_to_torch() -> None:
    x, layer = leaf(3, 16), Linear(16, 6, bias=False).to(DEVICE)
    _, normed = residual_norm.residual_rms_norm(x, None, leaf(16), EPS, recompute=True)
    with torch.autocast(DEVICE.type, dtype=torch.float16):
        assert dispatch.autocast_enabled(x)
        y = fused_linear.project(normed, layer)
    assert y.dtype == torch.float16
    y.float().sum().backward()


@pytest.mark.usefixtures("kernels")
def test_a_delta_of_another_shape_or_dtype_uses_torch() -> None:
    x, weight = leaf(3, 32), leaf(32)
    for delta in (leaf(1, 32), leaf(3, 32).double()):
        s, _ = residual_norm.residual_rms_norm(
            x, delta.detach(), weight if delta.dtype == x.dtype else weight.double(), EPS
        )
        assert torch.equal(s.detach(), (x + delta).detach())
