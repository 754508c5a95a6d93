"""The specification of a decoder transformer that training, cost functions and the planner share. No torch.

ModelConfig (a model that we build)  --.spec--+
Hugging Face config.json  --hf/hf_config_reader--+-->  ModelSpec  --planning: transformer_shape-->  ModelShape
a row of a table of published runs  ----------+
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.models.attention_config import MLAConfig


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """The MoE layers of a model."""

    experts: int
    """routed experts of a layer"""
    top_k: int
    """experts of a token"""
    ffn: int
    """hidden size of an expert"""
    gated: bool
    """experts are SwiGLU-like: gate, up and down"""
    shared_ffn: int = 0
    """hidden size of the shared expert; 0: none"""
    layers: tuple[bool, ...]
    """for each layer of the model, whether it is an MoE layer"""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Sizes and features of a decoder transformer, whichever program trains it."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    """of queries and keys"""
    ffn: int
    """hidden size of a dense MLP"""
    gated_mlp: bool
    """the MLP has a gate (SwiGLU, GeGLU)"""
    vocab: int
    max_seq_len: int = 0
    """0: not stated"""
    tied: bool = False
    causal: bool = True
    biases: bool = False
    """all linear layers but experts have biases, and norms are LayerNorms"""
    dropout: bool = False
    learned_positions: bool = False
    mla: MLAConfig | None = None
    moe: MoESpec | None = None
    extra_parameters: int = 0
    """parameters of every layer that are in no matmul and follow from nothing above: more norms, some biases"""
