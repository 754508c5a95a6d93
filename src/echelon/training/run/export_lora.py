"""Export of a run with LoRA adapters: the adapters in PEFT's format, or the full model with the adapters merged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from echelon import models
from echelon.checkpoint import frozen_weights
from echelon.checkpoint.hf.convert_model import NativeModel
from echelon.checkpoint.hf.convert_tensors import TensorSource, in_memory
from echelon.checkpoint.hf.peft_adapter import PeftExport, merged_state, write_peft_adapter
from echelon.checkpoint.hf.safetensors_reader import open_safetensors
from echelon.checkpoint.hf.safetensors_writer import atomic_directory
from echelon.config.run_config import Config
from echelon.models import user_model
from echelon.models.foreign.hf_source import HF_PREFIX, is_hf_model, read_hf_source
from echelon.models.lora.add_lora import add_adapters
from echelon.models.model_dir import is_model_dir
from echelon.training.engine_options import DTYPES
from echelon.training.run.export_model import TrainedModel
from echelon.training.task import configured_model


def export_adapters(trained: TrainedModel, target: Path, *, dtype: torch.dtype | None = None) -> PeftExport:
    """Write the adapters of a run as PEFT does."""
    config = trained.config
    state = _trained_state(trained, dtype)
    with atomic_directory(target) as folder:
        exported = write_peft_adapter(folder, _shapes_only(config), state, config.lora, base=_base_name(config))
    return PeftExport(**{**vars(exported), "directory": target})


def merged_tensors(trained: TrainedModel) -> dict[str, TensorSource]:
    """Return the full weights of a run, with its adapters merged, under our names."""
    config, model = trained.config, _shapes_only(trained.config)
    base = _base_state(config, model)
    _check_base(trained, model, base)
    buffers = {name: tensor.read() for name, tensor in trained.tensors.items() if name not in _param_names(model)}
    return {name: in_memory(value) for name, value in (_merged(trained, model, base) | buffers).items()}


def merged_native(trained: TrainedModel) -> NativeModel:
    """Return one of our models with its adapters merged."""
    return trained.native[0], merged_tensors(trained)


def _merged(trained: TrainedModel, model: nn.Module, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return merged_state(model, base, _trained_state(trained, None))


def _trained_state(trained: TrainedModel, dtype: torch.dtype | None) -> dict[str, Tensor]:
    names = _param_names(_shapes_only(trained.config))
    state = {name: tensor.read() for name, tensor in trained.tensors.items() if name in names}
    return {name: value if dtype is None else value.to(dtype) for name, value in state.items()}


def _param_names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def _shapes_only(config: Config) -> nn.Module:
    """The run's model with its adapters, on the meta device."""
    if user_model.is_user_model(config.model):
        torch.manual_seed(config.seed)
        model: Any = user_model.load_factory(config.model)()
    elif is_hf_model(config.model):
        from echelon.models.foreign.causal_lm import build_causal_lm

        model = build_causal_lm(read_hf_source(config.model))
    else:
        model = models.build(configured_model(config), "meta")
    adapted: nn.Module = add_adapters(model, config.lora, seed=config.seed)
    return adapted


def _base_name(config: Config) -> str:
    return config.model.removeprefix(HF_PREFIX) if is_hf_model(config.model) else config.model


def _base_state(config: Config, model: Any) -> dict[str, Tensor]:
    """The weights that the run began with, by parameter name, without adapters."""
    if user_model.is_user_model(config.model):
        raise ValueError(
            f"Hugging Face has no architecture for a custom model (model={config.model}); export the adapters alone"
        )
    if is_hf_model(config.model):
        from echelon.checkpoint.hf.foreign_export import initial_state
        from echelon.models.foreign.causal_lm import build_causal_lm

        source = read_hf_source(config.model)
        return initial_state(build_causal_lm(source), source, config.seed)
    if is_model_dir(config.model):
        return {name: tensor.read() for name, tensor in open_safetensors(Path(config.model)).items()}
    plain = models.build(configured_model(config), seed=config.seed)
    return {name: tensor.detach() for name, tensor in plain.state_dict().items()}


def _check_base(trained: TrainedModel, model: nn.Module, base: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless these weights are those under which the adapters were trained."""
    config = trained.config
    if config.precision.keep_fp32:
        return  # some of the weights had another dtype
    frozen = {name: base[name] for name, p in model.named_parameters() if not p.requires_grad}
    actual = {"hash": frozen_weights.hash_of_tensors(frozen, DTYPES[config.dtype]), "dtype": config.dtype}
    frozen_weights.check_frozen_hash(trained.frozen, actual, where=config.model)
