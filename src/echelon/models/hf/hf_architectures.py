"""What is known of each kind of Hugging Face model that ours compute: data, read in both directions. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MLA_EPSILON = 1e-6
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
class HFArchitecture:
    architecture: str
    """the class of transformers"""
    supported_values: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: _ROTARY)
    """keys with the values that our models compute, the one of a config that does not say first"""
    epsilon: float = 1e-6
    """of norms, where the config does not say"""
    rope_theta: float = 1e4
    """of rotary positions, where the config does not say"""
    sliding_window: int | None = None
    """tokens that a token sees, where the config does not say"""
    sliding_window_flag: str = ""
    """the key without which a window is not used"""


HF_ARCHITECTURES: Mapping[str, HFArchitecture] = {
    "gpt2": HFArchitecture(
        architecture="GPT2LMHeadModel",
        epsilon=1e-5,
        supported_values={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
            "quantization_config": (None,),
        },
    ),
    "llama": HFArchitecture(architecture="LlamaForCausalLM"),
    "mistral": HFArchitecture(architecture="MistralForCausalLM", sliding_window=4096),
    "qwen2": HFArchitecture(architecture="Qwen2ForCausalLM", sliding_window_flag="use_sliding_window"),
    "qwen3": HFArchitecture(architecture="Qwen3ForCausalLM", sliding_window_flag="use_sliding_window"),
    "mixtral": HFArchitecture(
        architecture="MixtralForCausalLM",
        epsilon=1e-5,
        rope_theta=1e6,
        supported_values={**_ROTARY, "router_jitter_noise": (0.0,)},
    ),
    "qwen3_moe": HFArchitecture(architecture="Qwen3MoeForCausalLM", sliding_window_flag="use_sliding_window"),
    "deepseek_v2": HFArchitecture(
        architecture="DeepseekV2ForCausalLM",
        supported_values={
            **_ROTARY,
            "scoring_func": ("softmax",),
            "topk_method": ("greedy", "group_limited_greedy"),
            "norm_topk_prob": (False,),
            "moe_layer_freq": (1,),
            "rms_norm_eps": (MLA_EPSILON,),
        },
    ),
    "deepseek_v3": HFArchitecture(
        architecture="DeepseekV3ForCausalLM",
        supported_values={
            **_ROTARY,
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "rope_interleave": (True,),
            "moe_layer_freq": (1,),
            "rms_norm_eps": (MLA_EPSILON,),
        },
    ),
}
"""by model_type"""

EQUIVALENT_TYPES = {"mistral": "llama"}
"""kinds that compute, and name, as another does"""
