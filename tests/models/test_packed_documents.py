"""A packed sequence computes what its documents compute alone: logits, loss and gradients, on one rank and on several.

`verify` packs the truth's sequences too, with the same positions and masks. Here the reference has neither: every
document is a sequence of its own, from position 0 on, and nothing is masked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from tiny_engines import float64, tiny, whole
from torch import Tensor, nn

from echelon import models
from echelon.config.sections import OptimizerConfig
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.models.attention import AttentionContext
from echelon.models.attention_config import Llama3RopeScaling, MLAConfig, YarnRopeScaling
from echelon.models.model_config import ModelConfig
from echelon.models.moe_config import MoEConfig
from echelon.training.engine import Engine

TOLERANCE = 1e-10
"""relative to the norm of the tensor"""
LR = 0.125
LENGTHS = ((5, 1, 7, 10), (23,), (1, 1, 20, 1), (12, 11))
"""documents of each row: of one token, of all of them, over every border between ranks"""
SLICES = (9, 8, 6)
"""lengths of TeraPipe's slices, which cut documents"""

STRETCHED = Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=16)
YARN = YarnRopeScaling(factor=4.0, original_max_seq_len=8, mscale=0.7, mscale_all_dim=1.0)
LATENT = tiny(kv_heads=4, mla=MLAConfig(query_rank=6, kv_rank=8, rope_dim=4, nope_dim=4, value_dim=4), theta=100.0)
MIXTRAL = MoEConfig(experts=4, k=2, ffn=8, gate="mixtral", options=(("balance", 0.0),))
V3_OPTIONS = (("num_groups", 2), ("group_limit", 1), ("balance", 0.0), ("scale", 1.5))
# Balance losses are of a sequence, not of a document, and are off.
FAMILIES: Mapping[str, ModelConfig] = {
    "gpt": tiny("gpt"),
    "llama": tiny(theta=100.0),
    "llama full attention": tiny(theta=100.0, causal=False),
    "llama 3.1": tiny(theta=100.0, qkv_bias=True, rope_scaling=STRETCHED),
    "qwen3": tiny(theta=100.0, qk_norm=True, tied=True),
    "latent": LATENT,
    "latent with YaRN": replace(LATENT, rope_scaling=YARN),
    "mixtral": tiny(theta=100.0, moe=MIXTRAL),
    "deepseek": replace(LATENT, moe=MoEConfig(experts=4, k=2, ffn=8, gate="deepseek-v3", options=V3_OPTIONS)),
}


def build(name: str) -> nn.Module:
    """With weights that make attention uneven, so that one key too many changes everything."""
    model = models.build(FAMILIES[name], "cpu", dtype=torch.float64).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model


def packed_batch() -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(3)
    tokens, targets = (torch.randint(257, (len(LENGTHS), 23), generator=source) for _ in range(2))
    targets[torch.rand(targets.shape, generator=source) < 0.3] = -100
    # In the order of the sequence, from 0 on, as the data numbers them.
    documents = [[number for number, length in enumerate(row) for _ in range(length)] for row in LENGTHS]
    return {"tokens": tokens, "targets": targets, "documents": torch.tensor(documents)}


def alone(name: str) -> tuple[list[Tensor], float, dict[str, Tensor]]:
    """Logits of every document, the mean loss and its gradients, document by document."""
    model, batch = build(name), packed_batch()
    totals, counts, logits = [], 0, []
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            tokens, targets = (batch[key][row : row + 1, start : start + length] for key in ("tokens", "targets"))
            total, count = model(tokens, targets)
            totals.append(total)
            counts += int(count)
            with torch.no_grad():
                logits.append(model.logits(tokens)[0])
            start += length
    loss = torch.stack(totals).sum() / counts
    loss.backward()
    return logits, loss.item(), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def relative(tensor: Tensor, truth: Tensor) -> float:
    return float((tensor - truth).norm() / truth.norm())


