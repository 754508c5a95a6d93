"""Weights of a foreign model: read from its Hugging Face directory slice by slice, and written as such a directory."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from echelon.checkpoint.hf.safetensors_reader import format_names, open_safetensors
from echelon.models.foreign.hf_source import quiet_transformers
from echelon.models.foreign.layer_stack import own_class
from echelon.models.foreign.unfuse import PartTensor

if TYPE_CHECKING:
    from torch import Tensor

    from echelon.models.foreign.causal_lm import ForeignCausalLM
    from echelon.models.foreign.hf_source import HFSource

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "vocab.json"),
    *("merges.txt", "added_tokens.json", "chat_template.jinja", "generation_config.json"),
)


def init_from_hf_dir(model: ForeignCausalLM, source: HFSource) -> str:
    """Initialise a model on the meta device from its directory; return how its weights are read.

    Each rank reads its slices of tensors that lie on disk as the class holds them. Tensors that transformers converts
    when it loads (experts in a file each, names of older releases) are loaded by transformers, whole, on every rank.
    """
    has_tables = any(not buffer.is_floating_point() for buffer in model.buffers())
    stored = open_safetensors(source.folder, integers=has_tables and "quantization_config" not in source.config)
    names = _wanted_names(model)
    found = {name: stored[key] for name in names if (key := _stored_name(name, stored, model)) is not None}
    shapes = {name: tuple(shape) for name, shape in names.items()}
    floats = {name for name, _ in model.named_parameters()} | {part.name for part in model.fused_parts.values()}
    matching: dict[str, Any] = {
        n: tensor
        for n, tensor in found.items()
        if tuple(tensor.shape) == shapes[n] and (tensor.dtype.is_floating_point or n not in floats)
    }
    missing = sorted(set(names) - set(matching))
    if missing:
        matching |= _converted(model, source, missing)
    parts: Mapping[str, Any] = model.fused_parts
    model.weight_source = {
        name: PartTensor(matching[parts[name].name], parts[name]) if name in parts else matching[name]
        for name, _ in model.named_parameters()
    }
    for path, module in model.named_modules():
        for name, _ in list(module.named_buffers(recurse=False)):
            key = f"{path}.{name}"
            if key in matching:
                setattr(module, name, _whole(matching[key]))
    if missing:
        return f"each rank reads its slices; transformers converts {format_names(missing)}"
    return "each rank reads its slices"


def _wanted_names(model: ForeignCausalLM) -> dict[str, tuple[int, ...]]:
    """Names and shapes of transformers' parameters and persistent buffers."""
    parts = model.fused_parts
    wanted: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        part = parts.get(name)
        wanted[part.name if part else name] = tuple(part.shape if part else parameter.shape)
    kept = set(model.state_dict().keys())
    return wanted | {name: tuple(buffer.shape) for name, buffer in model.named_buffers() if name in kept}


def _stored_name(name: str, stored: Mapping[str, Any], model: Any) -> str | None:
    prefix = f"{model.base_model_prefix}."
    for candidate in (name, name.removeprefix(prefix), prefix + name):
        if candidate in stored:
            return candidate
    return None


def _converted(model: Any, source: HFSource, names: list[str]) -> dict[str, Tensor]:
    own = own_class(model)
    with quiet_transformers():
        loaded, info = own.from_pretrained(source.folder, local_files_only=True, output_loading_info=True)
    absent = sorted(set(info["missing_keys"]) & set(names))
    if absent:
        raise ValueError(
            f"weights of the model are missing ({source.folder}: {format_names(absent)}); download the directory again"
        )
    state: dict[str, Tensor] = loaded.state_dict()
    return {name: state[name] for name in names}


def _whole(tensor: Any) -> Tensor:
    values: Tensor = tensor if isinstance(tensor, torch.Tensor) else tensor.read()
    return values


def write_hf_dir(folder: Path, model: Any, state: Mapping[str, Tensor], source: HFSource) -> list[str]:
    """Write the weights under transformers' names as a directory that it loads; return the names of the files.

    `model` is the adapted class; `state` has full tensors under its names.
    """
    import transformers

    own = own_class(model)
    config = transformers.AutoConfig.from_pretrained(source.folder, local_files_only=True)
    config.dtype = next(iter(state.values())).dtype
    with torch.device("meta"):
        plain = own(config)
    merged = merge_parts(state, model.fused_parts)
    if plain.config.tie_word_embeddings:
        merged |= {name: merged[first] for name, first in tied_names(model) if first in merged}
    plain.load_state_dict(merged, assign=True, strict=False)
    plain.save_pretrained(folder, state_dict=merged)
    for name in TOKENIZER_FILES:
        if (source.folder / name).is_file() and not (folder / name).exists():
            shutil.copyfile(source.folder / name, folder / name)
    return sorted(path.name for path in folder.iterdir())


def tied_names(model: Any) -> list[tuple[str, str]]:
    """(other name, first name) of tied parameters."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return [(name, first[id(parameter)]) for name, parameter in every if first[id(parameter)] != name]


def merge_parts(state: Mapping[str, Tensor], parts: Mapping[str, Any]) -> dict[str, Tensor]:
    """Put the parts of fused parameters together again."""
    merged = {name: value for name, value in state.items() if name not in parts}
    by_fused: dict[str, list[str]] = {}
    for name, part in parts.items():
        by_fused.setdefault(part.name, []).append(name)
    for fused, names in by_fused.items():
        names.sort(key=lambda name: parts[name].start)
        merged[fused] = torch.cat([state[name] for name in names], dim=parts[names[0]].dim)
    return merged
