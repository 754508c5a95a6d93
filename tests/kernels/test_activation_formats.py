"""Kernels of compression against the plain torch beside them, in Triton's interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch
from devices import DEVICE, ON_GPU
from torch import Tensor

from echelon.kernels.activations import bitmask, blockwise_cast, max_pool, sparse_values
from echelon.kernels.activations.blockwise_cast import FORMATS
from echelon.kernels.activations.max_pool import PoolWindow
from echelon.kernels.tensor_spec import TensorSpec, as_rows, is_dense_by_sample, split_row
from echelon.memory.compression.saved_tensor_compression import compressed

pytest.importorskip("triton")
SHAPES = [(1, 5), (3, 16), (2, 2100), (4, 300), (2, 4096)]


def rectified(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(shape, device=DEVICE).to(dtype)
    return x, torch.relu(x)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_relu_writes_its_bitmask(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from echelon.kernels.activations import bitmask_triton

    x, truth = rectified(shape, dtype)
    y = torch.empty_like(x)
    found, counts = bitmask_triton.relu(x, y)
    assert torch.equal(y, truth)
    assert torch.equal(found, bitmask.pack_plain(truth > 0))
    assert counts.shape == (shape[0] * split_row(shape[1]).num_blocks,)
    in_blocks = [int((part > 0).sum()) for row in truth for part in row.split(256)]
    assert counts.flatten().tolist() == in_blocks
    gradient, out = torch.randn(shape, device=DEVICE).to(dtype), torch.full(shape, 7.0, dtype=dtype, device=DEVICE)
    bitmask_triton.mask_gradient(gradient, found, out)
    assert torch.equal(out, torch.where(truth > 0, gradient, 0))
    bitmask_triton.relu(x, x)
    assert torch.equal(x, truth)


@pytest.mark.parametrize("shape", SHAPES)
def test_boolean_masks_round_trip(shape: tuple[int, int]) -> None:
    from echelon.kernels.activations import bitmask_triton

    flags = torch.randn(shape, device=DEVICE) > 0.3
    packed, out = bitmask_triton.pack(flags), torch.empty(shape, dtype=torch.bool, device=DEVICE)
    assert torch.equal(packed, bitmask.pack_plain(flags))
    assert torch.equal(bitmask.unpack_plain(packed, shape[1]), flags)
    bitmask_triton.unpack(packed, out)
    assert torch.equal(out, flags)


def test_relu_passes_nan() -> None:
    from echelon.kernels.activations import bitmask_triton

    x = torch.tensor([[1.0, -1.0, float("nan"), 0.0, -0.0, float("inf"), -float("inf"), 2.0]], device=DEVICE)
    y = torch.empty_like(x)
    found, _ = bitmask_triton.relu(x, y)
    assert bitmask.unpack_plain(found, 8).tolist() == [[True, False, True, False, False, True, False, True]]
    assert torch.equal(y.nan_to_num(9.0), torch.relu(x).nan_to_num(9.0))
    again = bitmask.relu_with_bitmask(x)
    assert torch.equal(again[1], found)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["", "fp16", "fp8", "int8"])
def test_sparse_values_round_trip(shape: tuple[int, int], kind: str) -> None:
    from echelon.kernels.activations import bitmask_triton, sparse_values_triton

    chosen = FORMATS.get(kind)
    y = codable(rectified(shape)[1], kind)
    packed, counts = bitmask_triton.relu(y, torch.empty_like(y))
    none = torch.empty(0, device=DEVICE)
    count, plain_count = (
        sparse_values.count_nonzero(packed, counts, shape[1]),
        sparse_values.count_nonzero(packed, none, shape[1]),
    )
    assert count.wait() == plain_count.wait() == int((y > 0).sum())
    found = sparse_values_triton.compact(y, packed, count.wait(), count.block_ends, chosen)
    plain = sparse_values.compact(y, packed, plain_count.wait(), plain_count.block_ends, chosen)
    assert found.values.dtype == plain.values.dtype
    # The same values, in another order inside each block.
    ends = [0, *count.block_ends.tolist()]
    for start, end in itertools.pairwise(ends):
        assert same_codes(*(of.values[start:end].float().sort().values for of in (found, plain)))
    assert torch.allclose(found.scales, plain.scales, rtol=1e-6)
    out, truth = torch.empty_like(y), torch.empty_like(y)
    sparse_values_triton.expand(found, packed, chosen, out)
    sparse_values.expand(plain, packed, chosen, truth)
    step = float(plain.scales.max()) if ON_GPU and kind == "int8" else 1e-8
    assert torch.allclose(out, truth, rtol=1e-6, atol=step)
    if not kind:
        assert torch.equal(out, y)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["fp16", "fp8", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blockwise_cast(shape: tuple[int, int], kind: str, dtype: torch.dtype) -> None:
    from echelon.kernels.activations import blockwise_cast_triton

    chosen = FORMATS[kind]
    x = codable(rectified(shape, dtype)[0], kind)
    codes, scales = blockwise_cast_triton.encode(x, chosen)
    plain_codes, plain_scales = blockwise_cast.encode_plain(x, chosen)
    assert same_codes(codes, plain_codes)
    assert torch.allclose(scales, plain_scales, rtol=1e-6)
    out = torch.empty_like(x)
    blockwise_cast_triton.decode(codes, scales, chosen, out)
    assert torch.allclose(out, blockwise_cast.decode_plain(codes, scales, chosen).to(dtype), rtol=1e-2)


def same_codes(found: Tensor, wanted: Tensor) -> bool:
    """A GPU's fast division may bring a value to the other side of a tie between two codes, and no further.

    Values in 16 bits are few, so that one such value comes again and again.
    """
    if not ON_GPU or not found.numel():
        return torch.equal(found.float(), wanted.float())
    apart = (found.float() - wanted.float()).abs()
    return float(apart.max()) <= 1 and int((apart > 0).sum()) <= 1 + found.numel() // 20


def codable(x: Tensor, kind: str) -> Tensor:
    """Values that 8 bits hold exactly: Triton's interpreter does not round to 8 bits as a GPU does."""
    if kind != "fp8":
        return x
    whole = (x * 8).round().clamp(-16, 16)
    whole[:, ::5] = 448.0  # so that every block's scale is 1
    return whole