def largest_error(name: str, gradients: dict[str, Tensor], truths: dict[str, Tensor]) -> tuple[float, str]:
    # Softmax ignores what all scores share: the gradient of GPT's key bias is rounding alone.
    names = [key for key in truths if FAMILIES[name].family != "gpt" or not key.endswith("attn.k.bias")]
    assert gradients.keys() == truths.keys()
    return max((relative(gradients[key], truths[key]), key) for key in names)


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_documents_compute_what_they_compute_alone(name: str) -> None:
    logits, loss, gradients = alone(name)
    model, batch = build(name), packed_batch()
    with torch.no_grad():
        packed = model.logits(batch["tokens"], batch["documents"]).flatten(0, 1)
        mixed = model.logits(batch["tokens"]).flatten(0, 1)
    assert relative(packed, torch.cat(logits)) < TOLERANCE
    assert relative(mixed, torch.cat(logits)) > 0.1
    total, count = model(**batch)
    (total / count).backward()
    assert (total / count).item() == pytest.approx(loss, rel=TOLERANCE, abs=0.0)
    found = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert largest_error(name, found, gradients) < (TOLERANCE, "")
    if "positions.weight" in found:  # no token is further from the start of its document than the longest document is
        assert not found["positions.weight"][23:].any()


@pytest.mark.parametrize("causal", [True, False])
def test_the_mask_of_a_slice_is_its_rows_of_the_full_mask(causal: bool) -> None:
    documents = packed_batch()["documents"]
    full = AttentionContext(positions=torch.arange(23)[None], documents=documents, causal=causal)
    assert full.mask is not None
    for start, stop in pairwise((0, *accumulate(SLICES))):
        assert torch.equal(full.slice_tokens(start, stop).mask, full.mask[:, :, start:stop, :stop])


def train_packed(name: str, layout: str) -> tuple[float, dict[str, Tensor]]:
    """The loss of one step on packed documents, and the gradients that SGD took."""
    model = build(name)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    rule = OptimizerConfig(name="sgd", lr=LR, weight_decay=0.0)
    # By its own choice TeraPipe would not slice such a short sequence.
    slices = SLICES if "terapipe" in layout else ()
    engine = Engine(model, layout, rule, options=float64(slice_lengths=slices))
    result = engine.step(packed_batch())
    after = whole(engine.parallel, "master")
    return result.loss, {key: (before[key] - after[key]) / LR for key in after}


def check_ranks(pool: RankPool, name: str, layout: str) -> None:
    _, loss, gradients = alone(name)
    for found_loss, found in pool.run(train_packed, Layout.parse(layout).world, name, layout):
        assert found_loss == pytest.approx(loss, rel=TOLERANCE, abs=0.0)
        assert largest_error(name, found, gradients) < (TOLERANCE, ""), (name, layout)


SAMPLE = [
    ("llama", "cp=2"),
    ("gpt", "cp=2,cp_kind=ulysses"),
    ("deepseek", "cp=2,cp_kind=gather"),
    ("llama full attention", "cp=2"),
    ("gpt", "pp=2,accumulate=2"),
    ("mixtral", "dp=2,ep=2,zero=3"),
    ("llama", "pp=2,accumulate=2,schedule=terapipe"),
]
LAYOUTS = (
    *(f"cp={cp},cp_kind={kind}" for cp in (2, 4) for kind in ("ring", "ulysses", "gather")),
    "cp=4,cp_kind=ring-ulysses,ulysses=2",
    "pp=2,accumulate=2",
    "pp=2,accumulate=2,schedule=zb-h1",
    "pp=2,cp=2,accumulate=2",
    "tp=2,cp=2",
    "dp=2,zero=3,recompute=full",
)


@pytest.mark.parametrize(("name", "layout"), SAMPLE)
def test_ranks_keep_packed_documents_apart(pool: RankPool, name: str, layout: str) -> None:
    check_ranks(pool, name, layout)


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_family_keeps_packed_documents_apart(pool: RankPool, layout: str) -> None:
    for name in FAMILIES:
        check_ranks(pool, name, layout)
