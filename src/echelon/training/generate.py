"""Text generation with a model in training: all ranks take part, and all return the same text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from echelon import rng
from echelon.data import Tokenizer

if TYPE_CHECKING:
    from echelon.training.engine import Engine


@torch.no_grad()
def generate_text(
    engine: Engine, tokenizer: Tokenizer, prompt: str, num_tokens: int, *, temperature: float = 0.8
) -> str:
    """Sample tokens after `prompt`, until an end-of-document token."""
    model: Any = engine.model
    length = int(getattr(model, "max_seq_len", 0) or model.config.max_seq_len)
    device, seed = engine.parallel.options.device, engine.parallel.options.seed
    ids = list(tokenizer.encode(prompt)) or [tokenizer.eos]
    start = len(ids)
    was_training = model.training
    model.eval()
    with engine.non_layer_params_unsharded():
        for position in range(num_tokens):
            window = torch.tensor([ids[-length:]], device=device)
            logits = engine.next_token_logits(window, tokenizer.vocab_size)
            # The same random number on every rank, so that all choose the same token.
            uniform = rng.uniform(rng.key(seed, "sample"), torch.tensor([position]), torch.float64).to(device)
            cumulative = (logits / temperature).softmax(-1).cumsum(-1)
            token = int(torch.searchsorted(cumulative, uniform * cumulative[-1]).clamp_(max=len(cumulative) - 1))
            if token == tokenizer.eos:
                break
            ids.append(token)
    model.train(was_training)
    return tokenizer.decode(ids[start:])


def next_token_logits(engine: Engine, tokens: Tensor, vocab_size: int) -> Tensor:
    """float64 [vocab_size]: logits after the last token of the only sequence, on every rank."""
    model: Any = engine.model
    context = engine.parallel.cp_context
    if engine.pipeline is not None:
        return engine.pipeline.logits({"tokens": tokens}, vocab_size)
    if context is not None:
        logits = context.last_token(model.logits(**context.shard_inputs({"tokens": tokens}, has_loss=False)))
    else:
        logits = model.logits(tokens)[:, -1]
    last: Tensor = logits[0, :vocab_size].double()
    return last
