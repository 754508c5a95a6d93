"""The base class of GPT and Llama: loss contract, logits, tied embedding, weight initialisation, pipeline layers."""

import math
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from echelon.kernels.attention.rope import Rotation
from echelon.models.attention import AttentionContext, document_positions
from echelon.models.layers import LMHead
from echelon.models.model_config import IGNORE_INDEX, ModelConfig
from echelon.models.pipeline_model import PipelineLayer, PipelineModel, block_layers
from echelon.models.transformer_block import HiddenStates, run_block, split_hidden
from echelon.moe.gates.gate import Gate
from echelon.rng import ONES, ZEROS, Init, normal_init

INIT_STD = 0.02

MATRICES = ("embed", "positions", "head", "q", "k", "v", "kv", "q_down", "kv_down", "gate", "up")
NORMS = ("norm", "norm1", "norm2", "q_norm", "k_norm", "kv_norm")
RESIDUAL = ("o", "down")


class SliceableTensor(Protocol):
    """A tensor on disk whose slices can be read."""

    def __getitem__(self, part: Any) -> Tensor: ...


class LanguageModel(nn.Module):
    """A decoder: `embed`, then `blocks` and `norm` of the subclass, then `head`."""

    blocks: nn.ModuleList
    norm: nn.Module
    embedding_modules: tuple[str, ...] = ("embed", "drop")
    """modules of the first pipeline layer"""
    weight_source: Mapping[str, SliceableTensor] | None = None
    """tensors that initialise parameters on the meta device; none: `initial` draws them"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)

    def add_head(self) -> None:
        """Add the head last, so that parameters are listed in the order of their use."""
        self.head = LMHead(self.config.width, self.config.vocab)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make the head share the embedding's weight in a tied model. Moving off the meta device unties them."""
        if self.config.tied:
            self.head.weight = self.embed.weight

    def forward(
        self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(sum of losses, number of valid targets). All inputs are int64 [B, T].

        `documents` are document indices: tokens attend only within their document, and positions restart in each.
        `positions` are positions of tokens in their documents, where tokens are not consecutive (context parallelism).
        """
        return self.compute_loss(self.hidden_states(tokens, documents, positions), targets)

    def logits(self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        return self.head.logits(self.norm(split_hidden(self.hidden_states(tokens, documents, positions))[0]))

    def hidden_states(
        self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None
    ) -> HiddenStates:
        """Output of the last block."""
        self.check_length(tokens)
        context = self.attention_context(tokens, documents, positions)
        hidden: HiddenStates = self.embed_inputs(tokens, context)
        for block in self.blocks:
            hidden = run_block(block, hidden, context)
        return hidden

    def compute_loss(self, hidden: HiddenStates, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(sum of losses, number of valid targets).

        In training each balance loss of a sequence counts once per target, since the sum is divided by the targets."""
        x, balance = split_hidden(hidden)
        total, count = self.head(self.norm(x), targets)
        if balance is not None and self.training:
            total = total + (balance.to(total.dtype) * (targets != IGNORE_INDEX).sum(dim=1)).sum()
        return total, count

    def embed_inputs(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        """[B, T, width]: input of the first block."""
        raise NotImplementedError

    def attention_context(
        self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None
    ) -> AttentionContext:
        """Positions, attention mask and RoPE angles of a batch."""
        positions = self.token_positions(tokens, documents) if positions is None else positions
        return AttentionContext(positions, documents, self.config.causal, self.rope(positions))

    @staticmethod
    def token_positions(tokens: Tensor, documents: Tensor | None) -> Tensor:
        """[1 or B, T]: position of each token in its document; context parallelism reads it too."""
        return document_positions(tokens, documents)

    def rope(self, positions: Tensor) -> Rotation | None:
        """RoPE angles of the positions; none: the embedding has the positions."""
        return None

    # -- pipeline layers ----------------------------------------------------------------------------------------------

    def pipeline_model(self) -> PipelineModel:
        return PipelineModel(
            layers=(
                PipelineLayer("embed", self.embedding_modules, self._run_embedding),
                *block_layers(self.blocks, lambda block, hidden, context, **_inputs: run_block(block, hidden, context)),
                PipelineLayer("head", ("norm", "head"), self._run_head),
            ),
            shared=lambda tokens, targets=None, documents=None, positions=None: self.attention_context(
                tokens, documents, positions
            ),
            slice_shared=AttentionContext.slice_tokens,
            logits=lambda hidden, _shared, **_inputs: self.head.logits(self.norm(split_hidden(hidden)[0])),
        )

    def _run_embedding(self, _hidden: None, context: AttentionContext, tokens: Tensor, **_inputs: Tensor) -> Tensor:
        self.check_length(tokens)
        return self.embed_inputs(tokens, context)

    def _run_head(
        self, hidden: HiddenStates, _context: Any, targets: Tensor, **_inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.compute_loss(hidden, targets)

    def check_length(self, tokens: Tensor) -> None:
        if tokens.shape[1] > self.config.max_seq_len:
            raise ValueError(
                f"the sequence exceeds the model's maximum (length={tokens.shape[1]}, "
                f"max_seq_len={self.config.max_seq_len}); use a shorter seq_len"
            )

    def initial(self, name: str) -> Init:
        """Initial distribution of a parameter."""
        owner, _, attribute = name.rpartition(".")
        try:
            module: nn.Module | None = self.get_submodule(owner)
        except AttributeError:
            module = None  # transformer_init raises
        return module.initial(attribute) if isinstance(module, Gate) else transformer_init(name, self.config.layers)


def transformer_init(name: str, layers: int) -> Init:
    """GPT-2's rule: normal with std 0.02, less for projections into the residual stream, norms 1, biases 0."""
    owner, _, attribute = name.rpartition(".")
    module = owner.rpartition(".")[2]
    if attribute == "bias":
        return ZEROS
    if module == "experts":
        return normal_init(INIT_STD / math.sqrt(2 * layers) if attribute == "down" else INIT_STD)
    if module in NORMS:
        return ONES
    if module in RESIDUAL:
        # Each block adds two projections to the residual stream; the variance of their sum stays that of one.
        return normal_init(INIT_STD / math.sqrt(2 * layers))
    if module in MATRICES:
        return normal_init(INIT_STD)
    raise ValueError(f"unknown initialisation of a parameter ({name}); add its module to models/language_model.py")
