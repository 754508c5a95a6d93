"""Tracing: what is counted on the meta device is what the closed form says and what a real run does."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from echelon import models
from echelon.layout.validation_error import ValidationError
from echelon.models import SIZES
from echelon.models.attention import AttentionContext
from echelon.models.pipeline_model import PipelineLayer, PipelineModel
from echelon.planning.model import op_counter
from echelon.planning.model.model_shape import COLUMN_PARALLEL, ROW_PARALLEL, ModelShape
from echelon.planning.model.model_sources import config_shape, resolve_shape
from echelon.planning.model.trace_module import trace_module

SEQ = 32
TOKENS = torch.zeros(2, SEQ, dtype=torch.long)
TEXT = {"tokens": TOKENS, "targets": TOKENS}


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def flops(model: nn.Module, inputs: dict[str, Tensor]) -> int:
    """Of a forward pass, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        model(**inputs)
    return counter.get_total_flops()


# -- our own models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "gpt2-124m", "llama-8b"])
def test_our_models_are_what_the_closed_form_says(name: str) -> None:
    found, closed = trace_module(models.build(SIZES[name], "meta"), TEXT), resolve_shape(name)
    assert found.parameters == closed.parameters
    assert found.flops(SEQ) == pytest.approx(closed.flops(SEQ))
    assert found.flops(1024) == pytest.approx(closed.flops(1024))
    assert (found.width, found.vocab, found.tied) == (closed.width, closed.vocab, closed.tied)
    assert found.position_parameters == closed.position_parameters
    ((layer, count),) = found.layers
    ((expected, _),) = closed.layers
    assert count == closed.num_layers
    assert layer.attention == expected.attention
    assert layer.other_parameters == expected.other_parameters
    # The first output of each region's products is divided, and everything up to its last product.
    assert {product.split for product in layer.matmuls} == {COLUMN_PARALLEL, ROW_PARALLEL}
    assert layer.saved_elements == pytest.approx(expected.saved_elements, rel=0.03)
    # Without a kernel, attention saves its output twice: as it comes, and as the output projection reads it. After RoPE
    # heads come before tokens, and that is a copy once more.
    assert layer.attention is not None
    copied = layer.attention.heads * layer.attention.value_dim * (2 if name.startswith("llama") else 1)
    assert layer.saved_elements_tp == pytest.approx(expected.saved_elements_tp + copied, rel=0.2)
    assert layer.moved_elements == pytest.approx(expected.moved_elements, rel=0.03)


