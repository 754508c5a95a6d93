"""Compares the logits of a native model with those of transformers' model built from a Hugging Face directory.

Both compute in float32, whatever the dtype on disk: the check is of names, shapes and computation. One model is in
memory at a time. Without transformers, importing the directory again stands in for it: this finds errors of writing,
not wrong assumptions about transformers.
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
from echelon.checkpoint.hf.convert_tensors import TensorSource, hf_to_native, in_memory, stored_dtype
from echelon.checkpoint.hf.dequantize import open_hf_weights
from echelon.checkpoint.hf.safetensors_reader import format_names
from echelon.models.hf import hf_config_reader
from echelon.models.hf.hf_architectures import TRAINABLE
from echelon.models.hf.param_names import ignored_names
from echelon.models.language_model import LanguageModel
from echelon.models.model_config import ModelConfig
from echelon.parallel.dp.offload_policy import GIB, available_host_bytes

TOLERANCE = 1e-4
"""largest difference of two logits, to the largest logit"""
NUM_SEQUENCES, SEQ_LEN = 2, 24
"""of the random tokens"""
LOADING_FAULTS = ("missing_keys", "unexpected_keys", "mismatched_keys")


@dataclass(frozen=True)
class LogitCheck:
    against: str
    """transformers, or import"""
    error: float
    """largest difference of two logits, to the largest logit"""


def check_logits(
    config: ModelConfig, tensors: Mapping[str, TensorSource], hf_dir: Path, *, cast_to: torch.dtype | None = None
) -> LogitCheck:
    """Raise ValueError if the logits of native tensors and of a Hugging Face directory differ.

    `cast_to` is the dtype that the native tensors were cast to, if any: the others are cast alike.
    """
    tokens = _random_tokens(config)
    native = native_logits(config, tensors, tokens)
    installed = importlib.util.find_spec("transformers") is not None
    against = "transformers" if installed else "import"
    other = (_transformers_logits if installed else _reimport_logits)(hf_dir, tokens, cast_to)
    scale = float(native.abs().max())
    error = float((other - native).abs().max()) / scale if other.shape == native.shape and scale else float("inf")
    if not error <= TOLERANCE:
        raise ValueError(
            f"the logits differ from those of {against} (by {error:.2e} of the largest, {TOLERANCE:.0e} allowed; "
            f"{config.name}); nothing was written: report it as a bug, with the config"
        )
    return LogitCheck(against, error)


def require_memory(config: ModelConfig) -> None:
    """Raise ValueError if an unsharded float32 model does not fit into memory, before hours of writing."""
    needed, free = torch.float32.itemsize * config.parameters, available_host_bytes()
    if free and needed > free:
        raise ValueError(
            f"the check of logits requires the unsharded model in memory ({needed / GIB:.1f} GiB in float32, "
            f"{free / GIB:.1f} available; {config.name}); use a machine with more"
        )


def _random_tokens(config: ModelConfig) -> Tensor:
    shape = (NUM_SEQUENCES, min(SEQ_LEN, config.max_seq_len))
    return torch.randint(config.vocab, shape, generator=torch.Generator().manual_seed(0))


def native_logits(
    config: ModelConfig, tensors: Mapping[str, TensorSource], tokens: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Logits of our model with these tensors."""
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
    conversion = hf_to_native(open_hf_weights(hf_dir), config, cast_to)
    return native_logits(config, {name: in_memory(tensor) for name, tensor in conversion.convert()}, tokens)


def _transformers_logits(hf_dir: Path, tokens: Tensor, cast_to: torch.dtype | None) -> Tensor:
    with _silence_transformers():
        transformers: Any = importlib.import_module("transformers")
        model, loading_info = _load_transformers_model(transformers, hf_dir, cast_to)
        wrong = {key: sorted(map(str, loading_info[key])) for key in LOADING_FAULTS}
        if any(wrong.values()):
            mismatches = "; ".join(f"{key}: {format_names(names)}" for key, names in wrong.items() if names)
            raise ValueError(
                f"transformers reads other names ({hf_dir}: {mismatches}); report it as a bug, with the config"
            )
        with torch.no_grad():
            for name, tensor in model.state_dict().items() if cast_to is not None else ():
                tensor.copy_(tensor.to(stored_dtype(name, tensor.dtype, cast_to)))
            logits: Tensor = model.eval()(tokens, use_cache=False).logits
    return logits


def _load_transformers_model(transformers: Any, hf_dir: Path, cast_to: torch.dtype | None) -> tuple[Any, Any]:
    """transformers' model in float32, and what it reports about loading. It dequantises on a GPU only, so we do."""
    offline = {"local_files_only": True, "trust_remote_code": False}
    options = {"dtype": torch.float32, "output_loading_info": True}
    if hf_config_reader.read_weight_blocks(hf_dir) is None:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(str(hf_dir), **offline, **options)
        return model, info
    saved, weights = hf_config_reader.read_hf_config(hf_dir), open_hf_weights(hf_dir)
    weights = {name: weights[name] for name in weights.keys() - ignored_names(weights, saved.config)}
    state = {name: x.read().to(stored_dtype(name, x.dtype, cast_to)) for name, x in weights.items()}
    config = transformers.AutoConfig.from_pretrained(str(hf_dir), **offline)
    del config.quantization_config
    model_class = getattr(transformers, TRAINABLE[saved.model_type].class_name)
    model, info = model_class.from_pretrained(None, config=config, state_dict=state, **options)
    return model, info


@contextmanager
def _silence_transformers() -> Iterator[None]:
    """Silence transformers' progress bars, warnings and logs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging: Any = importlib.import_module("transformers.utils.logging")
        level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(level)
            if bars:
                logging.enable_progress_bar()
