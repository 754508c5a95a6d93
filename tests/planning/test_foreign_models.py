"""Plans for models of transformers: their own classes, traced from a config.json, are what a real run of them is."""

from __future__ import annotations

import importlib.util
import json
import resource
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_families import FAMILIES, build_family, write_family
from torch import Tensor

import echelon as ec
from echelon import rng
from echelon.config.run_config import Config
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.layout.validation_error import ValidationError
from echelon.models.foreign.causal_lm import adapt, build_causal_lm, build_on_meta
from echelon.models.foreign.hf_source import read_hf_source
from echelon.models.hf.hf_config_reader import read_hf_config, read_hf_spec
from echelon.models.pipeline_model import get_pipeline_model
from echelon.parallel.tp.derive_regions import derive_split
from echelon.parallel.tp.shrunken_twin import shrunken_twin
from echelon.planning.cluster.cluster import parse_cluster
from echelon.planning.cost.activation_memory import saved_tensor_bytes
from echelon.planning.cost.count_work import count_work
from echelon.planning.cost.working_memory import lm_head_bytes
from echelon.planning.model import equal_layers, foreign_shape
from echelon.planning.model.layer_counts import ShardedCount
from echelon.planning.model.model_shape import LayerShape, ModelShape
from echelon.planning.model.model_sources import config_shape, resolve_shape
from echelon.planning.model.transformer_shape import transformer_shape
from echelon.planning.planner import find_plans
from echelon.planning.scenario import Scenario
from echelon.training.run.auto_layout import best_plan
from echelon.verification.verifier import Verifier
from echelon.verification.verify_case import VerifyCase

pytest.importorskip("transformers")

SEQ_LEN = 32
LLAMA_70B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
DEEPSEEK_V3 = {"model_type": "deepseek_v3", "vocab_size": 129280, "max_position_embeddings": 4096}
"""all else is its class's default"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configurations of all families, each in a directory of its name."""
    root = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        write_family(name, root / name)
    return root


@pytest.fixture(scope="module")
def shapes(folder: Path) -> dict[str, ModelShape]:
    """The shape of each family that a test has asked for, by `name` or `name precision`."""

    class Shapes(dict[str, ModelShape]):
        def __missing__(self, key: str) -> ModelShape:
            name, _, precision = key.partition(" ")
            self[key] = resolve_shape(f"hf:{folder / name}", seq_len=SEQ_LEN, precision=precision or "bf16")
            return self[key]

    return Shapes()


# -- every family -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_planned_from_its_config_alone(name: str, folder: Path, shapes: dict[str, ModelShape]) -> None:
    started = time.thread_time()
    shape = shapes[name]
    assert time.thread_time() - started < 20
    model = build_on_meta(read_hf_source(f"hf:{folder / name}"))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert (shape.num_layers, shape.vocab, shape.width) == (4, 97, 32)
    assert shape.tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)
    assert shape.traced_seq_len == SEQ_LEN
    attention = shape.attention
    heads = getattr(model.config, "num_attention_heads", 0)
    keys = {"falcon": 2, "gpt_neox": 4}.get(name, getattr(model.config, "num_key_value_heads", heads))
    assert (attention.heads, attention.kv_heads) == (heads, keys) if attention else name == "mamba2"
    on_gpus = Scenario(shape=shape, cluster=parse_cluster("8xh100"), layout=Layout.parse("dp=8,zero=3"), seq_len=32)
    assert on_gpus.runnable
    assert on_gpus.runs_operators


