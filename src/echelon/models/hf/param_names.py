"""Maps our parameters to the names and shapes of Hugging Face's transformers, and back.

[Note: what differs]

    GPT-2       weights are transposed (Conv1D), and q, k and v are one tensor
    experts     ours are one tensor for all: up [E, 2, ffn, width], the activation's gate first, and
                down [E, width, ffn]. Published files have one tensor per expert; transformers 5 holds them in memory as
                gate_up_proj [E, 2 x ffn, width] and down_proj (`stacked`), and converts on load and save
    RoPE        ours rotates pairs (i, i + dim/2) of a head, as transformers' Llama, Mixtral and Qwen do. DeepSeek
                rotates pairs (2i, 2i + 1): the rows that produce them are reordered. Queries and keys are reordered
                alike, so that the scores do not change
    tied        a head that shares the embedding has no name there

Frequencies follow `ModelConfig.theta` and its `rope_scaling` (attention_config.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from echelon.models.attention_config import MLAConfig
from echelon.models.model_config import ModelConfig
from echelon.models.moe_config import MoEConfig

TensorTransform = Callable[[Sequence[Tensor]], Sequence[Tensor]]

NOT_WEIGHTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""buffers of older files: masks and RoPE frequencies"""


def _identity(given: Sequence[Tensor]) -> Sequence[Tensor]:
    return given


@dataclass(frozen=True)
class ParamMapping:
    """Native tensors that together are the Hugging Face tensors."""

    native: tuple[str, ...]
    hf: tuple[str, ...]
    to_hf: TensorTransform = _identity
    from_hf: TensorTransform = _identity


def to_hugging_face(state: Mapping[str, Tensor], config: ModelConfig, *, stacked: bool = False) -> dict[str, Tensor]:
    """A full native state dict under Hugging Face names, as published or with stacked experts (transformers 5)."""
    wanted = [(pair.native, pair.hf, pair.to_hf) for pair in param_mappings(config, stacked=stacked)]
    return _convert_state(state, wanted, {"head.weight"} if config.tied else set(), config)


