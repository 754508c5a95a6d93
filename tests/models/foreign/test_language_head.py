"""The loss of transformers' classes some tokens at a time, whatever a class does with its logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from foreign_families import FAMILIES, build_family
from live_tensor_bytes import LivingBytes

from echelon.kernels.layers.cross_entropy import linear_cross_entropy
from echelon.kernels.memory_limits import TORCH_LOGIT_BYTES
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.models.foreign import language_head
from echelon.models.foreign.causal_lm import adapt
from echelon.models.foreign.language_head import LogitMap
from echelon.verification.verifier import Verifier
from echelon.verification.verify_case import VerifyCase

pytest.importorskip("transformers")

WITH_MAPS = ("gemma2", "cohere", "granite")
"""capped and scaled logits"""


class HasKernels:
    """In place of `dispatch`, on a machine without a GPU."""

    @staticmethod
    def use_triton(_x: torch.Tensor) -> bool:
        return True

    @staticmethod
    def autocast_enabled(_x: torch.Tensor) -> bool:
        return False


def batch(rows: int = 2, length: int = 11, vocab: int = 97) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(3, vocab, (rows, length), generator=generator) for _ in range(2))
    targets[0, 3:6] = -100
    return tokens, targets


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("name", [*WITH_MAPS, "gptj", "phi", "opt", "qwen2"])
def test_chunks_have_the_loss_and_the_gradients_of_all_tokens(name: str, by_layer: bool) -> None:
    """Caps, scales, biases, tied weights, a projection before the head; a last chunk that is shorter."""
    torch.manual_seed(1)
    model = adapt(build_family(name).double()).eval()
    tokens, targets = batch()
    logits = model.logits(tokens)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    wanted = gradients(model, expected)
    model.runs_by_layer = by_layer
    for size in (5, 22, None):
        model.get_output_embeddings().chunk_tokens = size
        total, count = model(tokens=tokens, targets=targets)
        assert float((total - expected).abs().detach()) < 1e-11
        assert count == 19
        found = gradients(model, total)
        assert found.keys() == wanted.keys()
        for key, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[key], rtol=1e-11, atol=1e-12)


def test_without_gradients_the_loss_is_the_same() -> None:
    model = adapt(build_family("gemma2"))
    tokens, targets = batch()
    with torch.no_grad():
        alone, _ = model(tokens=tokens, targets=targets)
    assert torch.equal(alone, model(tokens=tokens, targets=targets)[0].detach())


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_maps_each_logit_alone(name: str) -> None:
    model = adapt(build_family(name))
    found = model.logit_map
    assert (found.divides_tokens, found.divides_vocab) == (True, True)
    assert found.is_identity == (name not in WITH_MAPS)


def test_chunks_hold_no_logits_of_all_tokens() -> None:
    """1024 tokens and 2048 words in float32: all logits are 8 MiB, those of 64 tokens half a MiB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2048, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = adapt(LlamaForCausalLM(config))
    tokens, targets = batch(4, 256, 2048)
    peaks = []
    for size in (64, 1024):
        model.lm_head.chunk_tokens = size
        model.zero_grad()
        with LivingBytes() as living:
            total, _ = model(tokens=tokens, targets=targets)
            total.backward()
        peaks.append(living.peak)
    whole = LivingBytes()
    model.zero_grad()
    with whole:
        F.cross_entropy(model.logits(tokens).flatten(0, 1), targets.flatten(), reduction="sum").backward()
    assert 6 * peaks[0] < whole.peak
    assert peaks[1] == pytest.approx(TORCH_LOGIT_BYTES * tokens.numel() * 2048, rel=0.1)  # what the planner counts


MIXED = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from echelon.models.foreign import language_head
from echelon.models.foreign.causal_lm import adapt


class MixedLlama(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        if output.logits is not None:
            output.logits = MIX(output.logits)
        return output


def build():
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=None, bos_token_id=1, eos_token_id=2,
    )
    model = adapt(MixedLlama(config))
    model.lm_head.chunk_tokens = 7
    return model


def batch(rows, step):
    tokens = torch.randint(0, 97, (rows, 17), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens, "targets": tokens.roll(-1, 1)}
"""
MIXES = {
    "words": ("logits - logits.mean(-1, keepdim=True)", LogitMap(divides_tokens=True)),
    "tokens": ("logits + logits.cumsum(1)", LogitMap(divides_vocab=True)),
    "both": ("logits - logits.mean((1, 2), keepdim=True) + 0.1 * logits.cumsum(1).roll(1, 2)", LogitMap()),
}


@pytest.mark.parametrize("layout", ["tp=2,sp=0", "tp=2"])
@pytest.mark.parametrize("mixed", MIXES)
def test_logits_that_depend_on_others_are_gathered(mixed: str, layout: str, pool: RankPool, tmp_path: Path) -> None:
    expression, expected = MIXES[mixed]
    path = tmp_path / f"mixed_{mixed}.py"
    path.write_text(MIXED.replace("MIX(", f"(lambda logits: {expression})("))
    namespace: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    assert namespace["build"]().logit_map == expected
    case = VerifyCase(model=f"{path}:build", batch_function=f"{path}:batch", steps=1)
    verdict = Verifier(pool, case).verify_layout(Layout.parse(layout))
    assert verdict.passed, verdict.trouble or verdict


@pytest.mark.parametrize(("name", "is_fused"), [("llama", True), ("qwen2", True), ("gemma2", False), ("phi", False)])
def test_plain_logits_have_the_loss_of_our_kernel(name: str, is_fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that a class caps, nor those with a bias."""
    calls: list[torch.Tensor] = []

    def spy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls.append(hidden)
        return linear_cross_entropy(hidden, weight, targets)

    monkeypatch.setattr(language_head, "linear_cross_entropy", spy)
    torch.manual_seed(1)
    model = adapt(build_family(name).double()).eval()
    tokens, targets = batch()
    wanted = gradients(model, model(tokens=tokens, targets=targets)[0])
    assert not calls
    monkeypatch.setattr(language_head, "dispatch", HasKernels)
    found = gradients(model, model(tokens=tokens, targets=targets)[0])
    assert bool(calls) == is_fused
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[key], rtol=1e-11, atol=1e-12)
