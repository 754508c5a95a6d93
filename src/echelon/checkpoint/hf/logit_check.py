"""Whether transformers' own model, built from a directory, gives the logits of ours.

Both compute in float32, whatever the type on disk: what is checked is which weight is where and what is done with it.
One model is in memory at a time. Where transformers is not installed, our own reading of the directory stands in for
it: this finds what was written wrong, and not what we believe wrongly of transformers.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echelon import models
from echelon.checkpoint.hf import safetensors_reader
from echelon.checkpoint.hf.convert_tensors import InMemoryTensor, TensorSource, hf_to_native, stored_dtype
from echelon.checkpoint.hf.safetensors_reader import format_names
from echelon.models.hf import hf_config_reader
from echelon.models.language_model import LanguageModel
from echelon.models.model_config import ModelConfig
from echelon.parallel.dp.offload_policy import GIB, available_host_bytes

TOLERANCE = 1e-4
"""largest difference of two logits, to the largest logit"""
NUM_SEQUENCES, SEQ_LEN = 2, 24
"""of the random tokens"""


@dataclass(frozen=True)
class LogitCheck:
    against: str
    """transformers, or import"""
    error: float
    """largest difference of two logits, to the largest logit"""


def check_logits(
    config: ModelConfig, tensors: Mapping[str, TensorSource], hf_dir: Path, *, cast_to: torch.dtype | None = None
) -> LogitCheck:
    """Raises ValueError where the logits of our tensors and of a Hugging Face directory differ.

    `rounded` is the type that our tensors were rounded to, where they were: theirs are rounded alike.
    """
    tokens = _random_tokens(config)
    ours = native_logits(config, tensors, tokens)
    installed = importlib.util.find_spec("transformers") is not None
    against = "transformers" if installed else "import"
    found = (_transformers_logits if installed else _reimport_logits)(hf_dir, tokens, cast_to)
    scale = float(ours.abs().max())
    error = float((found - ours).abs().max()) / scale if found.shape == ours.shape and scale else float("inf")
    if not error <= TOLERANCE:
        raise ValueError(
            f"the logits differ from those of {against} (by {error:.2e} of the largest, {TOLERANCE:.0e} allowed; "
            f"{config.name}); nothing was kept: report it as a bug, with the config"
        )
    return LogitCheck(against, error)


def require_memory(config: ModelConfig) -> None:
    """Raises ValueError where a whole model in float32 does not fit: better before hours of writing than after."""
    needed, free = torch.float32.itemsize * config.parameters, available_host_bytes()
    if free and needed > free:
        raise ValueError(
            f"the check of logits needs the whole model in memory ({needed / GIB:.1f} GiB in float32, "
            f"{free / GIB:.1f} available; {config.name}); use a machine with more"
        )


def _random_tokens(config: ModelConfig) -> Tensor:
    shape = (NUM_SEQUENCES, min(SEQ_LEN, config.max_seq_len))
    return torch.randint(config.vocab, shape, generator=torch.Generator().manual_seed(0))


def native_logits(
    config: ModelConfig, tensors: Mapping[str, TensorSource], tokens: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """What our model with these tensors says."""
    model = models.build(config, "meta")
    assert isinstance(model, LanguageModel)
    state = {name: tensor.read().to(dtype) for name, tensor in tensors.items()}
    if config.tied:
        state["head.weight"] = state["embed.weight"]
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    with torch.no_grad():
        return model.eval().logits(tokens)


def _reimport_logits(hf_dir: Path, tokens: Tensor, cast_to: torch.dtype | None) -> Tensor:
    config = hf_config_reader.read_hf_config(hf_dir).config
    found = hf_to_native(safetensors_reader.open_safetensors(hf_dir), config, cast_to)
    return native_logits(config, {name: InMemoryTensor(tensor) for name, tensor in found.convert()}, tokens)


def _transformers_logits(hf_dir: Path, tokens: Tensor, cast_to: torch.dtype | None) -> Tensor:
    with _silence_transformers():
        transformers: Any = importlib.import_module("transformers")
        model, told = transformers.AutoModelForCausalLM.from_pretrained(
            str(hf_dir),
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        wrong = {key: sorted(map(str, told[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
        if any(wrong.values()):
            said = "; ".join(f"{key}: {format_names(names)}" for key, names in wrong.items() if names)
            raise ValueError(f"transformers reads other names ({hf_dir}: {said}); report it as a bug, with the config")
        with torch.no_grad():
            for name, tensor in model.state_dict().items() if cast_to is not None else ():
                tensor.copy_(tensor.to(stored_dtype(name, tensor.dtype, cast_to)))
            found: Tensor = model.eval()(tokens, use_cache=False).logits
    return found


@contextmanager
def _silence_transformers() -> Iterator[None]:
    """Without transformers' own bars and remarks, which it is then given back."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told: Any = importlib.import_module("transformers.utils.logging")
        level, bars = told.get_verbosity(), told.is_progress_bar_enabled()
        told.set_verbosity_error()
        told.disable_progress_bar()
        try:
            yield
        finally:
            told.set_verbosity(level)
            if bars:
                told.enable_progress_bar()
