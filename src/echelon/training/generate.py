"""A sample of text from a model in training: every rank takes part, and every rank gets the same text."""

from __future__ import annotations

from typing import Any

import torch

from echelon import rng
from echelon.data import Tokenizer
from echelon.training.engine import Engine


@torch.no_grad()
def generate_text(
    engine: Engine, tokenizer: Tokenizer, prompt: str, num_tokens: int, *, temperature: float = 0.8
) -> str:
    """What the model writes after `prompt`; it stops early at the end of a document."""
    model: Any = engine.model
    length = int(model.config.max_seq_len)
    device, seed = engine.parallel.options.device, engine.parallel.options.seed
    ids = list(tokenizer.encode(prompt)) or [tokenizer.eos]
    start = len(ids)
    was_training = model.training
    model.eval()
    with engine.outside_gathered():
        for position in range(num_tokens):
            window = torch.tensor([ids[-length:]], device=device)
            logits = engine.next_token_logits(window, tokenizer.vocab_size)
            # The same numbers on every rank, so that ranks never disagree on the next token.
            chance = rng.uniform(rng.key(seed, "sample"), torch.tensor([position]), torch.float64).to(device)
            shares = (logits / temperature).softmax(-1).cumsum(-1)
            choice = int(torch.searchsorted(shares, chance * shares[-1]).clamp_(max=len(shares) - 1))
            if choice == tokenizer.eos:
                break
            ids.append(choice)
    model.train(was_training)
    return tokenizer.decode(ids[start:])