@pytest.mark.parametrize(("kind", "bound"), [("fp16", 2**-11), ("fp8", 2**-4), ("int8", 1 / 254)])
def test_blockwise_cast_error_is_bounded(kind: str, bound: float) -> None:
    """Of the value itself; in fp8 or a step of its block's smallest; in int8 of its block's largest."""
    x = torch.randn(8, 1000, device=DEVICE) * torch.logspace(-3, 3, 8, device=DEVICE).unsqueeze(-1)
    chosen = FORMATS[kind]
    error = (blockwise_cast.decode_plain(*blockwise_cast.encode_plain(x, chosen), chosen).float() - x).abs()
    padded = torch.nn.functional.pad(x, (0, 24)).view(8, -1, 256).abs().amax(-1, keepdim=True)
    largest = padded.expand(-1, -1, 256).flatten(1)[:, :1000]
    allowed = {"fp16": x.abs() * bound, "fp8": x.abs() * bound + largest / 448 * 2**-10, "int8": largest * bound}[kind]
    assert bool((error <= allowed * 1.0001 + 2**-25).all())


@pytest.mark.parametrize("kind", list(FORMATS))
def test_blockwise_cast_keeps_zeros_and_nan(kind: str) -> None:
    from echelon.kernels.activations import blockwise_cast_triton

    chosen = FORMATS[kind]
    x = torch.zeros(2, 300, device=DEVICE)
    assert not blockwise_cast.decode_plain(*blockwise_cast.encode_plain(x, chosen), chosen).any()
    x[1, 3] = float("nan")
    encoders = [blockwise_cast.encode_plain]
    if ON_GPU or kind != "fp8":  # of which Triton's interpreter makes a number
        encoders.append(blockwise_cast_triton.encode)
    for encode in encoders:
        out = blockwise_cast.decode_plain(*encode(x, chosen), chosen)
        assert bool(out[1, 3].isnan())
        assert not out[0].isnan().any()
    huge = torch.full((1, 16), 1e30, device=DEVICE)
    assert bool(blockwise_cast.decode_plain(*blockwise_cast.encode_plain(huge, chosen), chosen).isfinite().all())


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"), [((2, 2), (2, 2), (0, 0), (1, 1)), ((3, 2), (2, 1), (1, 1), (1, 2))]
)
def test_max_pool_indices_round_trip(
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    spread: bool,
) -> None:
    from echelon.kernels.activations import max_pool_triton

    x = torch.randn(2, 3, 9, 11, device=DEVICE).contiguous(
        memory_format=torch.channels_last if spread else torch.contiguous_format
    )
    _, indices = torch.nn.functional.max_pool2d(x, kernel, stride, padding, dilation, return_indices=True)
    window = PoolWindow(width=11, kernel=kernel, stride=stride, padding=padding, dilation=dilation)
    codes = max_pool.encode(indices, window)
    assert int(codes.max()) < kernel[0] * kernel[1]
    assert torch.equal(max_pool.decode(codes, window), indices)
    found, back = torch.empty_like(codes), torch.empty_like(indices)
    max_pool_triton.encode(indices, window, found)
    max_pool_triton.decode(found, window, back)
    assert torch.equal(found, codes)
    assert torch.equal(back, indices)


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize(("channels", "kernel"), [(16, (2, 2)), (3, (2, 2)), (8, (3, 2))])
def test_max_pool_saves_positions(
    monkeypatch: pytest.MonkeyPatch, channels: int, kernel: tuple[int, int], spread: bool
) -> None:
    monkeypatch.setattr(bitmask, "use_triton", lambda _x: True)
    torch.manual_seed(0)
    lying = torch.channels_last if spread else torch.contiguous_format
    # Few values, so that some are equal in a window; 11 is no multiple of the windows, 12 is.
    x = torch.randint(-2, 3, (2, channels, 12, 11), device=DEVICE).float().contiguous(memory_format=lying)
    x[0, 0, 0, :3] = float("nan")
    x[1, 0, 4:6, 4:6] = -float("inf")
    if ON_GPU and spread:  # there torch sends the gradient of a window of minus infinities outside of it
        x[1, 0, 4, 4] = -1.0
    window = PoolWindow(width=11, kernel=kernel, stride=kernel, padding=(0, 0), dilation=(1, 1))
    assert max_pool.supports(x, window)
    found, gradients = [], []
    for of in (lambda x: max_pool.max_pool(x, window), lambda x: torch.nn.functional.max_pool2d(x, kernel)):
        leaf = x.clone().requires_grad_()
        out = of(leaf)
        weights = torch.arange(out.numel(), device=DEVICE).view(out.shape).float()
        (first,) = torch.autograd.grad((out.nan_to_num() ** 2 * weights).sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum(), leaf)
        found.append(out.detach())
        gradients += [first.detach(), second]
    assert torch.equal(found[0].nan_to_num(9.0), found[1].nan_to_num(9.0))
    assert found[0].stride() == found[1].stride()
    assert torch.equal(gradients[0].nan_to_num(9.0), gradients[2].nan_to_num(9.0))
    assert torch.equal(gradients[1].nan_to_num(9.0), gradients[3].nan_to_num(9.0))


