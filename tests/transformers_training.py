"""transformers' own models, in float64 and trained by a plain torch loop: a reference that shares no code with ours.

What the loop adds to transformers is written here from the papers: the balance losses per layer and sequence, which are
transformers' own where it has them, and the bias of DeepSeek-V3's router. Nothing is downloaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hugging_face_models import MODELS
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.models.hf import hf_config_reader
from echelon.models.hf.param_names import from_hugging_face
from echelon.models.model_config import ModelConfig

STEPS, ROWS, LENGTH, VOCAB = 3, 4, 12, 97
LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 1e-2, (0.9, 0.95), 1e-8, 0.1, 1.0
AUX_LOSS_COEF = 0.07
"""of all MoE layers together, as transformers' configs have it"""
V2_BALANCE = {"experts": 0.003, "devices": 0.05, "communication": 0.02}
V3_BALANCE = 0.0001
BIAS_SPEED = 0.05
"""fifty times DeepSeek's: three steps then change the choices"""

_LLAMA, _LATENT = MODELS["llama"][1], MODELS["deepseek_v3"][1]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **MODELS,
    # Neither is imported. Phi-3 is Llama with fused projections, dots.llm1 has Qwen3's attention and DeepSeek-V3's MoE.
    "phi3": ("phi3", {**_LLAMA, "pad_token_id": VOCAB - 1}),
    "dots1": (
        "dots1",
        {key: _LATENT[key] for key in _LATENT if "head_dim" not in key and "lora" not in key}
        | {"num_key_value_heads": 2, "layer_types": ["full_attention"] * 2},
    ),
    # The other choice of every gate.
    "mixtral one expert": ("mixtral", {**MODELS["mixtral"][1], "num_experts_per_tok": 1}),
    "qwen3_moe raw weights": ("qwen3_moe", {**MODELS["qwen3_moe"][1], "norm_topk_prob": False, "mlp_only_layers": []}),
    "deepseek_v2 greedy": ("deepseek_v2", {**MODELS["deepseek_v2"][1], "topk_method": "greedy", "q_lora_rank": None}),
    "deepseek_v3 raw weights": ("deepseek_v3", {**_LATENT, "norm_topk_prob": False, "q_lora_rank": 12}),
}


class WidenToFloat64(TorchFunctionMode):
    """Turns every cast to float32 into one to float64: norms, rotations, routers and softmax of transformers cast."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        return func(*map(_widen, args), **{key: _widen(value) for key, value in (kwargs or {}).items()})


def _widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


class RefuseNarrowFloats(TorchDispatchMode):
    """Fails at the first operation, in forward or backward, whose result is a float of less than 64 bits."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for result in out if isinstance(out, tuple | list) else (out,):
            if isinstance(result, Tensor) and result.is_floating_point():
                assert result.dtype == torch.float64, f"{func} computes in {result.dtype}"
        return out


@contextmanager
def float64_everywhere() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with WidenToFloat64(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class Trained:
    """What three steps of training give, under our names."""

    config: ModelConfig
    state: dict[str, Tensor]
    """weights and buffers before the first step"""
    gradients: dict[str, Tensor]
    """of the first step, before clipping"""
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    """weights and buffers after the last step"""


def batches() -> list[dict[str, Tensor]]:
    """Sequences of which some targets do not count, not as many in each."""
    source, made = torch.Generator().manual_seed(5), []
    for _ in range(STEPS):
        # transformers gives the embedding of a padding token, the last one, no gradient.
        tokens, targets = (torch.randint(VOCAB - 1, (ROWS, LENGTH), generator=source) for _ in range(2))
        targets[torch.rand(ROWS, LENGTH, generator=source) < torch.tensor([[0.0], [0.2], [0.4], [0.8]])] = -100
        made.append({"tokens": tokens, "targets": targets})
    return made


def build_float64(name: str) -> Any:
    """A small random model of transformers, with larger weights than the first ones, so that every path matters."""
    transformers = pytest.importorskip("transformers")
    kind, values = FAMILIES[name]
    if kind == "gpt2":
        values = values | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    if kind in ("mixtral", "qwen3_moe"):
        values = values | {"router_aux_loss_coef": AUX_LOSS_COEF}
    with float64_everywhere():
        config = transformers.AutoConfig.for_model(kind, **values)
        # Plain torch operations: no fused attention, one expert after another.
        options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float64}
        model = transformers.AutoModelForCausalLM.from_config(config, **options)
        with torch.no_grad():
            for index, (_, tensor) in enumerate(sorted(model.state_dict().items())):
                noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(index))
                tensor.mul_(4).add_(0.1 * noise) if tensor.dim() > 1 else tensor.add_(0.3 * noise)
            model.tie_weights()
    return model.train()


