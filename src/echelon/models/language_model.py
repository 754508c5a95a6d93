"""What the language models have in common: the loss contract, text logits, tied embedding, first values."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from echelon.models.attention import AttentionContext
from echelon.models.attention import document_positions as positions_of
from echelon.models.lm_head import LMHead
from echelon.models.model_config import IGNORE_INDEX, ModelConfig
from echelon.models.pipeline_model import PipelineLayer, PipelineModel
from echelon.models.weight_init import transformer_init
from echelon.moe.gates.gate import Gate
from echelon.rng import Init

HiddenStates = Tensor | tuple[Tensor, Tensor]
"""what one block hands to the next: [B, T, width], and after the first mixture of experts the sum of the balance losses
of each sequence, [B]"""


class SliceableTensor(Protocol):
    """A tensor elsewhere, of which slices are read."""

    def __getitem__(self, part: Any) -> Tensor: ...


def split_hidden(carried: HiddenStates) -> tuple[Tensor, Tensor | None]:
    return (carried, None) if isinstance(carried, Tensor) else carried


def run_block(block: nn.Module, carried: HiddenStates, context: AttentionContext) -> HiddenStates:
    """A block of either kind: a mixture's also gives losses."""
    x, balance = split_hidden(carried)
    found: HiddenStates = block(x, context)
    x, more = split_hidden(found)
    if balance is None or more is None:
        balance = more if balance is None else balance
    else:
        balance = balance + more
    return x if balance is None else (x, balance)


class LanguageModel(nn.Module):
    """A model with an embedding `embed`, a head `head` and, from its subclass, `blocks` and `norm` in between."""

    blocks: nn.ModuleList
    norm: nn.Module
    embedding_modules: tuple[str, ...] = ("embed", "drop")
    """the modules that `start` uses"""
    weight_source: Mapping[str, SliceableTensor] | None = None
    """where parameters on the meta device are read from; none: they are drawn by `initial`"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)

    def add_head(self) -> None:
        """Adds the head. Last, so that parameters are listed in the order in which they are used."""
        self.head = LMHead(self.config.width, self.config.vocab)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Makes the head use the embedding's matrix, where the model is tied. Moving off the meta device undoes it."""
        if self.config.tied:
            self.head.weight = self.embed.weight

    def forward(
        self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(sum of losses, number of valid targets). All inputs are int64 [B, T].

        `documents` numbers each token's document: tokens see only their own, and positions restart in each.
        `positions` says where each token is in its document, for tokens that are not one after another.
        """
        return self.compute_loss(self.hidden_states(tokens, documents, positions), targets)

    def logits(self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        return self.head.logits(self.norm(split_hidden(self.hidden_states(tokens, documents, positions))[0]))

    def hidden_states(
        self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None
    ) -> HiddenStates:
        """What the last block gives."""
        self.check_length(tokens)
        seen = self.attention_context(tokens, documents, positions)
        carried: HiddenStates = self.embed_inputs(tokens, seen)
        for block in self.blocks:
            carried = run_block(block, carried, seen)
        return carried

    def compute_loss(self, carried: HiddenStates, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(sum of losses, number of valid targets). In training the balance losses of a sequence count once for each
        of its targets, since the sum is divided by the number of targets."""
        x, balance = split_hidden(carried)
        total, count = self.head(self.norm(x), targets)
        if balance is not None and self.training:
            total = total + (balance.to(total.dtype) * (targets != IGNORE_INDEX).sum(dim=1)).sum()
        return total, count

    def embed_inputs(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        """[B, T, width]: what the first block reads."""
        raise NotImplementedError

    def attention_context(
        self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None
    ) -> AttentionContext:
        """Where each token is and what it may see."""
        place = self.token_positions(tokens, documents) if positions is None else positions
        return AttentionContext(place, documents, self.config.causal)

    @staticmethod
    def token_positions(tokens: Tensor, documents: Tensor | None) -> Tensor:
        """[1 or B, T]: where each token is in its document."""
        return positions_of(tokens, documents)

    # -- the same, cut into links -------------------------------------------------------------------------------------

    def pipeline_model(self) -> PipelineModel:
        blocks = (
            PipelineLayer(f"blocks.{i}", (f"blocks.{i}",), partial(self._block_layer, i))
            for i in range(len(self.blocks))
        )
        return PipelineModel(
            layers=(
                PipelineLayer("embed", self.embedding_modules, self._embed_layer),
                *blocks,
                PipelineLayer("head", ("norm", "head"), self._head_layer),
            ),
            shared=lambda tokens, targets=None, documents=None, positions=None: self.attention_context(
                tokens, documents, positions
            ),
            slice_shared=AttentionContext.slice_tokens,
            logits=lambda carried, _shared, **_inputs: self.head.logits(self.norm(split_hidden(carried)[0])),
        )

    def _embed_layer(
        self, _carried: None, context: AttentionContext, tokens: Tensor, **_inputs: Tensor
    ) -> HiddenStates:
        self.check_length(tokens)
        return self.embed_inputs(tokens, context)

    def _block_layer(
        self, index: int, carried: HiddenStates, context: AttentionContext, **_inputs: Tensor
    ) -> HiddenStates:
        return run_block(self.blocks[index], carried, context)

    def _head_layer(
        self, carried: HiddenStates, _seen: AttentionContext, targets: Tensor, **_inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.compute_loss(carried, targets)

    def check_length(self, tokens: Tensor) -> None:
        if tokens.shape[1] > self.config.max_seq_len:
            raise ValueError(
                f"the sequence is longer than the model allows (length={tokens.shape[1]}, "
                f"max_seq_len={self.config.max_seq_len}); use a shorter seq_len"
            )

    def initial(self, name: str) -> Init:
        """How the parameter of this name starts."""
        owner, _, kind = name.rpartition(".")
        try:
            part: nn.Module | None = self.get_submodule(owner)
        except AttributeError:
            part = None  # the rule for names says what is wrong
        return part.initial(kind) if isinstance(part, Gate) else transformer_init(name, self.config.layers)
