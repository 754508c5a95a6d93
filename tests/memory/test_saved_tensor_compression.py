"""Compression of what forward leaves for backward: lossless is exact, lossy as wrong as it says, bytes counted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import echelon as ec
from echelon import models
from echelon.config.run_config import Config
from echelon.memory.compression import cost as compression_cost
from echelon.memory.compression.cost import SavedElements
from echelon.models import model_config
from echelon.models.vision import cnn
from echelon.parallel.parallel_options import ParallelOptions
from echelon.training.engine import Engine


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors: threads would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


LLAMA = replace(model_config.find_model("llama-tiny"), layers=2, dropout=0.1)
LOSSY = {"lossless+fp16": 1e-3, "lossless+fp8": 6e-2, "lossless+int8": 2e-2}
"""bounds of the gradient's error, relative to its norm: docs/compression.md"""


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm, self.relu = nn.BatchNorm2d(channels), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(x + self.second(self.relu(self.norm(self.first(x)))))
        return out


class Calls(nn.Module):
    """Functions in place of modules, views, and a tensor that several read."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.left, self.right = nn.Conv2d(3, 8, 3), nn.Linear(392, 32), nn.Linear(392, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv(x).relu(), 2, return_indices=False)
        flat = torch.relu(x - 0.3).flatten(1)
        return (self.left(flat) * self.right(flat)).relu_().square()


def conv(channels_in: int, channels_out: int) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, 3, padding=1)


NETS: dict[str, Callable[[], nn.Module]] = {
    "conv-relu-pool": lambda: nn.Sequential(conv(3, 8), nn.ReLU(), nn.MaxPool2d(2), conv(8, 4), nn.ReLU(True)),
    "conv-relu-conv": lambda: nn.Sequential(conv(3, 8), nn.ReLU(True), conv(8, 8), nn.ReLU(), conv(8, 4)),
    "other poolings": lambda: nn.Sequential(
        conv(3, 8), nn.ReLU(True), nn.MaxPool2d(3, 2, 1, ceil_mode=True), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(3)
    ),
    "residual": lambda: nn.Sequential(conv(3, 8), Residual(8), nn.AvgPool2d(2), Residual(8)),
    "dropout": lambda: nn.Sequential(
        conv(3, 8), nn.ReLU(True), nn.Dropout(0.3), nn.Flatten(), nn.Linear(2048, 64), nn.ReLU(), nn.Dropout()
    ),
    "calls": Calls,
    "vgg": lambda: nn.Sequential(cnn.vgg16(10, 32, 1 / 16).features, nn.Flatten(), nn.Linear(32, 10)),
    "resnet": lambda: nn.Sequential(cnn.resnet50(10, 1 / 16).features, nn.Flatten(), nn.Linear(128, 10)),
}


def gradients(net: nn.Module, x: Tensor, compress: str, least: int = 1) -> tuple[list[Tensor], int]:
    """Of a copy of the network, and the bytes kept between forward and backward."""
    net, x = copy.deepcopy(net), x.clone().requires_grad_()
    torch.manual_seed(1)
    with ec.compressed(compress, least=least) as saving:
        out = net(x).square().sum()
    kept = saving.bytes
    out.backward()
    del out
    assert saving.bytes == 0, "backward lets go of what was kept"
    return [tensor.grad for tensor in (x, *net.parameters()) if tensor.grad is not None], kept


def pictures(name: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(3, 3, 32 if name in ("vgg", "resnet") else 16, 32 if name in ("vgg", "resnet") else 16).to(dtype)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lossless_is_exact_and_smaller(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net = NETS[name]().to(dtype)
    x = pictures(name, dtype)
    truth, plain = gradients(net, x, "none")
    found, kept = gradients(net, x, "lossless")
    assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))
    assert kept < plain


def test_lossless_is_exact_with_channels_last() -> None:
    torch.manual_seed(0)
    net = NETS["vgg"]().to(memory_format=torch.channels_last)
    x = pictures("vgg", torch.float32).contiguous(memory_format=torch.channels_last)
    truth, found = gradients(net, x, "none")[0], gradients(net, x, "lossless")[0]
    assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))


@pytest.mark.parametrize("compress", LOSSY)
@pytest.mark.parametrize("name", ["conv-relu-conv", "residual", "vgg"])
def test_lossy_gradient_errors_are_within_the_documented_bounds(name: str, compress: str) -> None:
    torch.manual_seed(0)
    net = NETS[name]()
    x = pictures(name, torch.float32)
    truth, plain = gradients(net, x, "none")
    found, kept = gradients(net, x, compress)
    assert kept < plain
    error = torch.cat([(a - b).flatten() for a, b in zip(found, truth, strict=True)]).norm()
    assert 0 < error < LOSSY[compress] * torch.cat([b.flatten() for b in truth]).norm()


def test_forward_is_never_rounded() -> None:
    net, x = NETS["residual"](), pictures("", torch.float32)
    with ec.compressed("lossless+int8", least=1):
        assert torch.equal(net(x), net(x).detach())
        inside = net.eval()(x)
    assert torch.equal(inside, net(x))


def plain_bytes(net: nn.Module, x: Tensor) -> int:
    """Counted with hooks that keep everything as it is."""
    found: dict[int, int] = {}
    parameters = {parameter.data_ptr() for parameter in net.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in parameters:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = net(x)
    assert out.requires_grad
    return sum(found.values())


@pytest.mark.parametrize("compress", compression_cost.COMPRESSIONS)
def test_stored_bytes_equal_the_cost(compress: str) -> None:
    net = nn.Sequential(conv(3, 8), nn.ReLU(True), conv(8, 16), nn.ReLU(True), nn.MaxPool2d(2), conv(16, 4))
    x, each = torch.randn(2, 3, 16, 16), 2 * 16 * 16
    with ec.compressed(compress, least=1) as saving:
        out = net(x)
    assert out.requires_grad
    with torch.no_grad():
        share = float((net[:2](x) > 0).float().mean())
    # The image has no gradient, and stays as it is.
    saved = SavedElements(relu_outputs=8 * each, relu_signs=16 * each, max_pool_outputs=4 * each, values=4 * each)
    expected = (
        compression_cost.compressed_bytes(saved, compress, 4, nonzero_share=share, use_triton=False) + 4 * 3 * each
    )
    assert saving.bytes == pytest.approx(expected, abs=1)
    assert plain_bytes(net, x) == compression_cost.uncompressed_bytes(saved, 4) + 4 * 3 * each


@pytest.mark.parametrize("compress", compression_cost.COMPRESSIONS[1:])
def test_one_relu_output_is_pending_inside_forward_and_none_after_it(compress: str) -> None:
    net = nn.Sequential(*(layer for _ in range(3) for layer in (conv(8, 8), nn.ReLU())))
    x, each = torch.randn(3, 8, 16, 16), 3 * 8 * 16 * 16
    with torch.no_grad():
        shares = [float((net[:number](x) > 0).float().mean()) for number in (2, 4)]
    first, second = (
        compression_cost.compressed_bytes(
            SavedElements(relu_outputs=each), compress, 4, nonzero_share=share, use_triton=False
        )
        for share in shares
    )
    whole = compression_cost.compressed_bytes(SavedElements(pending_relu_outputs=each), compress, 4, use_triton=False)
    assert whole == each * 4 + each / 8
    with ec.compressed(compress, least=1) as saving:
        out = net[:3](x)
        assert saving.bytes == x.nbytes + whole
        out = net[3:5](out)  # ReLU's call is the time to settle what waits; the next convolution's input waits then
        assert saving.bytes == pytest.approx(x.nbytes + first + whole, abs=1)
        out = net[5](out)
        assert saving.bytes == pytest.approx(x.nbytes + first + second + each / 8, abs=1)
        out = conv(8, 4)(out)
    assert out.requires_grad
    third = compression_cost.compressed_bytes(SavedElements(relu_outputs=each), compress, 4, nonzero_share=0.9)
    last = 4 * each // 2 if compress == "lossless" else 0
    assert saving.bytes < x.nbytes + first + second + third + last


def test_backward_inside_forward_reads_pending_outputs() -> None:
    net = NETS["conv-relu-conv"]()
    x = pictures("", torch.float32).requires_grad_()
    found = []
    for compress in ("none", "lossless"):
        with ec.compressed(compress, least=1):
            found.append(torch.autograd.grad(net[:3](x).square().sum(), (x, *net[:3].parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_in_place_change_of_a_pending_output_raises() -> None:
    x = torch.randn(4, 256, requires_grad=True)
    with ec.compressed("lossless"):
        y = (x * 2).relu()
        out = (y * y).sum()
        y.add_(1)  # before anybody knows how many are not zero
        other = (x * 3).relu().square().sum()
    other.backward()
    with pytest.raises(RuntimeError, match=r"modified in place .* use an out-of-place operator"):
        out.backward()


def test_a_tensor_saved_several_times_is_stored_once() -> None:
    x = torch.randn(4, 1000, requires_grad=True)
    wide = x * 2
    first, second, third = (nn.Linear(1000, 8) for _ in range(3))
    with ec.compressed("lossless+int8") as saving:
        out = first(wide) + second(wide.view(4, 1000)) + third(wide.view(2, 2, 1000)).view(4, 8)
    assert out.requires_grad
    assert saving.bytes == 4 * 1000 + 4 * 4 * 4


def test_parameters_inputs_and_small_tensors_are_not_compressed() -> None:
    layer = nn.Linear(256, 256)
    given = torch.randn(8, 256)
    kept: list[Tensor] = []
    with ec.compressed("lossless+fp8") as saving:
        out = layer(given).square()
        for one in saving._saved:
            kept += [tensor for tensor in (getattr(one, "tensor", None),) if tensor is not None]
    storages = {tensor.data_ptr() for tensor in kept}
    assert given.data_ptr() in storages
    assert out.requires_grad
    small = torch.randn(4, 10, requires_grad=True)
    with ec.compressed("lossless+fp8") as saving:
        out = (small * 3).square()
    assert saving.bytes == 160


def test_a_cast_weight_is_not_an_activation() -> None:
    """As torch's autocast makes it."""
    layer, x = nn.Linear(256, 256, bias=False), torch.randn(8, 256, dtype=torch.float64, requires_grad=True)
    with ec.compressed("lossless+fp8") as saving:
        out = F.linear(x * 2, layer.weight.double())
    assert out.requires_grad
    assert saving.bytes == 8 * 256 + 8 * 4


