"""Our parameters under the names, and in the shapes, that Hugging Face's transformers gives them, and back.

[Note: what differs]

    GPT-2       weights are transposed (Conv1D), and q, k and v are one tensor
    experts     ours are one tensor for all: up [E, 2, ffn, width], the activation's gate first, and
                down [E, width, ffn]. Published files have them one by one; transformers 5 holds them in memory as
                gate_up_proj [E, 2 x ffn, width] and down_proj (`stacked`), and changes them when it loads and saves
    positions   ours turn pairs (i, i + dim/2) of a head, as transformers' Llama, Mixtral and Qwen do. DeepSeek turns
                pairs (2i, 2i + 1): rows that make them change places. Queries and keys change alike, so that their
                products, and all that comes after, stay as they are
    tied        a head that is the embedding has no name there

Angles are made of `ModelConfig.theta`, and stretched as Llama 3.1's are. Where a published config stretches them in
another way (`rope_scaling`), so that longer sequences fit, logits differ.
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
"""masks and angles that older files hold beside the weights"""


def _identity(given: Sequence[Tensor]) -> Sequence[Tensor]:
    return given


@dataclass(frozen=True)
class ParamMapping:
    """Tensors of ours that together are tensors of theirs."""

    native: tuple[str, ...]
    hf: tuple[str, ...]
    to_hf: TensorTransform = _identity
    from_hf: TensorTransform = _identity


def to_hugging_face(state: Mapping[str, Tensor], config: ModelConfig, *, stacked: bool = False) -> dict[str, Tensor]:
    """A whole model's state of ours, as a published file has it, or with experts as transformers 5 holds them."""
    known = {"head.weight"} if config.tied else set()
    return _convert_state(
        state, [(pair.native, pair.hf, pair.to_hf) for pair in param_mappings(config, stacked=stacked)], known, config
    )