def from_hugging_face(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """A full native state dict from a Hugging Face one in either form."""
    state = {missing_prefix(state, config) + name: tensor for name, tensor in state.items()}
    mappings = param_mappings(config, stacked=has_stacked_experts(state))
    wanted = [(pair.hf, pair.native, pair.from_hf) for pair in mappings]
    result = _convert_state(state, wanted, ignored_names(state, config), config)
    return {**result, "head.weight": result["embed.weight"]} if config.tied else result


def missing_prefix(names: Iterable[str], config: ModelConfig) -> str:
    """The prefix that the names lack: GPT-2 was published without it."""
    bare = hf_model_type(config) == "gpt2" and not any(name.startswith("transformer.") for name in names)
    return "transformer." if bare else ""


def ignored_names(names: Iterable[str], config: ModelConfig) -> set[str]:
    """Optional Hugging Face names that our models do not read."""
    result = {name for name in names if name.endswith(NOT_WEIGHTS)}
    if config.tied:
        result |= {"lm_head.weight", "transformer.lm_head.weight"}
    if hf_model_type(config) == "deepseek_v3":
        # The layer after the last is for multi-token prediction, which our models do not have.
        result |= {name for name in names if name.startswith(f"model.layers.{config.layers}.")}
    return result


def has_stacked_experts(names: Iterable[str]) -> bool:
    """Whether experts are stacked, as transformers 5 holds them in memory."""
    return any(name.endswith(".experts.gate_up_proj") for name in names)


def hf_model_type(config: ModelConfig) -> str:
    """The Hugging Face `model_type` that computes the same. Raises ValueError if there is none."""
    moe = config.moe
    gate = moe.gate if moe is not None else ""
    model_type = ""
    if config.family == "gpt":
        model_type = "gpt2" if moe is None else ""
    elif config.mla is not None:
        model_type = {"": "deepseek_v3", "deepseek-v2": "deepseek_v2", "deepseek-v3": "deepseek_v3"}.get(gate, "")
    elif config.family == "llama" and config.qkv_bias:
        model_type = "qwen2" if moe is None and not (config.qk_norm or config.explicit_head_dim) else ""
    elif config.family == "llama" and config.qk_norm:
        model_type = {"": "qwen3", "qwen": "qwen3_moe"}.get(gate, "")
    elif config.family == "llama":
        model_type = {"": "llama", "mixtral": "mixtral"}.get(gate, "")
    if moe is not None and not _moe_matches(moe, model_type):
        model_type = ""
    if not model_type:
        raise ValueError(
            f"transformers has no model that computes {config.name} (family={config.family}, gate={gate or 'none'}); "
            "names are known for gpt2, llama, qwen2, qwen3, mixtral, qwen3_moe, deepseek_v2 and _v3"
        )
    return model_type


def _moe_matches(moe: MoEConfig, model_type: str) -> bool:
    """Whether transformers has MoE layers with these experts at these places."""
    placed = model_type == "qwen3_moe" or (moe.every == 1 and (moe.dense_layers == 0 or model_type != "mixtral"))
    return placed and moe.activation == "swiglu" and bool(moe.shared_ffn) == model_type.startswith("deepseek")


def param_mappings(config: ModelConfig, *, stacked: bool = False) -> Iterator[ParamMapping]:
    """Every parameter and persistent buffer, once."""
    model_type = hf_model_type(config)
    if model_type == "gpt2":
        yield from _gpt2_mappings(config)
        return
    yield ParamMapping(("embed.weight",), ("model.embed_tokens.weight",))
    for layer in range(config.layers):
        native, hf = f"blocks.{layer}.", f"model.layers.{layer}."
        yield ParamMapping((f"{native}norm1.weight",), (f"{hf}input_layernorm.weight",))
        yield ParamMapping((f"{native}norm2.weight",), (f"{hf}post_attention_layernorm.weight",))
        native_attention, hf_attention = f"{native}attn.", f"{hf}self_attn."
        if config.mla is not None:
            yield from _mla_mappings(config.mla, native_attention, hf_attention)
        else:
            names = {name: f"{name}_proj" for name in ("q", "k", "v", "o")}
            names |= {"q_norm": "q_norm", "k_norm": "k_norm"} if config.qk_norm else {}
            yield from _weight_mappings(names, native_attention, hf_attention)
            if config.qkv_bias:
                for name in ("q", "k", "v"):
                    yield ParamMapping((f"{native_attention}{name}.bias",), (f"{hf_attention}{name}_proj.bias",))
        if config.moe is not None and config.moe.is_moe_layer(layer):
            yield from _moe_mappings(config.moe, model_type, f"{native}mlp.", hf, stacked)
        else:
            yield from _weight_mappings(_MLP, f"{native}mlp.", f"{hf}mlp.")
    yield ParamMapping(("norm.weight",), ("model.norm.weight",))
    if not config.tied:
        yield ParamMapping(("head.weight",), ("lm_head.weight",))


_MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def _weight_mappings(names: Mapping[str, str], native: str, hf: str) -> Iterator[ParamMapping]:
    for one, other in names.items():
        yield ParamMapping((f"{native}{one}.weight",), (f"{hf}{other}.weight",))


# -- GPT-2 ------------------------------------------------------------------------------------------------------------


def _gpt2_mappings(config: ModelConfig) -> Iterator[ParamMapping]:
    yield ParamMapping(("embed.weight",), ("transformer.wte.weight",))
    yield ParamMapping(("positions.weight",), ("transformer.wpe.weight",))
    for layer in range(config.layers):
        native, hf = f"blocks.{layer}.", f"transformer.h.{layer}."
        for attribute in ("weight", "bias"):
            transform = _transpose if attribute == "weight" else _identity
            for one, other in (("norm1", "ln_1"), ("norm2", "ln_2")):
                yield ParamMapping((f"{native}{one}.{attribute}",), (f"{hf}{other}.{attribute}",))
            for one, other in (("attn.o", "attn.c_proj"), ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj")):
                yield ParamMapping((f"{native}{one}.{attribute}",), (f"{hf}{other}.{attribute}",), transform, transform)
            qkv = tuple(f"{native}attn.{part}.{attribute}" for part in ("q", "k", "v"))
            merge, split = partial(_merge_qkv, transform), partial(_split_qkv, transform)
            yield ParamMapping(qkv, (f"{hf}attn.c_attn.{attribute}",), merge, split)
    yield ParamMapping(("norm.weight",), ("transformer.ln_f.weight",))
    yield ParamMapping(("norm.bias",), ("transformer.ln_f.bias",))
    if not config.tied:
        yield ParamMapping(("head.weight",), ("lm_head.weight",))


def _transpose(given: Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensor.T.contiguous() for tensor in given]


def _merge_qkv(transform: TensorTransform, given: Sequence[Tensor]) -> Sequence[Tensor]:
    return transform([torch.cat(tuple(given))])


def _split_qkv(transform: TensorTransform, given: Sequence[Tensor]) -> Sequence[Tensor]:
    return transform(given)[0].chunk(3)


# -- MLA --------------------------------------------------------------------------------------------------------------


def _mla_mappings(latent: MLAConfig, native: str, hf: str) -> Iterator[ParamMapping]:
    names = {"kv_norm": "kv_a_layernorm", "heads.kv": "kv_b_proj", "o": "o_proj"}
    names |= {"q_down": "q_a_proj", "q_norm": "q_a_layernorm"} if latent.query_rank else {}
    yield from _weight_mappings(names, native, hf)
    query = "q_b_proj" if latent.query_rank else "q_proj"
    # `q` has heads of nope and rope rows, `kv_down` one latent of kv_rank and rope rows.
    for one, other, before in (("heads.q", query, latent.nope_dim), ("kv_down", "kv_a_proj_with_mqa", latent.kv_rank)):
        reorder = partial(_reorder_rope_rows, before, latent.rope_dim)
        to_hf, from_hf = partial(reorder, _interleave_pairs), partial(reorder, _deinterleave_pairs)
        yield ParamMapping((f"{native}{one}.weight",), (f"{hf}{other}.weight",), to_hf, from_hf)


def _reorder_rope_rows(
    before: int, rotated: int, reorder: Callable[[Tensor], Tensor], given: Sequence[Tensor]
) -> list[Tensor]:
    """Reorder the last `rotated` of every `before + rotated` rows."""
    (weight,) = given
    fixed, rope = weight.unflatten(0, (-1, before + rotated)).split((before, rotated), dim=1)
    return [torch.cat((fixed, reorder(rope)), dim=1).flatten(0, 1)]


def _interleave_pairs(rows: Tensor) -> Tensor:
    """From pairs (i, i + dim/2) along dimension 1 to pairs (2i, 2i + 1)."""
    return rows.view(len(rows), 2, -1, rows.shape[-1]).transpose(1, 2).flatten(1, 2)


def _deinterleave_pairs(rows: Tensor) -> Tensor:
    return rows.view(len(rows), -1, 2, rows.shape[-1]).transpose(1, 2).flatten(1, 2)


# -- MoE layers -------------------------------------------------------------------------------------------------------


def _moe_mappings(moe: MoEConfig, model_type: str, native: str, layer: str, stacked: bool) -> Iterator[ParamMapping]:
    published = model_type == "mixtral" and not stacked
    hf = f"{layer}block_sparse_moe." if published else f"{layer}mlp."
    yield ParamMapping((f"{native}gate.weight",), (f"{hf}gate.weight",))
    if model_type == "deepseek_v3":
        yield ParamMapping((f"{native}gate.bias",), (f"{hf}gate.e_score_correction_bias",))
    if moe.shared_ffn:
        yield from _weight_mappings(_MLP, f"{native}shared.", f"{hf}shared_experts.")
    if stacked:
        yield ParamMapping((f"{native}experts.up",), (f"{hf}experts.gate_up_proj",), _flatten_gate_up, _split_gate_up)
        yield ParamMapping((f"{native}experts.down",), (f"{hf}experts.down_proj",))
        return
    gate, up, down = ("w1", "w3", "w2") if published else tuple(_MLP.values())
    each = [f"{hf}experts.{expert}." for expert in range(moe.experts)]
    both = tuple(f"{expert}{name}.weight" for expert in each for name in (gate, up))
    yield ParamMapping((f"{native}experts.up",), both, lambda given: given[0].flatten(0, 1).unbind(), _stack_gate_up)
    downs = tuple(f"{expert}{down}.weight" for expert in each)
    yield ParamMapping((f"{native}experts.down",), downs, lambda given: given[0].unbind(), _stack_experts)


def _flatten_gate_up(given: Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensor.flatten(1, 2) for tensor in given]


def _split_gate_up(given: Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensor.unflatten(1, (2, -1)) for tensor in given]


def _stack_experts(given: Sequence[Tensor]) -> Sequence[Tensor]:
    return [torch.stack(tuple(given))]


def _stack_gate_up(given: Sequence[Tensor]) -> Sequence[Tensor]:
    return [torch.stack(tuple(given)).unflatten(0, (-1, 2))]


# -- full state dicts -------------------------------------------------------------------------------------------------


def _convert_state(
    state: Mapping[str, Tensor],
    wanted: Sequence[tuple[tuple[str, ...], tuple[str, ...], TensorTransform]],
    ignored: set[str],
    config: ModelConfig,
) -> dict[str, Tensor]:
    """Convert a state dict. Names in `ignored` are optional and not read."""
    read = {name for source, _, _ in wanted for name in source}
    missing, unknown = sorted(read - set(state)), sorted(set(state) - read - ignored)
    problems = [
        f"{what}: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
        for what, names in (("missing", missing), ("unknown", unknown))
        if names
    ]
    if problems:
        raise ValueError(f"the weights do not match {config.name} ({'; '.join(problems)}); use the matching size")
    result: dict[str, Tensor] = {}
    for source, target, change in wanted:
        result.update(zip(target, change([state[name] for name in source]), strict=True))
    return result
