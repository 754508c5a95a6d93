"""Adapters in PEFT's format: PEFT computes our logits with them, and we compute PEFT's."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_families import write_family
from torch import Tensor

from echelon import models
from echelon.checkpoint.hf.convert_model import export_model
from echelon.checkpoint.hf.convert_tensors import in_memory
from echelon.checkpoint.hf.foreign_weights import write_hf_dir
from echelon.checkpoint.hf.peft_adapter import load_peft_adapter, write_peft_adapter
from echelon.layout import ValidationError
from echelon.models.foreign.causal_lm import build_causal_lm
from echelon.models.foreign.float64_casts import float64_casts
from echelon.models.foreign.hf_source import HFSource, read_hf_source
from echelon.models.lora.add_lora import add_adapters
from echelon.models.lora.lora_options import LoRAOptions
from echelon.models.model_dir import SavedModel

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

LORA = LoRAOptions(rank=3, alpha=6.0)
MODELS = ("llama-tiny", "gpt-tiny", "deepseek-tiny", "hf:llama", "hf:gpt2", "hf:phi3")
TRAINED = {
    "llama-tiny": ("norm1", "o"),
    "gpt-tiny": ("embed", "v"),
    "hf:llama": ("input_layernorm", "o_proj"),
    "hf:gpt2": ("ln_1", "attn.c_proj"),
}
"""a module to train in full, and a linear with adapters"""


def plain_model(name: str, folder: Path) -> Any:
    """Our model in float64."""
    if name.startswith("hf:"):
        return build_causal_lm(hf_source(name, folder), "cpu", dtype=torch.float64)
    return models.build(models.SIZES[name], dtype=torch.float64)


def hf_source(name: str, folder: Path) -> HFSource:
    return read_hf_source(f"hf:{write_family(name.removeprefix('hf:'), folder / 'config')}")


def ours(name: str, folder: Path, lora: LoRAOptions, *, zero_b: bool = False) -> Any:
    """Our model with adapters at random."""
    return add_adapters(plain_model(name, folder), lora, seed=5, zero_b=zero_b).eval()


def base(name: str, folder: Path) -> Any:
    """The same model without adapters, as transformers loads it."""
    state = {key: value.detach() for key, value in plain_model(name, folder).state_dict().items()}
    if name.startswith("hf:"):
        (folder / "base").mkdir()
        write_hf_dir(folder / "base", plain_model(name, folder), state, hf_source(name, folder))
    else:
        tensors = {key: in_memory(value) for key, value in state.items()}
        export_model((SavedModel(config=models.SIZES[name]), tensors), folder / "base")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float64)
    loaded.config._experts_implementation = "eager"  # the other has no float64
    return loaded


def logits_of(model: Any) -> Tensor:
    tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), float64_casts(torch.float64):  # transformers' norms are in float32 else
        logits: Tensor = model.logits(tokens) if hasattr(model, "layer_stack") or hasattr(model, "blocks") else None
        return logits if logits is not None else model(tokens).logits


def write(model: Any, folder: Path, lora: LoRAOptions = LORA) -> Path:
    """Change what is trained at random, and write it."""
    state = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(3)
    for value in state.values():
        value += 0.1 * torch.randn(value.shape, dtype=value.dtype, generator=generator)
    folder.mkdir()
    write_peft_adapter(folder, model, state, lora, base="base")
    return folder


def tolerance(name: str) -> float:
    """transformers' Llama has its RoPE frequencies in float32, with and without adapters."""
    return 1e-10 if name == "gpt-tiny" or name.startswith("hf:") else 2e-8


def with_adapter(plain: Any, folder: Path) -> Any:
    """The model as PEFT loads it, in float64: PEFT creates its factors in float32, so they are loaded once more."""
    loaded = peft.PeftModel.from_pretrained(plain, folder).double()
    result = peft.set_peft_model_state_dict(loaded, peft.utils.load_peft_weights(str(folder)))
    assert not result.unexpected_keys
    return loaded.eval()


@pytest.mark.parametrize("name", MODELS)
def test_peft_computes_our_logits_and_we_read_them_back(name: str, tmp_path: Path) -> None:
    # In an MoE model, PEFT takes targets of its MLPs for targets of the experts too.
    lora = replace(LORA, targets=("*.attn.*",)) if name == "deepseek-tiny" else LORA
    model = ours(name, tmp_path, lora)
    folder = write(model, tmp_path / "adapter")
    wanted, plain = logits_of(model), base(name, tmp_path)
    before = logits_of(plain)
    loaded = with_adapter(plain, folder)
    assert (wanted - before).abs().max() > 1e-3, "the adapters change nothing"
    torch.testing.assert_close(logits_of(loaded), wanted, rtol=0, atol=tolerance(name))
    again = ours(name, tmp_path, lora, zero_b=True)
    load_peft_adapter(again, folder, lora)
    # adapter files are read in float32
    torch.testing.assert_close(logits_of(again), wanted, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # PEFT warns, and computes the same
@pytest.mark.parametrize("name", TRAINED)
def test_modules_that_were_trained_in_full_are_peft_modules_to_save(name: str, tmp_path: Path) -> None:
    norm, target = TRAINED[name]
    lora = LoRAOptions(rank=2, alpha=4.0, targets=(target,), train=(norm,), rslora=True)
    model = ours(name, tmp_path, lora)
    folder = write(model, tmp_path / "adapter", lora)
    wanted = logits_of(model)
    loaded = with_adapter(base(name, tmp_path), folder)
    torch.testing.assert_close(logits_of(loaded), wanted, rtol=0, atol=tolerance(name))


@pytest.mark.parametrize("name", ["gpt-tiny", "hf:gpt2"])
def test_a_fused_adapter_that_peft_has_made_starts_a_run(name: str, tmp_path: Path) -> None:
    """c_attn has one A for q, k and v; ours of q, k and v start from copies of it."""
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    made = peft.get_peft_model(base(name, tmp_path), config).double().eval()
    wanted = logits_of(made)
    made.save_pretrained(tmp_path / "made")
    targets = ("c_attn",) if name.startswith("hf:") else ("q", "k", "v")
    model = ours(name, tmp_path, LoRAOptions(rank=3, alpha=6.0, targets=targets), zero_b=True)
    load_peft_adapter(model, tmp_path / "made", LORA)
    torch.testing.assert_close(logits_of(model), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"peft_type": "LOHA"}, "peft_type=LOHA"),
        ({"lora_alpha": 7}, "is scaled by 2.33333, and the run's adapters by 2"),
        ({"use_rslora": True}, "is scaled by 3.4641"),
        ({"bias": "all"}, "bias=all"),
    ],
)
def test_an_adapter_that_computes_something_else_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = ours("llama-tiny", tmp_path, LORA)
    folder = write(model, tmp_path / "adapter")
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValidationError, match=re.escape(message)):
        load_peft_adapter(model, folder, LORA)


def test_an_adapter_of_other_linears_is_refused(tmp_path: Path) -> None:
    folder = write(ours("llama-tiny", tmp_path, LORA), tmp_path / "adapter")
    other = ours("llama-tiny", tmp_path, LoRAOptions(rank=3, alpha=6.0, targets=("q",)))
    with pytest.raises(ValidationError, match=r"the run has no model.layers.0.mlp.down_proj.lora_A.weight"):
        load_peft_adapter(other, folder, LORA)