def test_dense_tensors() -> None:
    x = torch.randn(2, 3, 4, 5, device=DEVICE)
    spread = x.contiguous(memory_format=torch.channels_last)
    assert is_dense_by_sample(x)
    assert is_dense_by_sample(spread)
    assert torch.equal(as_rows(spread)[0], spread[0].permute(1, 2, 0).reshape(-1))
    for other in (x.transpose(0, 1), x[:, :2], x[:, :1].expand(2, 3, 4, 5), x[:0]):
        assert not is_dense_by_sample(other)
    assert torch.equal(TensorSpec.from_tensor(spread).match_strides(x), x)
    assert TensorSpec.from_tensor(spread).match_strides(x).stride() == spread.stride()


@pytest.mark.parametrize("compress", ["lossless", "lossless+int8"])
def test_a_network_on_triton_activation_kernels(monkeypatch: pytest.MonkeyPatch, compress: str) -> None:
    """All of compression, with the kernels in the interpreter: exact, or as plain torch rounds."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.ReLU(True), torch.nn.Conv2d(4, 4, 3), torch.nn.ReLU(),
        torch.nn.MaxPool2d(2), torch.nn.Flatten(), torch.nn.Linear(36, 8),
    ).to(DEVICE)  # fmt: skip
    x = torch.randn(2, 3, 8, 8, device=DEVICE)
    found = []
    for ours in (True, False):
        monkeypatch.setattr(bitmask, "use_triton", lambda _x, ours=ours: ours)
        with torch.backends.cudnn.flags(deterministic=True, allow_tf32=False):
            with compressed(compress if ours or compress != "lossless" else "none", least=1):
                total = net(x).square().sum()
            found.append(torch.autograd.grad(total, net.parameters()))
    for mine, plain in zip(*found, strict=True):
        assert torch.equal(mine, plain) if compress == "lossless" else torch.allclose(mine, plain, rtol=1e-3, atol=1e-4)
