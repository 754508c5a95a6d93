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
from echelon.checkpoint.hf.convert_tensors import Given, Source, to_ours, type_of
from echelon.checkpoint.hf.safetensors_reader import listed
from echelon.models.hf import hf_config_reader
from echelon.models.language_model import LanguageModel
from echelon.models.model_config import ModelConfig
from echelon.parallel.dp.offload_policy import GIB, available

TOLERANCE = 1e-4
"""largest difference of two logits, to the largest logit"""
ROWS, LENGTH = 2, 24
"""of the random tokens"""


@dataclass(frozen=True)
class Check:
    against: str
    """transformers, or import"""
    error: float
    """largest difference of two logits, to the largest logit"""


def check(
    config: ModelConfig, tensors: Mapping[str, Source], theirs: Path, *, rounded: torch.dtype | None = None
) -> Check:
    """Raises ValueError where the logits of our tensors and of a Hugging Face directory differ.

    `rounded` is the type that our tensors were rounded to, where they were: theirs are rounded alike.
    """
    tokens = _tokens(config)
    ours = logits(config, tensors, tokens)
    installed = importlib.util.find_spec("transformers") is not None
    against = "transformers" if installed else "import"
    found = (_transformers if installed else _again)(theirs, tokens, rounded)
    scale = float(ours.abs().max())
    error = float((found - ours).abs().max()) / scale if found.shape == ours.shape and scale else float("inf")
    if not error <= TOLERANCE:
        raise ValueError(
            f"the logits differ from those of {against} (by {error:.2e} of the largest, {TOLERANCE:.0e} allowed; "
            f"{config.name}); nothing was kept: report it as a bug, with the config"
        )
    return Check(against, error)


def room(config: ModelConfig) -> None:
    """Raises ValueError where a whole model in float32 does not fit: better before hours of writing than after."""
    needed, free = torch.float32.itemsize * config.parameters, available()
    if free and needed > free:
        raise ValueError(
            f"the check of logits needs the whole model in memory ({needed / GIB:.1f} GiB in float32, "
            f"{free / GIB:.1f} available; {config.name}); use a machine with more"
        )


def _tokens(config: ModelConfig) -> Tensor:
    shape = (ROWS, min(LENGTH, config.max_seq_len))
    return torch.randint(config.vocab, shape, generator=torch.Generator().manual_seed(0))


def logits(
    config: ModelConfig, tensors: Mapping[str, Source], tokens: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """What our model with these tensors says."""
    model = models.build(config, "meta")
    assert isinstance(model, LanguageModel)
    state = {name: tensor.read().to(dtype) for name, tensor in tensors.items()}
    if config.tied:
        state["head.weight"] = state["embed.weight"]
    model.load_state_dict(state, assign=True)
    model.tie()
    with torch.no_grad():
        return model.eval().logits(tokens)


def _again(theirs: Path, tokens: Tensor, rounded: torch.dtype | None) -> Tensor:
    config = hf_config_reader.read(theirs).config
    found = to_ours(safetensors_reader.tensors_of(theirs), config, rounded)
    return logits(config, {name: Given(tensor) for name, tensor in found.values()}, tokens)


def _transformers(theirs: Path, tokens: Tensor, rounded: torch.dtype | None) -> Tensor:
    with _quiet():
        transformers: Any = importlib.import_module("transformers")
        model, told = transformers.AutoModelForCausalLM.from_pretrained(
            str(theirs),
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        wrong = {key: sorted(map(str, told[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
        if any(wrong.values()):
            said = "; ".join(f"{key}: {listed(names)}" for key, names in wrong.items() if names)
            raise ValueError(f"transformers reads other names ({theirs}: {said}); report it as a bug, with the config")
        with torch.no_grad():
            for name, tensor in model.state_dict().items() if rounded is not None else ():
                tensor.copy_(tensor.to(type_of(name, tensor.dtype, rounded)))
            found: Tensor = model.eval()(tokens, use_cache=False).logits
    return found


@contextmanager
def _quiet() -> Iterator[None]:
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
