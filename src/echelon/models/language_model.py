"""The base class of GPT and Llama: loss contract, logits, tied embedding, weight initialisation, pipeline layers."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from echelon.models.attention import AttentionContext, document_positions
from echelon.models.lm_head import LMHead
from echelon.models.model_config import IGNORE_INDEX, ModelConfig
from echelon.models.pipeline_model import PipelineLayer, PipelineModel
from echelon.models.weight_init import transformer_init
from echelon.moe.gates.gate import Gate
from echelon.rng import Init

HiddenStates = Tensor | tuple[Tensor, Tensor]
"""output of a block: [B, T, width], and after the first MoE layer the sum of each sequence's balance losses, [B]"""


class SliceableTensor(Protocol):
    """A tensor on disk whose slices can be read."""

    def __getitem__(self, part: Any) -> Tensor: ...


def split_hidden(hidden: HiddenStates) -> tuple[Tensor, Tensor | None]:
    return (hidden, None) if isinstance(hidden, Tensor) else hidden


def run_block(block: nn.Module, hidden: HiddenStates, context: AttentionContext) -> HiddenStates:
    """Run a dense or MoE block, and add the balance losses of an MoE block to those before it."""
    x, total = split_hidden(hidden)
    out: HiddenStates = block(x, context)
    x, losses = split_hidden(out)
    if total is None or losses is None:
        total = losses if total is None else total
    else:
        total = total + losses
    return x if total is None else (x, total)


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
        """Positions and attention mask of a batch."""
        positions = self.token_positions(tokens, documents) if positions is None else positions
        return AttentionContext(positions, documents, self.config.causal)

    @staticmethod
    def token_positions(tokens: Tensor, documents: Tensor | None) -> Tensor:
        """[1 or B, T]: position of each token in its document."""
        return document_positions(tokens, documents)

    # -- pipeline layers ----------------------------------------------------------------------------------------------

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
            logits=lambda hidden, _shared, **_inputs: self.head.logits(self.norm(split_hidden(hidden)[0])),
        )

    def _embed_layer(
        self, _carried: None, context: AttentionContext, tokens: Tensor, **_inputs: Tensor
    ) -> HiddenStates:
        self.check_length(tokens)
        return self.embed_inputs(tokens, context)

    def _block_layer(
        self, index: int, hidden: HiddenStates, context: AttentionContext, **_inputs: Tensor
    ) -> HiddenStates:
        return run_block(self.blocks[index], hidden, context)

    def _head_layer(
        self, hidden: HiddenStates, _context: AttentionContext, targets: Tensor, **_inputs: Tensor
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
