"""The Hugging Face `model_type`s that planning reads, and how training supports some of them: data. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MLA_EPSILON = 1e-6
"""transformers' norms inside latent attention add this, whatever the config says"""

_ROTARY: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0.0,),
    "partial_rotary_factor": (1.0, None),
}
_MLA: Mapping[str, tuple[Any, ...]] = {**_ROTARY, "moe_layer_freq": (1,), "rms_norm_eps": (MLA_EPSILON,)}
_GPT2: Mapping[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
_DEEPSEEK_V2: Mapping[str, tuple[Any, ...]] = {
    **_MLA,
    "scoring_func": ("softmax",),
    "topk_method": ("greedy", "group_limited_greedy"),
    "norm_topk_prob": (False,),
}
_DEEPSEEK_V3: Mapping[str, tuple[Any, ...]] = {
    **_MLA,
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "rope_interleave": (True,),
}


@dataclass(frozen=True, kw_only=True)
class TrainingSupport:
    """What our models compute of an architecture, and transformers' defaults for keys that a config leaves out."""

    class_name: str
    """transformers' class"""
    supported_values: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: _ROTARY)
    """keys with the values that our models compute, the default first"""
    epsilon: float = 1e-6
    rope_theta: float = 1e4
    sliding_window: int | None = None
    sliding_window_flag: str = ""
    """the key that enables the window; empty: it is always enabled"""


@dataclass(frozen=True, kw_only=True)
class HFArchitecture:
    """How to read the config of one `model_type`. The defaults are Llama's."""

    keys: str = "llama"
    """whose key names the config uses: gpt2, gpt_neox, llama or deepseek"""
    tied: bool = False
    """default of tie_word_embeddings"""
    qkv_bias: bool = False
    """queries, keys and values always have biases"""
    norms: int = 2
    """norms of the width in a layer"""
    qk_norm: bool = False
    """each head's queries and keys are normalised"""
    head_dim: int = 0
    """default of head_dim; 0: the width over the heads"""
    requires_head_dim: bool = False
    experts_key: str = ""
    """the key of the number of experts; empty: dense"""
    expert_ffn_key: str = "moe_intermediate_size"
    training: TrainingSupport | None = None
    """none: planning only"""


HF_ARCHITECTURES: Mapping[str, HFArchitecture] = {
    "gpt2": HFArchitecture(
        keys="gpt2",
        tied=True,
        training=TrainingSupport(class_name="GPT2LMHeadModel", epsilon=1e-5, supported_values=_GPT2),
    ),
    "gpt_neox": HFArchitecture(keys="gpt_neox"),
    "llama": HFArchitecture(training=TrainingSupport(class_name="LlamaForCausalLM")),
    "mistral": HFArchitecture(training=TrainingSupport(class_name="MistralForCausalLM", sliding_window=4096)),
    "phi3": HFArchitecture(),
    "qwen2": HFArchitecture(
        qkv_bias=True,
        training=TrainingSupport(class_name="Qwen2ForCausalLM", sliding_window_flag="use_sliding_window"),
    ),
    "qwen3": HFArchitecture(
        qk_norm=True,
        head_dim=128,
        training=TrainingSupport(class_name="Qwen3ForCausalLM", sliding_window_flag="use_sliding_window"),
    ),
    "gemma": HFArchitecture(tied=True, requires_head_dim=True),
    "gemma2": HFArchitecture(tied=True, requires_head_dim=True, norms=4),
    "gemma3_text": HFArchitecture(tied=True, requires_head_dim=True, norms=4, qk_norm=True),
    "mixtral": HFArchitecture(
        experts_key="num_local_experts",
        expert_ffn_key="intermediate_size",
        training=TrainingSupport(
            class_name="MixtralForCausalLM",
            epsilon=1e-5,
            rope_theta=1e6,
            supported_values={**_ROTARY, "router_jitter_noise": (0.0,)},
        ),
    ),
    "qwen3_moe": HFArchitecture(
        qk_norm=True,
        experts_key="num_experts",
        training=TrainingSupport(class_name="Qwen3MoeForCausalLM", sliding_window_flag="use_sliding_window"),
    ),
    "deepseek_v2": HFArchitecture(
        keys="deepseek",
        experts_key="n_routed_experts",
        training=TrainingSupport(class_name="DeepseekV2ForCausalLM", supported_values=_DEEPSEEK_V2),
    ),
    "deepseek_v3": HFArchitecture(
        keys="deepseek",
        experts_key="n_routed_experts",
        training=TrainingSupport(class_name="DeepseekV3ForCausalLM", supported_values=_DEEPSEEK_V3),
    ),
}
"""by model_type"""

TRAINABLE: Mapping[str, TrainingSupport] = {
    name: known.training for name, known in HF_ARCHITECTURES.items() if known.training is not None
}
"""those that `echelon import` reads"""

EQUIVALENT_TYPES = {"mistral": "llama"}
"""model_types with the parameter names and the computation of another"""
