"""PEFT's directory of a LoRA adapter: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from echelon.checkpoint.hf.foreign_weights import merge_parts, tied_names
from echelon.checkpoint.hf.peft_names import (
    Factors,
    LinearMapping,
    factors_of_state,
    linear_mappings,
    state_of_factors,
)
from echelon.checkpoint.hf.safetensors_reader import format_names, open_tensor_file
from echelon.checkpoint.hf.safetensors_writer import SafetensorSpec, write_tensor_file
from echelon.layout.validation_error import ValidationError
from echelon.models.foreign.causal_lm import ForeignCausalLM
from echelon.models.hf.param_names import hf_model_type, param_mappings
from echelon.models.lora.adapter import ADAPTER, iter_adapters
from echelon.models.lora.lora_options import LoRAOptions, lora_scale
from echelon.models.lora.peft_config import CONFIG_FILE, WEIGHTS_FILE, PeftConfig
from echelon.models.model_config import ModelConfig

PREFIX = "base_model.model."
SCALE_TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True)
class PeftExport:
    """What an export of adapters wrote."""

    directory: Path
    base: str
    adapters: int
    modules: int
    """modules that were trained in full"""
    num_bytes: int

    def to_json(self) -> dict[str, object]:
        return {
            "directory": str(self.directory),
            "base": self.base,
            "adapters": self.adapters,
            "modules": self.modules,
            "bytes": self.num_bytes,
            "files": [CONFIG_FILE, WEIGHTS_FILE],
        }

    def __str__(self) -> str:
        full = f" and {self.modules} modules trained in full" if self.modules else ""
        return (
            f"wrote {self.directory}: adapters of {self.adapters} linears{full}, {self.num_bytes:,} bytes\n"
            f"load them with peft.PeftModel.from_pretrained(base, {str(self.directory)!r}); the base is {self.base}"
        )


def write_peft_adapter(
    folder: Path, model: nn.Module, state: Mapping[str, Tensor], options: LoRAOptions, *, base: str
) -> PeftExport:
    """Write the adapters and the modules trained in full of a state, under our names, into an existing directory."""
    factors, mappings = factors_of_state(model, state), linear_mappings(model)
    converted = {mapping.hf: mapping.to_hf(factors) for mapping in mappings}
    trained = {name: value for name, value in state.items() if ADAPTER not in name.split(".")}
    full = _trained_to_hf(model, trained)
    tensors = {name: value for hf, each in converted.items() for name, value in _peft_tensors(hf, each)}
    tensors |= {PREFIX + name: value for name, value in full.items()}
    ranks = {hf: len(each.a) for hf, each in converted.items() if len(each.a) != options.rank}
    modules = sorted({name.rpartition(".")[0] for name in full})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": options.rank,
        "lora_alpha": _plain_number(options.alpha),
        "lora_dropout": options.dropout,
        "use_rslora": options.rslora,
        "bias": "none",
        "fan_in_fan_out": _is_transposed(model),
        "target_modules": sorted(converted),
        "modules_to_save": modules or None,
        "rank_pattern": ranks,
        "alpha_pattern": {hf: _plain_number(_alpha_of_rank(options, rank)) for hf, rank in ranks.items()},
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    specs = [SafetensorSpec(name, tuple(value.shape), value.dtype) for name, value in tensors.items()]
    write_tensor_file(folder / WEIGHTS_FILE, specs, iter(tensors.items()))
    size = sum(spec.num_bytes for spec in specs)
    return PeftExport(directory=folder, base=base, adapters=len(converted), modules=len(modules), num_bytes=size)


def _alpha_of_rank(options: LoRAOptions, rank: int) -> float:
    """The alpha that scales an adapter of another rank as the options scale theirs."""
    return options.scale / lora_scale(1.0, rank, rslora=options.rslora)


def _plain_number(value: float) -> float | int:
    return int(value) if value == int(value) else value


def _peft_tensors(hf: str, factors: Factors) -> Iterator[tuple[str, Tensor]]:
    yield f"{PREFIX}{hf}.lora_A.weight", factors.a
    yield f"{PREFIX}{hf}.lora_B.weight", factors.b


def _is_transposed(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    if isinstance(config, ModelConfig):
        return hf_model_type(config) == "gpt2"
    return any(adapter.output_dim == 1 for _, adapter in iter_adapters(model))


def _trained_to_hf(model: nn.Module, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters of modules that were trained in full, under Hugging Face's names; of each module all of them.

    PEFT replaces each module by a copy of its own, so a tied weight is saved under each of its names.
    """
    config = getattr(model, "config", None)
    if isinstance(model, ForeignCausalLM):
        parts = {name: part for name, part in model.fused_parts.items() if name in trained}
        complete = {part.name for part in parts.values()}
        lacking = [n for n, part in model.fused_parts.items() if part.name in complete and n not in trained]
        _refuse_parts(lacking)
        found = merge_parts(trained, parts)
        found |= {other: found[first] for other, first in tied_names(model) if first in found}
    elif isinstance(config, ModelConfig):
        found = {}
        for mapping in param_mappings(config):
            given = [name for name in mapping.native if name in trained]
            if given:
                _refuse_parts([name for name in mapping.native if name not in trained])
                found.update(zip(mapping.hf, mapping.to_hf([trained[name] for name in mapping.native]), strict=True))
        if config.tied and "embed.weight" in trained:
            found["lm_head.weight"] = trained["embed.weight"]
    else:
        found = dict(trained)
    return found