def from_hugging_face(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """A state for a model of ours, from one of theirs in either form."""
    state = {missing_prefix(state, config) + name: tensor for name, tensor in state.items()}
    wanted = [
        (pair.hf, pair.native, pair.from_hf) for pair in param_mappings(config, stacked=has_stacked_experts(state))
    ]
    found = _convert_state(state, wanted, ignored_names(state, config), config)
    return {**found, "head.weight": found["embed.weight"]} if config.tied else found


def missing_prefix(names: Iterable[str], config: ModelConfig) -> str:
    """What their names lack: GPT-2 itself was published without the first part."""
    bare = hf_model_type(config) == "gpt2" and not any(name.startswith("transformer.") for name in names)
    return "transformer." if bare else ""


def ignored_names(names: Iterable[str], config: ModelConfig) -> set[str]:
    """Of their names those that a model of ours has no use for, and that may be there or not."""
    found = {name for name in names if name.endswith(NOT_WEIGHTS)}
    if config.tied:
        found |= {"lm_head.weight", "transformer.lm_head.weight"}
    if hf_model_type(config) == "deepseek_v3":
        # The layer behind the last predicts a second token, which is not built here.
        found |= {name for name in names if name.startswith(f"model.layers.{config.layers}.")}
    return found


def has_stacked_experts(names: Iterable[str]) -> bool:
    """Experts as transformers 5 holds them in memory, and not one by one."""
    return any(name.endswith(".experts.gate_up_proj") for name in names)


def hf_model_type(config: ModelConfig) -> str:
    """Their `model_type` for a model of ours. Raises ValueError where they have none that computes the same."""
    mixture = config.moe
    gate = mixture.gate if mixture is not None else ""
    kind = ""
    if config.family == "gpt":
        kind = "gpt2" if mixture is None else ""
    elif config.mla is not None:
        kind = {"": "deepseek_v3", "deepseek-v2": "deepseek_v2", "deepseek-v3": "deepseek_v3"}.get(gate, "")
    elif config.family == "llama" and config.qkv_bias:
        kind = "qwen2" if mixture is None and not (config.qk_norm or config.explicit_head_dim) else ""
    elif config.family == "llama" and config.qk_norm:
        kind = {"": "qwen3", "qwen": "qwen3_moe"}.get(gate, "")
    elif config.family == "llama":
        kind = {"": "llama", "mixtral": "mixtral"}.get(gate, "")
    if mixture is not None and not _moe_matches(mixture, kind):
        kind = ""
    if not kind:
        raise ValueError(
            f"transformers has no model that computes what {config.name} does (family={config.family}, "
            f"gate={gate or 'none'}); names are known for gpt2, llama, qwen2, qwen3, mixtral, qwen3_moe, deepseek_v2 "
            "and _v3"
        )
    return kind


def _moe_matches(mixture: MoEConfig, kind: str) -> bool:
    """Their mixtures have experts of this make in these layers, and shared ones or not."""
    placed = kind == "qwen3_moe" or (mixture.every == 1 and (mixture.dense_layers == 0 or kind != "mixtral"))
    return placed and mixture.activation == "swiglu" and bool(mixture.shared_ffn) == kind.startswith("deepseek")


def param_mappings(config: ModelConfig, *, stacked: bool = False) -> Iterator[ParamMapping]:
    """Every parameter, and every buffer that is kept, once."""
    kind = hf_model_type(config)
    if kind == "gpt2":
        yield from _gpt2_mappings(config)
        return
    yield ParamMapping(("embed.weight",), ("model.embed_tokens.weight",))
    for layer in range(config.layers):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        yield ParamMapping((f"{ours}norm1.weight",), (f"{theirs}input_layernorm.weight",))
        yield ParamMapping((f"{ours}norm2.weight",), (f"{theirs}post_attention_layernorm.weight",))
        ours_attention, theirs_attention = f"{ours}attn.", f"{theirs}self_attn."
        if config.mla is not None:
            yield from _mla_mappings(config.mla, ours_attention, theirs_attention)
        else:
            names = {name: f"{name}_proj" for name in ("q", "k", "v", "o")}
            names |= {"q_norm": "q_norm", "k_norm": "k_norm"} if config.qk_norm else {}
            yield from _weight_mappings(names, ours_attention, theirs_attention)
            if config.qkv_bias:
                for name in ("q", "k", "v"):
                    yield ParamMapping((f"{ours_attention}{name}.bias",), (f"{theirs_attention}{name}_proj.bias",))
        if config.moe is not None and config.moe.is_moe_layer(layer):
            yield from _moe_mappings(config.moe, kind, f"{ours}mlp.", theirs, stacked)
        else:
            yield from _weight_mappings(_MLP, f"{ours}mlp.", f"{theirs}mlp.")
    yield ParamMapping(("norm.weight",), ("model.norm.weight",))
    if not config.tied:
        yield ParamMapping(("head.weight",), ("lm_head.weight",))


_MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def _weight_mappings(names: Mapping[str, str], ours: str, theirs: str) -> Iterator[ParamMapping]:
    for one, other in names.items():
        yield ParamMapping((f"{ours}{one}.weight",), (f"{theirs}{other}.weight",))


# -- GPT-2 ------------------------------------------------------------------------------------------------------------


def _gpt2_mappings(config: ModelConfig) -> Iterator[ParamMapping]:
    yield ParamMapping(("embed.weight",), ("transformer.wte.weight",))
    yield ParamMapping(("positions.weight",), ("transformer.wpe.weight",))
    for layer in range(config.layers):
        ours, theirs = f"blocks.{layer}.", f"transformer.h.{layer}."
        for kind in ("weight", "bias"):
            turned = _transpose if kind == "weight" else _identity
            for one, other in (("norm1", "ln_1"), ("norm2", "ln_2")):
                yield ParamMapping((f"{ours}{one}.{kind}",), (f"{theirs}{other}.{kind}",))
            for one, other in (("attn.o", "attn.c_proj"), ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj")):
                yield ParamMapping((f"{ours}{one}.{kind}",), (f"{theirs}{other}.{kind}",), turned, turned)
            parts = tuple(f"{ours}attn.{part}.{kind}" for part in ("q", "k", "v"))
            yield ParamMapping(
                parts, (f"{theirs}attn.c_attn.{kind}",), partial(_merge_qkv, turned), partial(_split_qkv, turned)
            )
    yield ParamMapping(("norm.weight",), ("transformer.ln_f.weight",))
    yield ParamMapping(("norm.bias",), ("transformer.ln_f.bias",))
    if not config.tied:
        yield ParamMapping(("head.weight",), ("lm_head.weight",))


def _transpose(given: Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensor.T.contiguous() for tensor in given]


def _merge_qkv(turned: TensorTransform, given: Sequence[Tensor]) -> Sequence[Tensor]:
    return turned([torch.cat(tuple(given))])


def _split_qkv(turned: TensorTransform, given: Sequence[Tensor]) -> Sequence[Tensor]:
    return turned(given)[0].chunk(3)


# -- latent attention -------------------------------------------------------------------------------------------------


def _mla_mappings(latent: MLAConfig, ours: str, theirs: str) -> Iterator[ParamMapping]:
    names = {"kv_norm": "kv_a_layernorm", "heads.kv": "kv_b_proj", "o": "o_proj"}
    names |= {"q_down": "q_a_proj", "q_norm": "q_a_layernorm"} if latent.query_rank else {}
    yield from _weight_mappings(names, ours, theirs)
    query = "q_b_proj" if latent.query_rank else "q_proj"
    # Heads of nope and rope rows; and one vector of kv_rank and rope rows.
    for one, other, before in (("heads.q", query, latent.nope_dim), ("kv_down", "kv_a_proj_with_mqa", latent.kv_rank)):
        out, back = (
            partial(_reorder_rope_rows, before, latent.rope_dim, change)
            for change in (_interleave_pairs, _deinterleave_pairs)
        )
        yield ParamMapping((f"{ours}{one}.weight",), (f"{theirs}{other}.weight",), out, back)


def _reorder_rope_rows(
    before: int, turning: int, change: Callable[[Tensor], Tensor], given: Sequence[Tensor]
) -> list[Tensor]:
    """With the last `turning` of every `before + turning` rows in another order."""
    (weight,) = given
    still, turned = weight.unflatten(0, (-1, before + turning)).split((before, turning), dim=1)
    return [torch.cat((still, change(turned)), dim=1).flatten(0, 1)]


def _interleave_pairs(rows: Tensor) -> Tensor:
    """From pairs (i, i + dim/2) along dimension 1 to pairs (2i, 2i + 1)."""
    return rows.view(len(rows), 2, -1, rows.shape[-1]).transpose(1, 2).flatten(1, 2)


def _deinterleave_pairs(rows: Tensor) -> Tensor:
    return rows.view(len(rows), -1, 2, rows.shape[-1]).transpose(1, 2).flatten(1, 2)


# -- mixtures ---------------------------------------------------------------------------------------------------------


def _moe_mappings(mixture: MoEConfig, kind: str, ours: str, layer: str, stacked: bool) -> Iterator[ParamMapping]:
    published = kind == "mixtral" and not stacked
    theirs = f"{layer}block_sparse_moe." if published else f"{layer}mlp."
    yield ParamMapping((f"{ours}gate.weight",), (f"{theirs}gate.weight",))
    if kind == "deepseek_v3":
        yield ParamMapping((f"{ours}gate.bias",), (f"{theirs}gate.e_score_correction_bias",))
    if mixture.shared_ffn:
        yield from _weight_mappings(_MLP, f"{ours}shared.", f"{theirs}shared_experts.")
    if stacked:
        yield ParamMapping((f"{ours}experts.up",), (f"{theirs}experts.gate_up_proj",), _flatten_gate_up, _split_gate_up)
        yield ParamMapping((f"{ours}experts.down",), (f"{theirs}experts.down_proj",))
        return
    gate, up, down = ("w1", "w3", "w2") if published else tuple(_MLP.values())
    each = [f"{theirs}experts.{expert}." for expert in range(mixture.experts)]
    both = tuple(f"{expert}{name}.weight" for expert in each for name in (gate, up))
    yield ParamMapping((f"{ours}experts.up",), both, lambda given: given[0].flatten(0, 1).unbind(), _stack_gate_up)
    downs = tuple(f"{expert}{down}.weight" for expert in each)
    yield ParamMapping((f"{ours}experts.down",), downs, lambda given: given[0].unbind(), _stack_experts)


def _flatten_gate_up(given: Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensor.flatten(1, 2) for tensor in given]


def _split_gate_up(given: Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensor.unflatten(1, (2, -1)) for tensor in given]


def _stack_experts(given: Sequence[Tensor]) -> Sequence[Tensor]:
    return [torch.stack(tuple(given))]


def _stack_gate_up(given: Sequence[Tensor]) -> Sequence[Tensor]:
    return [torch.stack(tuple(given)).unflatten(0, (-1, 2))]


# -- a whole state ----------------------------------------------------------------------------------------------------


def _convert_state(
    state: Mapping[str, Tensor],
    wanted: Sequence[tuple[tuple[str, ...], tuple[str, ...], TensorTransform]],
    known: set[str],
    config: ModelConfig,
) -> dict[str, Tensor]:
    """`known` names may be there or not, and are not looked at."""
    read = {name for source, _, _ in wanted for name in source}
    missing, left = sorted(read - set(state)), sorted(set(state) - read - known)
    problems = [
        f"{what}: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
        for what, names in (("missing", missing), ("not known", left))
        if names
    ]
    if problems:
        raise ValueError(
            f"the weights are not those of {config.name} ({'; '.join(problems)}); use the size they are of"
        )
    found: dict[str, Tensor] = {}
    for source, target, change in wanted:
        found.update(zip(target, change([state[name] for name in source]), strict=True))
    return found
