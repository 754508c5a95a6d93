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

from echelon.models.mla_config import LatentConfig
from echelon.models.model_config import ModelConfig
from echelon.models.moe_config import MixtureConfig

Change = Callable[[Sequence[Tensor]], Sequence[Tensor]]

NOT_WEIGHTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""masks and angles that older files hold beside the weights"""


def _same(given: Sequence[Tensor]) -> Sequence[Tensor]:
    return given


@dataclass(frozen=True)
class Pair:
    """Tensors of ours that together are tensors of theirs."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    out: Change = _same
    back: Change = _same


def to_hugging_face(state: Mapping[str, Tensor], config: ModelConfig, *, stacked: bool = False) -> dict[str, Tensor]:
    """A whole model's state of ours, as a published file has it, or with experts as transformers 5 holds them."""
    known = {"head.weight"} if config.tied else set()
    return _converted(
        state, [(pair.ours, pair.theirs, pair.out) for pair in pairs(config, stacked=stacked)], known, config
    )


def from_hugging_face(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """A state for a model of ours, from one of theirs in either form."""
    state = {prefix(state, config) + name: tensor for name, tensor in state.items()}
    wanted = [(pair.theirs, pair.ours, pair.back) for pair in pairs(config, stacked=is_stacked(state))]
    found = _converted(state, wanted, beside(state, config), config)
    return {**found, "head.weight": found["embed.weight"]} if config.tied else found


def prefix(names: Iterable[str], config: ModelConfig) -> str:
    """What their names lack: GPT-2 itself was published without the first part."""
    bare = architecture(config) == "gpt2" and not any(name.startswith("transformer.") for name in names)
    return "transformer." if bare else ""


def beside(names: Iterable[str], config: ModelConfig) -> set[str]:
    """Of their names those that a model of ours has no use for, and that may be there or not."""
    found = {name for name in names if name.endswith(NOT_WEIGHTS)}
    if config.tied:
        found |= {"lm_head.weight", "transformer.lm_head.weight"}
    if architecture(config) == "deepseek_v3":
        # The layer behind the last predicts a second token, which is not built here.
        found |= {name for name in names if name.startswith(f"model.layers.{config.layers}.")}
    return found


def is_stacked(names: Iterable[str]) -> bool:
    """Experts as transformers 5 holds them in memory, and not one by one."""
    return any(name.endswith(".experts.gate_up_proj") for name in names)


def architecture(config: ModelConfig) -> str:
    """Their `model_type` for a model of ours. Raises ValueError where they have none that computes the same."""
    mixture = config.mixture
    gate = mixture.gate if mixture is not None else ""
    kind = ""
    if config.family == "gpt":
        kind = "gpt2" if mixture is None else ""
    elif config.latent is not None:
        kind = {"": "deepseek_v3", "deepseek-v2": "deepseek_v2", "deepseek-v3": "deepseek_v3"}.get(gate, "")
    elif config.family == "llama" and config.qkv_bias:
        kind = "qwen2" if mixture is None and not (config.head_norms or config.own_head_dim) else ""
    elif config.family == "llama" and config.head_norms:
        kind = {"": "qwen3", "qwen": "qwen3_moe"}.get(gate, "")
    elif config.family == "llama":
        kind = {"": "llama", "mixtral": "mixtral"}.get(gate, "")
    if mixture is not None and not _plain(mixture, kind):
        kind = ""
    if not kind:
        raise ValueError(
            f"transformers has no model that computes what {config.name} does (family={config.family}, "
            f"gate={gate or 'none'}); names are known for gpt2, llama, qwen2, qwen3, mixtral, qwen3_moe, deepseek_v2 "
            "and _v3"
        )
    return kind


def _plain(mixture: MixtureConfig, kind: str) -> bool:
    """Their mixtures have experts of this make in these layers, and shared ones or not."""
    placed = kind == "qwen3_moe" or (mixture.every == 1 and (mixture.dense == 0 or kind != "mixtral"))
    return placed and mixture.activation == "swiglu" and bool(mixture.shared) == kind.startswith("deepseek")


def pairs(config: ModelConfig, *, stacked: bool = False) -> Iterator[Pair]:
    """Every parameter, and every buffer that is kept, once."""
    kind = architecture(config)
    if kind == "gpt2":
        yield from _gpt2(config)
        return
    yield Pair(("embed.weight",), ("model.embed_tokens.weight",))
    for layer in range(config.layers):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        yield Pair((f"{ours}norm1.weight",), (f"{theirs}input_layernorm.weight",))
        yield Pair((f"{ours}norm2.weight",), (f"{theirs}post_attention_layernorm.weight",))
        ours_attention, theirs_attention = f"{ours}attn.", f"{theirs}self_attn."
        if config.latent is not None:
            yield from _latent(config.latent, ours_attention, theirs_attention)
        else:
            names = {name: f"{name}_proj" for name in ("q", "k", "v", "o")}
            names |= {"q_norm": "q_norm", "k_norm": "k_norm"} if config.head_norms else {}
            yield from _renamed(names, ours_attention, theirs_attention)
            if config.qkv_bias:
                for name in ("q", "k", "v"):
                    yield Pair((f"{ours_attention}{name}.bias",), (f"{theirs_attention}{name}_proj.bias",))
        if config.mixture is not None and config.mixture.is_mixture(layer):
            yield from _mixture(config.mixture, kind, f"{ours}mlp.", theirs, stacked)
        else:
            yield from _renamed(_MLP, f"{ours}mlp.", f"{theirs}mlp.")
    yield Pair(("norm.weight",), ("model.norm.weight",))
    if not config.tied:
        yield Pair(("head.weight",), ("lm_head.weight",))


_MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def _renamed(names: Mapping[str, str], ours: str, theirs: str) -> Iterator[Pair]:
    for one, other in names.items():
        yield Pair((f"{ours}{one}.weight",), (f"{theirs}{other}.weight",))


# -- GPT-2 ------------------------------------------------------------------------------------------------------------


def _gpt2(config: ModelConfig) -> Iterator[Pair]:
    yield Pair(("embed.weight",), ("transformer.wte.weight",))
    yield Pair(("positions.weight",), ("transformer.wpe.weight",))
    for layer in range(config.layers):
        ours, theirs = f"blocks.{layer}.", f"transformer.h.{layer}."
        for kind in ("weight", "bias"):
            turned = _transposed if kind == "weight" else _same
            for one, other in (("norm1", "ln_1"), ("norm2", "ln_2")):
                yield Pair((f"{ours}{one}.{kind}",), (f"{theirs}{other}.{kind}",))
            for one, other in (("attn.o", "attn.c_proj"), ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj")):
                yield Pair((f"{ours}{one}.{kind}",), (f"{theirs}{other}.{kind}",), turned, turned)
            parts = tuple(f"{ours}attn.{part}.{kind}" for part in ("q", "k", "v"))
            yield Pair(parts, (f"{theirs}attn.c_attn.{kind}",), partial(_one, turned), partial(_three, turned))
    yield Pair(("norm.weight",), ("transformer.ln_f.weight",))
    yield Pair(("norm.bias",), ("transformer.ln_f.bias",))
    if not config.tied:
        yield Pair(("head.weight",), ("lm_head.weight",))


def _transposed(given: Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensor.T.contiguous() for tensor in given]


def _one(turned: Change, given: Sequence[Tensor]) -> Sequence[Tensor]:
    return turned([torch.cat(tuple(given))])


def _three(turned: Change, given: Sequence[Tensor]) -> Sequence[Tensor]:
    return turned(given)[0].chunk(3)


# -- latent attention -------------------------------------------------------------------------------------------------


def _latent(latent: LatentConfig, ours: str, theirs: str) -> Iterator[Pair]:
    names = {"kv_norm": "kv_a_layernorm", "heads.kv": "kv_b_proj", "o": "o_proj"}
    names |= {"q_down": "q_a_proj", "q_norm": "q_a_layernorm"} if latent.query_rank else {}
    yield from _renamed(names, ours, theirs)
    query = "q_b_proj" if latent.query_rank else "q_proj"
    # Heads of nope and rope rows; and one vector of kv_rank and rope rows.
    for one, other, before in (("heads.q", query, latent.nope_dim), ("kv_down", "kv_a_proj_with_mqa", latent.kv_rank)):
        out, back = (partial(_turning, before, latent.rope_dim, change) for change in (_side_by_side, _apart))
        yield Pair((f"{ours}{one}.weight",), (f"{theirs}{other}.weight",), out, back)


def _turning(before: int, turning: int, change: Callable[[Tensor], Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """With the last `turning` of every `before + turning` rows in another order."""
    (weight,) = given
    still, turned = weight.unflatten(0, (-1, before + turning)).split((before, turning), dim=1)
    return [torch.cat((still, change(turned)), dim=1).flatten(0, 1)]


def _side_by_side(rows: Tensor) -> Tensor:
    """From pairs (i, i + dim/2) along dimension 1 to pairs (2i, 2i + 1)."""
    return rows.view(len(rows), 2, -1, rows.shape[-1]).transpose(1, 2).flatten(1, 2)


def _apart(rows: Tensor) -> Tensor:
    return rows.view(len(rows), -1, 2, rows.shape[-1]).transpose(1, 2).flatten(1, 2)


# -- mixtures ---------------------------------------------------------------------------------------------------------


def _mixture(mixture: MixtureConfig, kind: str, ours: str, layer: str, stacked: bool) -> Iterator[Pair]:
    published = kind == "mixtral" and not stacked
    theirs = f"{layer}block_sparse_moe." if published else f"{layer}mlp."
    yield Pair((f"{ours}gate.weight",), (f"{theirs}gate.weight",))
    if kind == "deepseek_v3":
        yield Pair((f"{ours}gate.bias",), (f"{theirs}gate.e_score_correction_bias",))
    if mixture.shared:
        yield from _renamed(_MLP, f"{ours}shared.", f"{theirs}shared_experts.")
    if stacked:
        yield Pair((f"{ours}experts.up",), (f"{theirs}experts.gate_up_proj",), _flat, _halves)
        yield Pair((f"{ours}experts.down",), (f"{theirs}experts.down_proj",))
        return
    gate, up, down = ("w1", "w3", "w2") if published else tuple(_MLP.values())
    each = [f"{theirs}experts.{expert}." for expert in range(mixture.experts)]
    both = tuple(f"{expert}{name}.weight" for expert in each for name in (gate, up))
    yield Pair((f"{ours}experts.up",), both, lambda given: given[0].flatten(0, 1).unbind(), _expert_pairs)
    downs = tuple(f"{expert}{down}.weight" for expert in each)
    yield Pair((f"{ours}experts.down",), downs, lambda given: given[0].unbind(), _stacked)


def _flat(given: Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensor.flatten(1, 2) for tensor in given]


def _halves(given: Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensor.unflatten(1, (2, -1)) for tensor in given]


def _stacked(given: Sequence[Tensor]) -> Sequence[Tensor]:
    return [torch.stack(tuple(given))]


def _expert_pairs(given: Sequence[Tensor]) -> Sequence[Tensor]:
    return [torch.stack(tuple(given)).unflatten(0, (-1, 2))]


# -- a whole state ----------------------------------------------------------------------------------------------------


def _converted(
    state: Mapping[str, Tensor],
    wanted: Sequence[tuple[tuple[str, ...], tuple[str, ...], Change]],
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