def test_an_in_place_change_raises_or_is_harmless() -> None:
    x = torch.randn(4, 256, requires_grad=True)
    with ec.compressed("lossless"):
        y = x * 2
        out = y.square().sum()
    y.add_(1)
    with pytest.raises(RuntimeError, match=r"modified in place .* use an out-of-place operator"):
        out.backward()
    with ec.compressed("lossless"):
        y = (x * 2).relu()
        out = (y * y).sum()
    expected = torch.where(x > 0, 8 * x, 0).detach()
    y.add_(1)  # what is stored is a copy
    out.backward()
    assert torch.allclose(x.grad, expected)


def test_a_modified_relu_output_is_not_treated_as_one() -> None:
    x = torch.randn(4, 256, requires_grad=True)
    with ec.compressed("lossless") as saving:
        y = (x * 2).relu().add_(1.0)  # with torch's own ReLU an error: its backward would read what was changed
        out = (y * y).sum()
    assert saving.bytes == 4 * 256 * 4 + 4 * 256 // 8
    out.backward()
    assert torch.allclose(x.grad, torch.where(x > 0, 4 * (2 * x + 1), 0))


def test_backward_twice_and_double_backward() -> None:
    x = torch.randn(4, 256, requires_grad=True)
    found = []
    for compress in ("none", "lossless"):
        with ec.compressed(compress):
            out = ((x * 2).relu() ** 3).sum()
            (first,) = torch.autograd.grad(out, x, create_graph=True)
        first.square().sum().backward(retain_graph=True)
        first.square().sum().backward()
        found.append((first.detach(), x.grad))
        x.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Repeats(nn.Module):
    """With a checkpoint of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(conv(3, 8), nn.ReLU(True), nn.MaxPool2d(2))
        self.inner = nn.Sequential(conv(8, 8), nn.ReLU(), conv(8, 8), nn.ReLU(True), nn.MaxPool2d(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, self.first(x), use_reentrant=False)
        return out


def test_nothing_is_compressed_inside_a_checkpoint() -> None:
    net, x = Repeats(), pictures("", torch.float64)
    net = net.double()
    truth, plain = gradients(net, x, "none")
    found, kept = gradients(net, x, "lossless")
    assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))
    assert kept < plain
    assert gradients(net, x, "lossless+fp8")[1] < kept


# -- in a run ---------------------------------------------------------------------------------------------------------


def test_a_transformer_saves_less_and_learns_the_same() -> None:
    losses: dict[str, list[float]] = {}
    tokens = torch.randint(0, LLAMA.vocab, (4, 65), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    kept = {}
    for compress in ("none", "lossless+fp16", "lossless+fp8", "lossless+int8"):
        engine = Engine(models.build(LLAMA, "meta"), "", options=ParallelOptions(compress=compress))
        engine.model.train()
        with ec.compressed(compress) as saving:
            total, _ = engine.model(**engine.prepare(next(engine.microbatches(batch))))
        kept[compress] = saving.bytes
        del total
        losses[compress] = [engine.step(batch).loss for _ in range(8)]
    assert losses["none"][-1] < 0.9 * losses["none"][0]
    for compress, least in (("lossless+fp16", 1.7), ("lossless+fp8", 2.5), ("lossless+int8", 2.5)):
        assert kept["none"] > least * kept[compress]
        assert losses[compress] == pytest.approx(losses["none"], rel=2e-2)


def test_invalid_compression_is_refused_before_a_run() -> None:
    with pytest.raises(ec.ValidationError, match=r'did you mean "lossless\+fp8"'):
        Config.load(None, ["compress=lossles+fp8"])
    with pytest.raises(ec.ValidationError, match="recompute=ops"):
        Config.load(None, ["compress=lossless", "layout=recompute=ops"])
    with pytest.raises(ValueError, match="recompute=ops"):
        Engine(models.build(LLAMA, "meta"), "recompute=ops", options=ParallelOptions(compress="lossless"))
    with pytest.raises(ValueError, match="unknown value"):
        ParallelOptions(compress="gzip")
    with pytest.raises(ValueError, match="unknown compression"), ec.compressed("gzip"):
        pass


def test_compression_in_a_custom_loop() -> None:
    found = []
    for compress in compression_cost.COMPRESSIONS[:2]:
        torch.manual_seed(0)
        model = ec.wrap(nn.Sequential(conv(3, 8), nn.ReLU(), nn.MaxPool2d(2), conv(8, 4)), "", compress=compress)
        model(torch.randn(2, 3, 16, 16)).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
