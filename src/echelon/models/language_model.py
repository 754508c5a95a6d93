"""What the language models have in common: the loss contract, text logits, tied embedding, first values."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from echelon.models.attention import Seen
from echelon.models.attention import positions as positions_of
from echelon.models.lm_head import LanguageHead
from echelon.models.model_config import IGNORE, ModelConfig
from echelon.models.pipeline_model import Chain, Link
from echelon.models.weight_init import transformer
from echelon.moe.gates.gate import Gate
from echelon.rng import Init

Carried = Tensor | tuple[Tensor, Tensor]
"""what one block hands to the next: [B, T, width], and after the first mixture of experts the sum of the balance losses
of each sequence, [B]"""


class Stored(Protocol):
    """A tensor elsewhere, of which slices are read."""

    def __getitem__(self, part: Any) -> Tensor: ...


def streams(carried: Carried) -> tuple[Tensor, Tensor | None]:
    return (carried, None) if isinstance(carried, Tensor) else carried


def through(block: nn.Module, carried: Carried, seen: Seen) -> Carried:
    """A block of either kind: a mixture's also gives losses."""
    x, balance = streams(carried)
    found: Carried = block(x, seen)
    x, more = streams(found)
    if balance is None or more is None:
        balance = more if balance is None else balance
    else:
        balance = balance + more
    return x if balance is None else (x, balance)


class LanguageModel(nn.Module):
    """A model with an embedding `embed`, a head `head` and, from its subclass, `blocks` and `norm` in between."""

    blocks: nn.ModuleList
    norm: nn.Module
    first: tuple[str, ...] = ("embed", "drop")
    """the modules that `start` uses"""
    stored: Mapping[str, Stored] | None = None
    """where parameters on the meta device are read from; none: they are drawn by `initial`"""

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

    def forward(
        self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(sum of losses, number of valid targets). All inputs are int64 [B, T].

        `documents` numbers each token's document: tokens see only their own, and positions restart in each.
        `positions` says where each token is in its document, for tokens that are not one after another.
        """
        return self.losses(self.hidden(tokens, documents, positions), targets)

    def logits(self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        return self.head.logits(self.norm(streams(self.hidden(tokens, documents, positions))[0]))

    def hidden(self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Carried:
        """What the last block gives."""
        self.check_length(tokens)
        seen = self.seen(tokens, documents, positions)
        carried: Carried = self.start(tokens, seen)
        for block in self.blocks:
            carried = through(block, carried, seen)
        return carried

    def losses(self, carried: Carried, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(sum of losses, number of valid targets). In training the balance losses of a sequence count once for each
        of its targets, since the sum is divided by the number of targets."""
        x, balance = streams(carried)
        total, count = self.head(self.norm(x), targets)
        if balance is not None and self.training:
            total = total + (balance.to(total.dtype) * (targets != IGNORE).sum(dim=1)).sum()
        return total, count

    def start(self, tokens: Tensor, seen: Seen) -> Tensor:
        """[B, T, width]: what the first block reads."""
        raise NotImplementedError

    def seen(self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Seen:
        """Where each token is and what it may see."""
        place = self.places_of(tokens, documents) if positions is None else positions
        return Seen(place, documents, self.config.causal)

    @staticmethod
    def places_of(tokens: Tensor, documents: Tensor | None) -> Tensor:
        """[1 or B, T]: where each token is in its document."""
        return positions_of(tokens, documents)

    # -- the same, cut into links -------------------------------------------------------------------------------------

    def chain(self) -> Chain:
        blocks = (Link(f"blocks.{i}", (f"blocks.{i}",), partial(self._block, i)) for i in range(len(self.blocks)))
        return Chain(
            links=(Link("embed", self.first, self._start), *blocks, Link("head", ("norm", "head"), self._end)),
            shared=lambda tokens, targets=None, documents=None, positions=None: self.seen(tokens, documents, positions),
            cut=Seen.cut,
            logits=lambda carried, _shared, **_inputs: self.head.logits(self.norm(streams(carried)[0])),
        )

    def _start(self, _carried: None, seen: Seen, tokens: Tensor, **_inputs: Tensor) -> Carried:
        self.check_length(tokens)
        return self.start(tokens, seen)

    def _block(self, index: int, carried: Carried, seen: Seen, **_inputs: Tensor) -> Carried:
        return through(self.blocks[index], carried, seen)

    def _end(self, carried: Carried, _seen: Seen, targets: Tensor, **_inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.losses(carried, targets)

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
        return part.initial(kind) if isinstance(part, Gate) else transformer(name, self.config.layers)
