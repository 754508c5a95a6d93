"""What is known of each kind of Hugging Face model that ours compute: data, read in both directions. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LATENT_EPSILON = 1e-6
"""transformers' norms of narrow vectors (latent attention) add this, whatever the config says"""

_ROTARY: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0.0,),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
}


@dataclass(frozen=True, kw_only=True)
class Kind:
    architecture: str
    """the class of transformers"""
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: _ROTARY)
    """keys with the values that our models compute, the one of a config that does not say first"""
    epsilon: float = 1e-6
    """of norms, where the config does not say"""
    theta: float = 1e4
    """of rotary positions, where the config does not say"""
    window: int | None = None
    """tokens that a token sees, where the config does not say"""
    switch: str = ""
    """the key without which a window is not used"""


KINDS: Mapping[str, Kind] = {
    "gpt2": Kind(
        architecture="GPT2LMHeadModel",
        epsilon=1e-5,
        fixed={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
            "quantization_config": (None,),
        },
    ),
    "llama": Kind(architecture="LlamaForCausalLM"),
    "mistral": Kind(architecture="MistralForCausalLM", window=4096),
    "qwen2": Kind(architecture="Qwen2ForCausalLM", switch="use_sliding_window"),
    "qwen3": Kind(architecture="Qwen3ForCausalLM", switch="use_sliding_window"),
    "mixtral": Kind(
        architecture="MixtralForCausalLM", epsilon=1e-5, theta=1e6, fixed={**_ROTARY, "router_jitter_noise": (0.0,)}
    ),
    "qwen3_moe": Kind(architecture="Qwen3MoeForCausalLM", switch="use_sliding_window"),
    "deepseek_v2": Kind(
        architecture="DeepseekV2ForCausalLM",
        fixed={
            **_ROTARY,
            "scoring_func": ("softmax",),
            "topk_method": ("greedy", "group_limited_greedy"),
            "norm_topk_prob": (False,),
            "moe_layer_freq": (1,),
            "rms_norm_eps": (LATENT_EPSILON,),
        },
    ),
    "deepseek_v3": Kind(
        architecture="DeepseekV3ForCausalLM",
        fixed={
            **_ROTARY,
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "rope_interleave": (True,),
            "moe_layer_freq": (1,),
            "rms_norm_eps": (LATENT_EPSILON,),
        },
    ),
}
"""by model_type"""

COMPUTES = {"mistral": "llama"}
"""kinds that compute, and name, as another does"""
