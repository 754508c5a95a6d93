"""What the language models have in common: the loss contract, text logits, tied embedding, first values."""

from torch import Tensor, nn

from echelon.models.head import LanguageHead
from echelon.models.initial import transformer
from echelon.models.sizes import ModelConfig
from echelon.rng import Init


class LanguageModel(nn.Module):
    """A model with an embedding `embed`, a head `head` and, from its subclass, hidden vectors in between."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)

    def finish(self) -> None:
        """Adds the head. Last, so that parameters are listed in the order in which they are used."""
        self.head = LanguageHead(self.config.width, self.config.vocab)
        self.tie()

    def tie(self) -> None:
        """Makes the head use the embedding's matrix, where the model is tied. Moving off the meta device undoes it."""
        if self.config.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(sum of losses, number of valid targets). All inputs are int64 [B, T].

        `documents` numbers each token's document: tokens see only their own, and positions restart in each.
        """
        total, count = self.head(self.hidden(tokens, documents), targets)
        return total, count

    def logits(self, tokens: Tensor) -> Tensor:
        return self.head.logits(self.hidden(tokens))

    def hidden(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """[B, T, width]: what the head reads."""
        raise NotImplementedError

    def check_length(self, tokens: Tensor) -> None:
        if tokens.shape[1] > self.config.max_seq_len:
            raise ValueError(
                f"the sequence is longer than the model allows (length={tokens.shape[1]}, "
                f"max_seq_len={self.config.max_seq_len}); use a shorter seq_len"
            )

    def initial(self, name: str) -> Init:
        """How the parameter of this name starts."""
        return transformer(name, self.config.layers)