def our_config(name: str, model: Any) -> ModelConfig:
    """The import's own reading of transformers' config."""
    given = model.config.to_dict()
    if name == "phi3":
        given |= {"model_type": "llama", "architectures": None}
    if name == "dots1":
        given |= {"model_type": "deepseek_v3", "architectures": None, "rms_norm_eps": 1e-6}
        given |= {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    config = hf_config_reader.parse_hf_config(given, name).config
    if name == "dots1":
        config = replace(config, mla=None, qk_norm=True, kv_heads=2)
    if config.moe is not None and config.moe.gate == "deepseek-v3":
        config = replace(config, moe=replace(config.moe, options=(*config.moe.options, ("speed", BIAS_SPEED))))
    return config


def our_names(name: str, tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Weights or gradients of transformers' model under our names: the import only moves elements."""
    if name == "dots1":
        return dict(_dots1_tensor(key, tensor) for key, tensor in tensors.items())
    if name == "phi3":
        tensors = dict(pair for key, tensor in tensors.items() for pair in _phi3_tensors(key, tensor, config))
    return from_hugging_face(tensors, config)


def _phi3_tensors(name: str, tensor: Tensor, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    keys = config.kv_heads * config.head_dim
    if name.endswith("qkv_proj.weight"):
        for part, rows in zip("qkv", tensor.split((config.heads * config.head_dim, keys, keys)), strict=True):
            yield name.replace("qkv_proj", f"{part}_proj"), rows
    elif name.endswith("gate_up_proj.weight"):
        for part, rows in zip(("gate", "up"), tensor.chunk(2), strict=True):
            yield name.replace("gate_up_proj", f"{part}_proj"), rows
    else:
        yield name, tensor


_DOTS1 = {
    "experts.gate_up_proj": "experts.up",
    "experts.down_proj": "experts.down",
    "shared_experts": "shared",
    "gate.e_score_correction_bias": "gate.bias",
    "_proj": "",
    "model.embed_tokens": "embed",
    "model.layers": "blocks",
    "model.norm": "norm",
    "lm_head": "head",
    "self_attn": "attn",
    "input_layernorm": "norm1",
    "post_attention_layernorm": "norm2",
}


def _dots1_tensor(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    tensor = tensor.unflatten(1, (2, -1)) if name.endswith("experts.gate_up_proj") else tensor
    for one, other in _DOTS1.items():
        name = name.replace(one, other)
    return name, tensor


# -- the training loop ------------------------------------------------------------------------------------------------


class RouterRecord:
    """The router's logits and the chosen experts of one MoE layer in the last forward pass."""

    def __init__(self, layer: Any) -> None:
        self.gate = layer.gate
        self.gate.register_forward_pre_hook(self._record_logits)
        layer.experts.register_forward_pre_hook(self._record_choices)

    def _record_logits(self, gate: Any, args: Any) -> None:
        # Some versions return the softmax under this name.
        self.logits = F.linear(args[0], gate.weight).view(ROWS, LENGTH, -1)

    def _record_choices(self, _experts: Any, args: Any) -> None:
        self.experts = args[1].view(ROWS, LENGTH, -1)

    def balance_loss(self, kind: str, row: int, config: ModelConfig) -> Tensor:
        logits, experts = self.logits[row], self.experts[row]
        assert config.moe is not None
        if kind in ("mixtral", "qwen3_moe"):
            from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

            coefficient = AUX_LOSS_COEF / config.num_moe_layers
            loss: Tensor = coefficient * load_balancing_loss_func((logits,), logits.shape[1], experts.shape[1])
            return loss
        options = dict(config.moe.options)
        if kind == "deepseek_v2":
            return v2_balance_loss(logits, experts, int(options["num_groups"]), int(options["group_limit"]))
        return v3_balance_loss(logits, experts.shape[1])

    def move_bias(self) -> None:
        """DeepSeek-V3: a lower bias for experts with more tokens than the mean, a higher one for the others."""
        bias = self.gate.e_score_correction_bias
        counts = [int((self.experts == expert).sum()) for expert in range(len(bias))]
        for expert, count in enumerate(counts):
            mean = sum(counts) / len(counts)
            bias[expert] += BIAS_SPEED * ((count < mean) - (count > mean))


def v2_balance_loss(logits: Tensor, experts: Tensor, num_devices: int, device_limit: int) -> Tensor:
    """DeepSeek-V2 (2024), equations 23 to 31: expert-level, device-level and communication balance."""
    scores, (tokens, num_experts) = logits.softmax(-1), logits.shape
    per_device = num_experts // num_devices
    f, p = [], []
    for expert in range(num_experts):
        chosen = int((experts == expert).sum())
        f.append(num_experts / (experts.shape[1] * tokens) * chosen)
        p.append(scores[:, expert].sum() / tokens)
    total = sum(V2_BALANCE["experts"] * f[expert] * p[expert] for expert in range(num_experts))
    for device in range(num_devices):
        members = range(device * per_device, (device + 1) * per_device)
        p_device = sum(p[expert] for expert in members)
        f_device = sum(f[expert] for expert in members) / per_device
        sent = sum(any(expert in members for expert in row) for row in experts.tolist())
        f_sent = num_devices / (device_limit * tokens) * sent
        total = total + (V2_BALANCE["devices"] * f_device + V2_BALANCE["communication"] * f_sent) * p_device
    assert isinstance(total, Tensor)
    return total


def v3_balance_loss(logits: Tensor, k: int) -> Tensor:
    """DeepSeek-V3 (2024), equations 17 to 20: the choices without bias and groups, sigmoids normalised to sum 1."""
    scores, (tokens, num_experts) = logits.sigmoid(), logits.shape
    best, shares = scores.topk(k).indices, scores / scores.sum(-1, keepdim=True)
    total = scores.new_zeros(())
    for expert in range(num_experts):
        f = num_experts / (k * tokens) * int((best == expert).sum())
        total = total + V3_BALANCE * f * shares[:, expert].mean()
    return total


@lru_cache
def reference(name: str) -> Trained:
    """Three steps of AdamW with clipping on transformers' model."""
    model, kind = build_float64(name), FAMILIES[name][0]
    config = our_config(name, model)
    routers = [RouterRecord(layer) for layer in model.modules() if hasattr(layer, "gate") and hasattr(layer, "experts")]
    assert len(routers) == config.num_moe_layers
    state = our_names(name, _clone(model.state_dict()), config)
    decayed = [p for key, p in model.named_parameters() if not _is_vector(key)]
    others = [p for key, p in model.named_parameters() if _is_vector(key)]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    losses, norms, gradients = [], [], {}
    for step, batch in enumerate(batches()):
        targets = batch["targets"]
        num_targets = (targets != -100).sum(1)
        with float64_everywhere(), RefuseNarrowFloats() if step == 0 else nullcontext():
            logits = model(batch["tokens"], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / num_targets.sum()
            for router in routers:
                for row in range(ROWS):
                    share = num_targets[row] / num_targets.sum().double()
                    loss = loss + router.balance_loss(kind, row, config) * share
            optimizer.zero_grad()
            loss.backward()
        if step == 0:
            # A bias that no gradient moves is a buffer.
            buffers = {key: torch.zeros_like(value) for key, value in model.state_dict().items() if "e_score" in key}
            missing = {key: p for key, p in model.named_parameters() if p.grad is None}
            assert not missing, missing.keys()
            gradients = our_names(name, {key: p.grad.clone() for key, p in model.named_parameters()} | buffers, config)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        losses.append(loss.item())
        optimizer.step()
        with torch.no_grad():
            for router in routers:
                if kind in ("deepseek_v3", "dots1"):
                    router.move_bias()
    return Trained(config, state, gradients, losses, norms, our_names(name, _clone(model.state_dict()), config))


def _is_vector(name: str) -> bool:
    """A norm's weight or a bias, by transformers' names."""
    return "norm" in name or "ln_" in name or name.endswith(".bias")


def _clone(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.detach().clone() for key, tensor in state.items()}