def saved_on_cpu(name: str) -> float:
    """Elements per token that a real block keeps for backward."""
    model = models.build(SIZES[name])
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(2, SEQ, SIZES[name].width, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.blocks[0](x, AttentionContext(torch.arange(SEQ)[None]))
    return sum(kept.values()) / 4 / TOKENS.numel()


def test_saved_elements_are_those_of_a_real_run() -> None:
    ((layer, _),) = trace_module(models.build(SIZES["gpt-tiny"], "meta"), TEXT).layers
    assert layer.saved_elements + layer.saved_elements_tp == saved_on_cpu("gpt-tiny")


def test_attention_that_is_written_out() -> None:
    config = replace(SIZES["llama-tiny"], dropout=0.1)
    found = trace_module(models.build(config, "meta"), TEXT)
    attention = found.layers[0][0].attention
    assert attention is not None
    assert (attention.heads, attention.head_dim, attention.causal) == (4, 16, False)
    # It does the whole square, and keeps it.
    assert found.flops(SEQ) - config_shape(config).flops(SEQ) == 4 * attention.flops(SEQ) / 2
    plain = trace_module(models.build(SIZES["llama-tiny"], "meta"), TEXT)
    assert found.layers[0][0].saved_elements_tp > plain.layers[0][0].saved_elements_tp + 2 * 4 * SEQ


def test_the_convolutional_network() -> None:
    config = SIZES["conv-tiny"]
    inputs = {"images": torch.zeros(2, 3, 16, 16), "labels": torch.zeros(2, dtype=torch.long)}
    found = trace_module(models.build(config, "meta"), inputs)
    assert found.parameters == config.parameters
    assert found.train_flops(1) == config.flops_per_token(1)
    assert found.num_layers == 4


# -- other people's modules -------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """With a list inside its layers that is longer than that of its layers, and a norm and biases at its ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.types = nn.Embedding(2, 16)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 3)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 50)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.encoder(self.embed(tokens) + self.types(torch.zeros_like(tokens))))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def test_a_module_of_torch() -> None:
    model = Encoder()
    found = trace_module(model, TEXT)
    assert found.parameters == parameters(model)
    assert found.flops(SEQ) * TOKENS.numel() == flops(model, TEXT)
    assert (found.vocab, found.width, found.tied, found.num_layers) == (50, 16, False, 3)
    assert found.other_parameters == 2 * 16 + 50 + 2 * 16
    ((layer, _),) = found.layers
    assert layer.name == "TransformerEncoderLayer"
    assert layer.attention is not None
    assert (layer.attention.heads, layer.attention.causal) == (2, False)


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor of every trace stayed for good: what was saved held the graph that held it."""
    saved: list[StorageWeakRef] = []
    pack = op_counter.OpCounter._pack_saved

    def noted(self: op_counter.OpCounter, tensor: Tensor) -> None:
        saved.append(StorageWeakRef(tensor.untyped_storage()))
        return pack(self, tensor)

    monkeypatch.setattr(op_counter.OpCounter, "_pack_saved", noted)
    trace_module(models.build(SIZES["gpt-tiny"], "meta"), TEXT)
    gc.collect()  # modules and their hooks
    assert len(saved) > 50
    assert all(ref.expired() for ref in saved)


def test_nothing_is_changed() -> None:
    model = Encoder().eval()
    before = dict(model.named_parameters())
    trace_module(model, TEXT)
    assert not model.training
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert TOKENS.device.type == "cpu"
    assert not model.encoder.layers[0]._forward_hooks


class Mixer(nn.Module):
    """Products before and after the layers, one matrix in all layers, experts, and a product without weights."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        shared = nn.Linear(8, 8, bias=False)
        self.start = nn.Linear(5, 8)
        self.layers = nn.ModuleList(Mixed(shared) for _ in range(layers))
        self.end = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        x = self.start(x)
        for layer in self.layers:
            x = layer(x)
        return self.end(x).sum(), x.shape[0]


class Mixed(nn.Module):
    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.shared = shared
        self.experts = nn.Parameter(torch.zeros(4, 8, 8))
        self.gates = nn.ModuleList(nn.Linear(8, 1, bias=False) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.shared(x).flatten(0, 1)
        gate = sum(gate(tokens) for gate in self.gates)
        y = torch.bmm(tokens.expand(4, *tokens.shape), self.experts).mean(0) * gate
        return x + y.view_as(x) + torch.bmm(x @ x.transpose(1, 2), x).tanh()


def test_shared_matrices_experts_and_the_ends() -> None:
    model, inputs = Mixer(), {"x": torch.randn(2, 6, 5)}
    found = trace_module(model, inputs)
    assert found.parameters == parameters(model)
    assert found.flops(6) * 12 == flops(model, inputs)
    assert (found.vocab, found.width, found.experts, found.top_k) == (0, 8, 4, 4)
    names = [layer.name for layer in found.iter_layers()]
    assert names == ["before", "Mixed", "Mixed", "Mixed", "after"]
    layers = list(found.iter_layers())
    assert [layer.parameters for layer in layers] == [40, 64 + 256 + 40, 256 + 40, 256 + 40, 24]
    assert found.other_parameters == 8 + 3
    assert layers[1].attention is not None
    assert layers[1].attention.heads == 1


def test_a_stack_of_one_class_and_one_without() -> None:
    stack = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    found = trace_module(stack, {"input": torch.zeros(7, 4)})
    assert [layer.parameters for layer in found.iter_layers()] == [20, 20, 20]
    assert found.flops(1) == 3 * 2 * 16
    odd = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    found = trace_module(odd, {"input": torch.zeros(7, 4)})
    assert (found.num_layers, found.parameters, found.width) == (1, parameters(odd), 4)
    layer = found.layers[0][0]
    # What both GEMMs read; the ReLU keeps its output, which lies between a column and a row of tp.
    assert layer.saved_elements + layer.saved_elements_tp == pytest.approx(4 + 6)


class Chained(nn.Module):
    """Its first link embeds and multiplies, its last one is a block and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first = nn.Embedding(30, 8), nn.Linear(8, 8)
        self.last, self.head = nn.Linear(8, 8), nn.Linear(8, 30, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, int]:
        return self.finish(self.start(None, None, tokens), None, tokens)

    def start(self, _carried: None, _shared: None, tokens: Tensor) -> Tensor:
        return self.first(self.embed(tokens))

    def finish(self, x: Tensor, _shared: None, tokens: Tensor) -> tuple[Tensor, int]:
        return self.head(self.last(x)).sum(), tokens.numel()

    def pipeline_model(self) -> PipelineModel:
        start = PipelineLayer("start", ("embed", "first"), self.start)
        return PipelineModel(layers=(start, PipelineLayer("end", ("last", "head"), self.finish)))


def test_the_ends_of_a_chain_are_no_part_of_its_layers() -> None:
    found = trace_module(Chained(), {"tokens": TOKENS})
    assert [layer.parameters for layer in found.iter_layers()] == [72, 72]
    assert (found.vocab, found.width, found.parameters) == (30, 8, parameters(Chained()))
    assert found.other_parameters == 0


class WeightNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum()


def test_a_weight_that_is_computed() -> None:
    found = trace_module(WeightNormed(), {"x": torch.zeros(3, 4)})
    assert (found.parameters, found.flops(1)) == (24 + 6, 2 * 24)
    assert found.layers[0][0].other_parameters == 6


class RotaryAngles(nn.Module):
    """Angles of positions before a stack, as an outer product or as a GEMM with one inner element, which it equals."""

    def __init__(self, *, as_matmul: bool) -> None:
        super().__init__()
        self.as_matmul = as_matmul
        self.register_buffer("rates", torch.ones(4))
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        wide, tall = self.rates[None, None, :], places[None, :, None]
        x = x + (tall @ wide if self.as_matmul else tall * wide)
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_an_outer_product_is_no_gemm() -> None:
    """Releases of transformers before 5.22 compute the angles of rotary positions with `@`."""
    found = [trace_module(RotaryAngles(as_matmul=way), {"x": torch.zeros(2, 6, 4)}) for way in (True, False)]
    assert [(shape.num_layers, shape.flops(6)) for shape in found] == [(2, 2 * 2 * 16)] * 2


# -- files and faults -------------------------------------------------------------------------------------------------


def test_the_example() -> None:
    found = resolve_shape("examples/custom_model.py:build")
    assert found.parameters == 8 * 64 + 64 + 64 + 1
    assert found.flops(1) == 2 * (8 * 64 + 64)


OWN = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 1, 2)]
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in rates)
        self.table = torch.ones(4)
    def forward(self, x):
        for layer in self.layers:
            x = layer(x * self.table)
        return x.sum(), len(x)
class Choosy(Net):
    def forward(self, x):
        x = self.layers[0](x)
        return x[x > 0].sum(), len(x)
def broken():
    raise KeyError("no such thing")
def batch(rows, step):
    return {"x": torch.zeros(rows, 4)}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "own_net.py"
    path.write_text(OWN)
    return str(path)


def test_a_file_whose_module_reads_values_while_it_is_built(file: str) -> None:
    found: ModelShape = resolve_shape(f"{file}:Net")
    assert (found.num_layers, found.parameters) == (2, 40)
    assert found.name == f"{file}:Net"


def test_what_cannot_be_traced_is_refused(file: str) -> None:
    with pytest.raises(
        ValidationError, match=r"index by a mask reads a value that depends on weights .* at own_net\.py:17"
    ):
        resolve_shape(f"{file}:Choosy")
    with pytest.raises(ValidationError, match=r"cannot be built \(KeyError: 'no such thing'\)"):
        resolve_shape(f"{file}:broken")
    with pytest.raises(ValidationError, match=r"TypeError: .*unexpected keyword argument 'y'"):
        trace_module(nn.Linear(2, 2), {"y": TOKENS})
    with pytest.raises(ValidationError, match="Linear is traced without inputs"):
        trace_module(nn.Linear(2, 2))
    with pytest.raises(ValidationError, match=r"names nothing in the file"):
        resolve_shape(f"{file}:Nett")


class Branching(nn.Module):
    """Reads values of its inputs, of a buffer, of a mask that it makes and changes, and makes tensors on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(9, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("depth", torch.tensor(3))

    def forward(self, tokens: Tensor) -> tuple[Tensor, int]:
        longest = int((tokens != 0).sum(1).max())
        mask = torch.arange(longest) < 2
        mask[0] = False
        x = self.embed(tokens[:, :longest]) * mask[:, None]
        for layer in self.layers[: int(self.depth)]:
            x = layer(x)
        if torch.equal(tokens, tokens.flip(0)) or bool(mask.all()):
            x = self.layers[3](x)
        return x[:, mask].sum(), tokens.numel()


def test_branches_on_values_that_no_weight_changes() -> None:
    tokens = torch.tensor([[1, 2, 3, 0], [4, 0, 0, 0]])
    found = trace_module(Branching(), {"tokens": tokens})
    # Three of four tokens, three of four layers.
    assert found.flops(4) * tokens.numel() == 2 * 6 * 3 * 64
    assert found.parameters == 9 * 8 + 4 * 72


class RandomDepth(Branching):
    def forward(self, tokens: Tensor) -> tuple[Tensor, int]:
        x = self.layers[0](self.embed(tokens))
        if self.draw(x) > 0.5:
            x = self.layers[1](x)
        return x.sum(), tokens.numel()

    def draw(self, x: Tensor) -> Tensor:
        return torch.rand((), device=x.device)


class WeightDepth(RandomDepth):
    def draw(self, x: Tensor) -> Tensor:
        return x.mean()


class Lost(RandomDepth):
    """A mask that was known until values of weights were written to it."""

    def draw(self, x: Tensor) -> Tensor:
        mask = torch.zeros(2, device=x.device)
        mask[1:] = x.flatten()[:1]
        return mask[0]


@pytest.mark.parametrize("model", [RandomDepth, WeightDepth, Lost])
def test_branches_on_other_values_are_refused_with_their_place(model: type[nn.Module]) -> None:
    words = r"cannot be planned: item\(\) reads a value that depends on .* at test_trace_module.py:\d+"
    with pytest.raises(ValidationError, match=words) as caught:
        trace_module(model(), {"tokens": torch.ones(2, 4, dtype=torch.int64)})
    assert len(str(caught.value).splitlines()) == 1


class ElsewhereMade(nn.Module):
    """Puts what it makes on the CPU by name, which no operator on the meta device takes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        scale = torch.linspace(0, 1, 8, device="cpu")
        return (self.linear(x) * scale).sum(), len(x)


def test_a_module_that_only_runs_with_fake_tensors() -> None:
    found = trace_module(ElsewhereMade(), {"x": torch.zeros(3, 8)})
    assert (found.parameters, found.flops(1)) == (72, 128)


class Attending(nn.Module):
    """Grouped queries: keys are copied for the queries of their group, before a rotation or after it."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.q, self.kv, self.fused = nn.Linear(16, 16), nn.Linear(16, 8), fused

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 4)).transpose(1, 2).chunk(2, dim=1)
        k, v = (y[:, :, None].expand(-1, -1, 4, -1, -1).flatten(1, 2) for y in (k, v))
        k = torch.cat((-k[..., 2:], k[..., :2]), -1) * torch.ones(x.shape[1], 4, device=x.device)
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).sum(), x.shape[0]
        return ((q @ k.mT).softmax(-1) @ v).sum(), x.shape[0]


@pytest.mark.parametrize("fused", [True, False])
def test_copies_of_keys_are_no_heads_of_keys(fused: bool) -> None:
    attention = trace_module(Attending(fused=fused), {"x": torch.zeros(2, 6, 16)}).attention
    assert attention is not None
    assert (attention.heads, attention.kv_heads, attention.causal) == (4, 1, fused)


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.zeros(4, 8, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        ends = torch.arange(1, 5, dtype=torch.int32, device=x.device) * (len(x) // 2)
        return F.grouped_mm(x.repeat(2, 1), self.experts, offs=ends).sum(), len(x)


def test_a_grouped_gemm_counts_the_rows_of_all_experts() -> None:
    found = trace_module(MoE(), {"x": torch.zeros(8, 8)})
    assert (found.experts, found.top_k, found.parameters) == (4, 2, 4 * 48)
    assert found.flops(1) == 2 * 2 * 48


def test_a_batch_that_is_no_dictionary_is_refused():
    with pytest.raises(ValidationError, match="not keyword arguments"):
        trace_module(nn.Linear(4, 4), torch.zeros(2, 4))