@pytest.mark.parametrize("name", ["deepseek_v3", "falcon", "gemma3", "qwen3_next", "smollm3"])
def test_a_layer_that_equals_another_need_not_run(
    name: str, shapes: dict[str, ModelShape], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = shapes[name]  # traced before the change below
    repeats: list[int] = []
    find = equal_layers.find_repeats

    def count_repeats(model: Any, shared: Any) -> dict[str, str]:
        repeats.append(len(find(model, shared)))
        return {}

    monkeypatch.setattr(equal_layers, "find_repeats", count_repeats)
    full = resolve_shape(f"hf:{folder / name}", seq_len=SEQ_LEN)
    assert repeats == [3 if name == "falcon" else 2]
    assert replace(full, layers=()) == replace(found, layers=())
    for layer, expected in zip(found.iter_layers(), full.iter_layers(), strict=True):
        assert (layer.name, layer.matmuls, layer.attention) == (expected.name, expected.matmuls, expected.attention)
        # Of what several layers share, the first ones may save other parts.
        assert layer.saved_elements == pytest.approx(expected.saved_elements, rel=1e-3)


def saved_by_a_run(source: Any, dtype: torch.dtype) -> float:
    """Bytes per token that the layers of a real model save for backward on this machine."""
    model = build_causal_lm(source, "cpu", dtype=dtype).train()
    stream = rng.RandomStream(0)
    stream.samples = torch.arange(2)
    rng.attach_stream(model, stream)
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            known.add(tensor.untyped_storage().data_ptr())
            saved.append(tensor)
        return tensor

    pipeline_model, tokens = get_pipeline_model(model), torch.zeros(2, SEQ_LEN, dtype=torch.int64)
    shared, hidden, counted = pipeline_model.shared(tokens=tokens, targets=tokens), None, 0
    for layer in pipeline_model.layers:
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden = layer.run(hidden, shared, tokens=tokens, targets=tokens)
        if layer.name not in ("embed", "head"):
            counted += sum(tensor.untyped_storage().nbytes() for tensor in saved)
    return counted / tokens.numel()


def saved_elements(shape: ModelShape) -> float:
    return sum(layer.saved_elements + layer.saved_elements_tp for layer in shape.iter_layers())


@pytest.mark.parametrize("name", ["bloom", "falcon", "gemma2", "gpt2", "llama", "mamba2", "mistral", "mixtral", "phi"])
def test_saved_bytes_are_those_of_a_real_run(name: str, folder: Path, shapes: dict[str, ModelShape]) -> None:
    """In 16 bits: norms in float32 save twice as much, masks and indices as much as always."""
    real = saved_by_a_run(read_hf_source(f"hf:{folder / name}"), torch.bfloat16)
    assert 2 * saved_elements(shapes[name]) == pytest.approx(real, rel=0.02)


# -- families that our own models compute, too ------------------------------------------------------------------------


def native_shape(path: Path) -> ModelShape:
    return config_shape(read_hf_config(path / "config.json").config)


def matmul_flops(shape: ModelShape) -> float:
    layers = sum(matmul.flops for layer in shape.iter_layers() for matmul in layer.matmuls)
    return layers + 2 * shape.head_parameters


def unfused_elements(layer: LayerShape) -> float:
    """What our model saves of a layer with torch's operators."""
    assert layer.unfused is not None
    saved: ShardedCount = layer.unfused.bytes_saved(element_bytes=4, low_precision=False, recompute_ops=False)
    return (saved.sp + saved.tp + saved.routed + saved.expert) / 4


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "mixtral", "qwen3_moe", "deepseek_v3"])
def test_a_traced_class_is_what_our_own_model_is(name: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"mistral": {"sliding_window": None}}.get(name, {})
    if name == "gpt2":  # its own activation saves four tensors more, and dropout writes scores out
        changes = {"activation_function": "gelu_pytorch_tanh"} | dict.fromkeys(
            ("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0
        )
    path = write_family(name, tmp_path / name, **changes)
    found, native = resolve_shape(f"hf:{path}", seq_len=SEQ_LEN, precision="fp32"), native_shape(path)
    assert found.parameters == native.parameters
    assert found.active_parameters == pytest.approx(native.active_parameters)
    assert (found.experts, found.top_k, found.tied) == (native.experts, native.top_k, native.tied)
    assert matmul_flops(found) == pytest.approx(matmul_flops(native))
    assert found.flops(SEQ_LEN) == pytest.approx(native.flops(SEQ_LEN))
    assert saved_elements(found) == pytest.approx(sum(map(unfused_elements, native.iter_layers())), rel=0.25)


def test_a_window_counts_every_pair_that_the_mask_hides(shapes: dict[str, ModelShape], folder: Path) -> None:
    """transformers passes a window as a mask, and torch's attention then computes all pairs."""
    causal = transformer_shape(read_hf_spec(folder / "mistral" / "config.json")).attention
    found = shapes["mistral"].attention
    assert causal is not None
    assert found is not None
    assert found.flops(SEQ_LEN) == 2 * causal.flops(SEQ_LEN)
    shorter_than_the_window = resolve_shape(f"hf:{folder / 'mistral'}", seq_len=6).attention
    assert shorter_than_the_window is not None
    assert shorter_than_the_window.flops(6) == causal.flops(6)


def test_scores_that_are_written_out_grow_with_the_sequence(folder: Path) -> None:
    short, long = (resolve_shape(f"hf:{folder / 'bloom'}", seq_len=length) for length in (16, 64))
    assert saved_elements(long) - saved_elements(short) >= 4 * 3 * 4 * (64 - 16)  # layers, copies, heads


# -- full size --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "parameters", "layers"),
    [(LLAMA_70B, 70_553_706_496, [80]), (DEEPSEEK_V3, 671_026_404_352, [3, 58])],
    ids=lambda value: value.get("model_type", "") if isinstance(value, dict) else "",
)
def test_full_size_takes_seconds_and_no_memory(
    config: dict[str, Any], parameters: int, layers: list[int], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    shape = resolve_shape(f"hf:{tmp_path}")
    assert time.process_time() - started < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**21  # KiB; a layer in float64 has more
    assert (shape.parameters, [count for _, count in shape.layers]) == (parameters, layers)
    assert shape.traced_seq_len == 4096


def test_the_split_of_a_wide_model_is_that_of_its_twin(tmp_path: Path) -> None:
    wide = {"hidden_size": 1024, "intermediate_size": 1536, "head_dim": 128}
    model = adapt(build_on_meta(read_hf_source(f"hf:{write_family('qwen3', tmp_path, **wide)}")))
    for module in model.modules():  # rotary tables
        for key, buffer in module.named_buffers(recurse=False):
            setattr(module, key, torch.zeros_like(buffer, device="cpu"))
    twin = shrunken_twin(model)
    assert twin is not None
    assert sum(p.numel() for p in twin.parameters()) < 0.2 * sum(p.numel() for p in model.parameters())
    found, expected = derive_split(twin, 2), derive_split(model, 2)
    assert [(region.module, region.columns, region.row) for region in found.regions] == [
        (region.module, region.columns, region.row) for region in expected.regions
    ]
    assert (found.whole, len(found.regions)) == (expected.whole, 8)


# -- what runs --------------------------------------------------------------------------------------------------------


RUNS = [
    ("llama", "tp=2"),
    ("llama", "cp=2"),
    ("mistral", "cp=2"),
    ("bloom", "cp=2"),
    ("gemma2", "pp=2,accumulate=2"),
    ("qwen3_next", "dp=2,ep=2"),
    ("olmo2", "dp=2,ep=2"),
]


@pytest.mark.parametrize(("name", "layout"), RUNS)
def test_a_plan_is_runnable_where_a_run_accepts_it(
    name: str, layout: str, folder: Path, shapes: dict[str, ModelShape], pool: RankPool
) -> None:
    planned = Scenario(shape=shapes[name], cluster=parse_cluster("2xh100"), layout=Layout.parse(layout), seq_len=32)
    verdict = Verifier(pool, VerifyCase(model=f"hf:{folder / name}", steps=1, seq_len=16)).verify_layout(planned.layout)
    assert planned.runnable == (not verdict.trouble), (planned.refusal, verdict.trouble)
    assert planned.runnable != bool(planned.refusal)


def test_the_search_offers_what_runs(folder: Path) -> None:
    plans = ec.plan(f"hf:{folder / 'gpt_oss'}", "4xh100", batch=16, seq_len=SEQ_LEN, top=50)
    assert all(plan.runnable for plan in plans)
    assert max(plan.layout.ep for plan in plans) > 1
    (divided,) = ec.plan(f"hf:{folder / 'gpt_oss'}", "2xh100", batch=16, seq_len=SEQ_LEN, layout="cp=2")
    assert divided.runnable


def test_modules_with_full_sequences_are_priced_whole(shapes: dict[str, ModelShape]) -> None:
    """cp=2 halves what lies between gathered modules, and nothing inside of them; llama's cores are divided."""

    def scenario(name: str, layout: str) -> Scenario:
        return Scenario(
            shape=shapes[name], cluster=parse_cluster("2xh100"), layout=Layout.parse(layout), seq_len=SEQ_LEN
        )

    assert [shapes[name].num_gathered_modules for name in ("llama", "gptj", "qwen3_next", "mamba2")] == [0, 4, 2, 4]
    for name, whole in (("llama", 0.0), ("gptj", 1.0)):
        one, two = (count_work(scenario(name, layout)).microbatch for layout in ("dp=2", "cp=2"))
        assert two.attention.flops / one.attention.flops == pytest.approx((1 + whole) / 2)
        gemms = [m for layer in shapes[name].iter_layers() for m in layer.matmuls]
        inside = sum(m.flops for m in gemms if m.is_gathered) / sum(m.flops for m in gemms)
        assert two.dense_gemms.flops / one.dense_gemms.flops == pytest.approx((1 + inside) / 2)
        saved = [
            sum(saved_tensor_bytes(s, layer) for layer in shapes[name].iter_layers())
            for s in (scenario(name, "dp=2"), scenario(name, "cp=2"))
        ]
        assert saved[1] / saved[0] == pytest.approx(0.5) if not whole else 0.5 < saved[1] / saved[0] < 1
    assert count_work(scenario("mamba2", "cp=2")).microbatch.cp.num_collectives == 2 * 4
    assert {m.name for layer in shapes["gptj"].iter_layers() for m in layer.matmuls if m.is_gathered} == {
        f"attn.{part}_proj" for part in ("q", "k", "v", "out")
    }


def test_train_plans_a_directory_itself(folder: Path) -> None:
    config = Config(model=f"hf:{folder / 'gemma2'}", device="cpu", batch=8, seq_len=SEQ_LEN, dtype="float32")
    best = best_plan(config, procs=2)
    assert best.runnable
    assert best.layout.cp == 1
    assert (best.scenario.seq_len, best.scenario.shape.traced_seq_len) == (SEQ_LEN, SEQ_LEN)


def test_an_instance_is_planned_and_left_as_it_is(folder: Path) -> None:
    model = build_family("llama").eval()
    before = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
    own, modules = type(model), [type(module) for module in model.modules()]
    (found,) = ec.plan(model, "8xh100", batch=16, seq_len=SEQ_LEN, layout="dp=8")
    assert {name: id(value) for name, value in model.state_dict(keep_vars=True).items()} == before
    assert (type(model), [type(module) for module in model.modules()], model.training) == (own, modules, False)
    (from_config,) = ec.plan(f"hf:{folder / 'llama'}", "8xh100", batch=16, seq_len=SEQ_LEN, layout="dp=8")
    assert found.scenario.shape == replace(from_config.scenario.shape, name="LlamaForCausalLM")
    assert found.seconds == from_config.seconds


def test_any_module_is_planned_with_inputs() -> None:
    class Regression(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(16, 16)

        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            return self.linear(x).square().sum(), len(x)

    (found,) = ec.plan(Regression(), "8xh100", batch=64, layout="dp=8", inputs={"x": torch.zeros(2, 16)})
    assert found.scenario.shape.parameters == 16 * 17
    with pytest.raises(ValidationError, match="Regression is traced without inputs"):
        ec.plan(Regression(), "8xh100")


# -- errors -----------------------------------------------------------------------------------------------------------


FAULTS: list[tuple[str | None, str]] = [
    (None, r"config.json cannot be read \(no such file or directory\)"),
    ("{", r"config.json is not valid JSON"),
    ('{"vocab_size": 97}', r"config.json names no model_type"),
    ('{"model_type": "lama", "vocab_size": 97}', r"which transformers does not have; did you mean \"llama\"\?"),
    ('{"model_type": "t5", "vocab_size": 97}', r"model_type 't5', which is not a causal language model"),
    ('{"model_type": "llama", "vocab_size": 97, "hidden_size": 30, "num_attention_heads": 4}', r"is refused by .*30"),
    ('{"model_type": "llama", "vocab_size": 97, "hidden_size": "wide"}', r"is refused by transformers .*hidden_size"),
]


@pytest.mark.parametrize(("config", "words"), FAULTS)
def test_faults_are_reported_in_one_sentence(config: str | None, words: str, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config, encoding="utf-8")
    with pytest.raises(ValidationError, match=words) as caught:
        find_plans(f"hf:{tmp_path}", "8xh100")
    assert str(caught.value).startswith(f"model=hf:{tmp_path} ")
    assert len(str(caught.value).splitlines()) == 1


def test_a_class_whose_layers_are_not_known_is_planned_without_stages(tmp_path: Path) -> None:
    config = {"model_type": "xlm", "vocab_size": 97, "emb_dim": 32, "n_layers": 2, "n_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    plans = find_plans(f"hf:{tmp_path}", "8xh100").plans
    assert plans
    assert {plan.layout.pp for plan in plans if plan.runnable} == {1}


def test_transformers_is_an_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValidationError, match=r"requires transformers, which is not installed; .*\[transformers\]"):
        find_plans(f"hf:{folder / 'llama'}", "8xh100")


def test_a_sequence_beyond_learned_positions_is_refused(folder: Path) -> None:
    with pytest.raises(ValidationError, match=r"seq-len=128 exceeds the longest sequence of gpt2 .*1 to 64"):
        find_plans(f"hf:{folder / 'gpt2'}", "8xh100", seq_len=128)
    (plan,) = find_plans(f"hf:{folder / 'llama'}", "8xh100", batch=8, seq_len=128, layout="dp=8").plans
    assert plan.scenario.shape.traced_seq_len == 128  # rotary positions have no end


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """transformers logs what a config leaves out."""
    with foreign_shape.quiet_transformers():
        yield


def test_memory_of_the_head_is_that_of_a_chunk(folder: Path) -> None:
    """Twice the tokens: twice the hidden states, and not one logit more."""
    shape = replace(resolve_shape(f"hf:{folder / 'llama'}", seq_len=SEQ_LEN), vocab=128_000)

    def head_bytes(shape: ModelShape, microbatch: int) -> float:
        layout = f"dp=1,microbatch={microbatch}"
        return lm_head_bytes(
            Scenario(shape=shape, cluster=parse_cluster("1xh100"), layout=Layout.parse(layout), seq_len=8192), True
        )

    whole = replace(shape, loss=None)
    assert shape.loss is not None
    assert head_bytes(whole, 4) > 1.9 * head_bytes(whole, 2) > 10 * head_bytes(shape, 2)
    assert head_bytes(shape, 4) < 1.1 * head_bytes(shape, 2)