def _refuse_parts(lacking: Collection[str]) -> None:
    if lacking:
        raise ValueError(
            f"PEFT saves modules whole, and of one only a part was trained (without {format_names(sorted(lacking))}); "
            "train all of them (lora.train), or use --merge"
        )


def load_peft_adapter(model: nn.Module, folder: Path, options: LoRAOptions) -> str:
    """Start the adapters of a model from a directory of PEFT's; return what was read."""
    config = PeftConfig.read(folder)
    stored = {name.removeprefix(PREFIX): value for name, value in open_tensor_file(folder / WEIGHTS_FILE).items()}
    mappings = linear_mappings(model)
    wanted = {f"{mapping.hf}.lora_{side}.weight" for mapping in mappings for side in "AB"}
    missing, unknown = sorted(wanted - stored.keys()), sorted(stored.keys() - wanted)
    if missing or unknown:
        what = [
            *([f"it lacks {format_names(missing, 4)}"] if missing else []),
            *([f"the run has no {format_names(unknown, 4)}"] if unknown else []),
        ]
        raise _refusal(folder, "; ".join(what), "lora.targets of the linears that it adapts")
    factors: dict[str, Factors] = {}
    adapted = [name for name, _ in iter_adapters(model)]
    for mapping in mappings:
        given = Factors(*(stored[f"{mapping.hf}.lora_{side}.weight"].read().float() for side in "AB"))
        _check_scale(folder, config, mapping, len(given.a), options)
        try:
            factors |= mapping.from_hf(given, options.rank, adapted)
        except ValueError as error:
            raise _refusal(folder, f"{error}, and the run rank {options.rank}", f"lora.rank={config.rank}") from None
    _set_values(model, state_of_factors(model, factors), folder)
    return f"from {folder}: adapters of {len(mappings)} linears"


def _check_scale(folder: Path, config: PeftConfig, mapping: LinearMapping, rank: int, options: LoRAOptions) -> None:
    scale = lora_scale(config.alpha_of(mapping.hf), rank, rslora=config.rslora)
    if abs(scale - options.scale) > SCALE_TOLERANCE * options.scale:
        what = f"{mapping.hf} is scaled by {scale:g}, and the run's adapters by {options.scale:g}"
        raise _refusal(folder, what, "the file's lora.alpha and lora.rslora")


def _set_values(model: nn.Module, state: Mapping[str, Tensor], folder: Path) -> None:
    """Give adapters their values, off the meta device: they are small."""
    for name, value in state.items():
        owner, _, attribute = name.rpartition(".")
        module, old = model.get_submodule(owner), model.get_parameter(name)
        if value.shape != old.shape:
            what = f"{name} has shape {tuple(value.shape)}, and the model's is {tuple(old.shape)}"
            raise _refusal(folder, what, "an adapter of this model")
        device = torch.device("cpu") if old.is_meta else old.device
        module.register_parameter(attribute, nn.Parameter(value.to(device, old.dtype)))


def _refusal(folder: Path, message: str, legal: str) -> ValidationError:
    return ValidationError.single("lora.init", str(folder), f"does not fit the run ({message})", legal=legal)


def merged_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float, *, transposed: bool) -> Tensor:
    """The weight of a linear with its adapter added."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    delta = scale * (b.to(wide) @ a.to(wide))
    return (weight.to(wide) + (delta.T if transposed else delta)).to(weight.dtype)


def merged_state(model: nn.Module, base: Mapping[str, Tensor], trained: Mapping[str, Any]) -> dict[str, Tensor]:
    """The full weights under our names: those of the base, with adapters added and trained modules replaced."""
    state = dict(base) | {name: value for name, value in trained.items() if ADAPTER not in name.split(".")}
    for linear, adapter in iter_adapters(model):
        a, names = trained[f"{linear}.{ADAPTER}.A"], [f"{linear}.weight"]
        if names[0] not in state:
            names = [f"{linear}.{index}.weight" for index in range(len(adapter.B))]
        for index, name in enumerate(names):
            b = trained[f"{linear}.{ADAPTER}.B.{index}"]
            state[name] = merged_weight(state[name], a, b, adapter.scale, transposed=adapter.output_dim == 1)
    return state
