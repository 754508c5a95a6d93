"""Attention that reaches other ranks: against the ring self-attention of 2021, and what it keeps."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counting import CountCollectives
from live_tensor_bytes import LivingBytes
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from echelon import models
from echelon.kernels.attention.blockwise_attention import attend_backward
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout, Mesh
from echelon.models import model_config
from echelon.models.attention import AttentionContext, CoreAttention
from echelon.models.model_config import ModelConfig
from echelon.parallel.comm.mesh_axis import MeshAxes
from echelon.parallel.cp.all_gather_attention import AllGatherAttention
from echelon.parallel.cp.cp_attention import MaskSpec
from echelon.parallel.cp.ring_attention import RingAttention
from echelon.parallel.cp.zigzag import ZigzagOrder
from echelon.training.engine import Engine
from echelon.verification.verify_case import VerifyCase

HEADS, KV_HEADS, HEAD_DIM, LENGTH = 4, 2, 8, 48


def ring_self_attention(q: Tensor, k: Tensor, v: Tensor, places: Tensor, ranks: int, rank: int) -> Tensor:
    """The algorithm of 2021, of whole rows of scores: keys go around once for the scores, values once for the result.

    Written for one rank that can see every rank's slices (k and v are those of all); the order of steps is the ring's.
    """
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    mine = q[:, :, places[rank]]
    scores = mine.new_empty(*mine.shape[:3], k.shape[2])
    for step in range(ranks):  # 1. the keys of rank - step arrive
        theirs = places[(rank - step) % ranks]
        scores[..., theirs] = mine @ k[:, :, theirs].transpose(2, 3) * HEAD_DIM**-0.5
    scores.masked_fill_(torch.arange(k.shape[2]) > places[rank][:, None], float("-inf"))
    weights = scores.softmax(-1)
    out = torch.zeros_like(mine)
    for step in range(ranks):  # 2. the values arrive the same way
        theirs = places[(rank - step) % ranks]
        out += weights[..., theirs] @ v[:, :, theirs]
    return out


def attend_around(ranks: int) -> tuple[float, float]:
    """On a rank: the largest difference from the algorithm above, of results and of gradients."""
    rank = dist.get_rank()
    axes = MeshAxes(Mesh(Layout(cp=ranks)), rank, ["cp"])
    order = ZigzagOrder(ranks, 1, LENGTH)
    places = torch.tensor([order.rank_positions(r) for r in range(ranks)])
    source = torch.Generator().manual_seed(3)
    whole = [
        torch.randn(2, heads, LENGTH, HEAD_DIM, generator=source, dtype=torch.float64).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    weight = torch.randn(2, HEADS, LENGTH, HEAD_DIM, generator=source, dtype=torch.float64)
    wanted = [ring_self_attention(*whole, places, ranks, r) for r in range(ranks)]
    total = sum((out * weight[:, :, places[r]]).sum() for r, out in enumerate(wanted))
    expected = torch.autograd.grad(total, whole)
    mine = [x.detach()[:, :, places[rank]].requires_grad_() for x in whole]
    ring = RingAttention(axes["cp"], order, causal=True, device=torch.device("cpu"))
    out = ring.attend(*mine, MaskSpec(query_positions=places[rank], length=LENGTH, documents=None))
    found = torch.autograd.grad((out * weight[:, :, places[rank]]).sum(), mine)
    errors = [(a - b[:, :, places[rank]]).abs().max() for a, b in zip(found, expected, strict=True)]
    return float((out - wanted[rank]).abs().max()), float(max(errors))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_flash_form_equals_the_ring_self_attention_of_2021(pool: RankPool, ranks: int) -> None:
    for errors in pool.run(attend_around, ranks, ranks):
        assert max(errors) < 1e-12


def send_short_types(ranks: int) -> Counter[tuple[str, int]]:
    """On a rank: how many messages of how many bytes an attention of bfloat16 sends, forward and backward."""
    axes = MeshAxes(Mesh(Layout(cp=ranks)), dist.get_rank(), ["cp"])
    order = ZigzagOrder(ranks, 1, LENGTH)
    places = torch.tensor(order.rank_positions(dist.get_rank()))
    q, k, v = (
        torch.ones(1, heads, len(places), HEAD_DIM, dtype=torch.bfloat16, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    with CountCollectives() as counter:
        ring = RingAttention(axes["cp"], order, causal=True, device=torch.device("cpu"))
        out = ring.attend(q, k, v, MaskSpec(query_positions=places, length=LENGTH, documents=None))
        out.sum().backward()
    assert out.dtype == k.grad.dtype == torch.bfloat16
    return Counter({(kind, size): n for (kind, _, size), n in counter.seen.items()})


def test_bytes_sent_by_attention(pool: RankPool) -> None:
    """Keys and values twice around; gradients home once, of half of the keys where only these were seen."""
    size = 2 * LENGTH // 3 * 2 * KV_HEADS * HEAD_DIM
    for rank, sent in enumerate(pool.run(send_short_types, 3, 3)):
        assert sent == Counter({("send", size): 4 + 2 - rank, ("send", size // 2): rank}) - Counter()


# -- what is kept -----------------------------------------------------------------------------------------------------


def kept_bytes(model: ModelConfig, text: str, length: int) -> int:
    """On a rank: bytes that the layers keep between forward and backward, parameters and the head left out."""
    layout = Layout.parse(text)
    engine = Engine(models.build(replace(model, max_seq_len=length), "meta"), layout)
    seen: dict[int, int] = {}
    own = {unit.unsharded_param.untyped_storage().data_ptr() for unit in engine.parallel.sharded_model.param_groups}

    def pack(x: Tensor) -> Tensor:
        seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    batch = VerifyCase(model=model, seq_len=length).batch(0, 1)
    context = engine.parallel.cp_context
    inputs = {"tokens": batch["tokens"]} if context is None else context.shard_inputs({"tokens": batch["tokens"]})
    with saved_tensors_hooks(pack, lambda x: x):
        hidden = engine.model.hidden_states(**inputs)
    assert hidden.requires_grad
    return sum(size for pointer, size in seen.items() if pointer not in own)


@pytest.mark.parametrize("kind", ["ring", "gather", "ulysses"])
def test_saved_memory_falls_with_cp(pool: RankPool, kind: str) -> None:
    model = replace(model_config.find_model("llama-tiny"), layers=2, kv_heads=4)
    length = 512
    one = pool.run(kept_bytes, 1, model, "dp=1", length)[0]
    two, four = (max(pool.run(kept_bytes, cp, model, f"cp={cp},cp_kind={kind}", length)) for cp in (2, 4))
    assert two <= 1.01 * one / 2
    assert four == pytest.approx(two / 2, rel=0.01)


# -- a model of one's own ---------------------------------------------------------------------------------------------


class OwnModel(torch.nn.Module):
    """Attention by an `echelon.CoreAttention`, the rest written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.where = torch.nn.Embedding(31, 16), torch.nn.Embedding(64, 16)
        self.drop = torch.nn.Dropout(0.2)
        self.qkv, self.core, self.out = torch.nn.Linear(16, 48), CoreAttention(0.1), torch.nn.Linear(16, 31)

    def forward(self, tokens: Tensor, labels: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if positions is None:
            positions = torch.arange(tokens.shape[1])[None]
        x = self.drop(self.embed(tokens) + self.where(positions))
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        x = x + self.core(q, k, v, AttentionContext(positions)).transpose(1, 2).flatten(2)
        logits = self.out(x).flatten(0, 1)
        losses = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=-100)
        return losses, (labels != -100).sum()


class FullModel(OwnModel):
    """One attention that sees all tokens and one that sees those before, and documents of its own numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.second = CoreAttention()

    def forward(  # type: ignore[override]
        self, tokens: Tensor, labels: Tensor, documents: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if positions is None:
            positions = torch.arange(tokens.shape[1])[None]
        x = self.embed(tokens) + self.where(positions)
        for core, seen in (
            (self.core, AttentionContext(positions, documents, causal=False)),
            (self.second, AttentionContext(positions, causal=False)),
            (self.second, AttentionContext(positions, documents)),
        ):
            q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
            x = x + core(q, k, v, seen).transpose(1, 2).flatten(2)
        logits = self.out(x).flatten(0, 1)
        losses = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=-100)
        return losses, (labels != -100).sum()


def full_model() -> FullModel:
    return FullModel()


def full_batch(rows: int, seed: int) -> dict[str, Tensor]:
    batch = own_batch(rows, seed)
    return {**batch, "documents": torch.arange(37).expand(rows, -1) // 11 - 1}


class NoCore(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.out(tokens).sum(), torch.tensor(1)


def own_model() -> OwnModel:
    return OwnModel()


def own_batch(rows: int, seed: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, 31, (rows, 38), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def test_a_custom_model_uses_context_parallelism(pool: RankPool) -> None:
    from echelon.verification.verifier import verify

    layouts = "cp=2; cp=3,cp_kind=gather; cp=4,cp_kind=ulysses; dp=2,cp=2,zero=3"
    report = verify(own_model, layouts, batch=own_batch, pool=pool, steps=2)
    assert report.passed, [verdict.trouble or verdict.first_difference for verdict in report.verdicts]


def test_a_models_attention_may_be_full_without_a_config(pool: RankPool) -> None:
    """Padding is hidden from tokens that see all, whatever number a document has; positions are as on one device."""
    from echelon.verification.verifier import verify

    layouts = "cp=2; cp=3,cp_kind=gather; cp=4,cp_kind=ulysses; cp=4,cp_kind=ring-ulysses,ulysses=2"
    report = verify(full_model, layouts, batch=full_batch, pool=pool, steps=2)
    assert report.passed, [verdict.trouble or verdict.first_difference for verdict in report.verdicts]


class Odd(OwnModel):
    """Does what context parallelism cannot follow."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(  # type: ignore[override]
        self, tokens: Tensor, labels: Tensor, documents: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        if self.what == "turned dropout":
            x = self.drop(x.transpose(1, 2)).transpose(1, 2)
        if self.what == "more tokens":
            x = torch.cat([x[:, :1], x], dim=1)
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        own = torch.zeros_like(tokens) if self.what == "documents" else None
        y = self.core(q, k, v, AttentionContext(torch.arange(x.shape[1])[None], own))
        return y.sum(), (labels != -100).sum()


def refuse_odd(what: str, text: str = "cp=2") -> str:
    engine = Engine(Odd(what), text)
    with pytest.raises(ValueError, match=r"tokens|heads|documents") as caught:
        engine.step(own_batch(1, 0))
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "layout", "words"),
    [
        (
            "turned dropout",
            "cp=2",
            "cannot tell which tokens dropout 'drop' sees (input (1, 16, 20), 20 local tokens)",
        ),
        ("more tokens", "cp=2", "gave this rank 20 tokens of each sequence, and attention has 21"),
        ("documents", "cp=2", "documents must be those of the full sequence (40 tokens with padding, given 20)"),
        ("", "cp=3,cp_kind=ulysses", "do not divide the 4 heads of an attention; use one of 1, 2, 4, or cp_kind=ring"),
    ],
)
def test_models_that_change_their_tokens_are_refused(pool: RankPool, what: str, layout: str, words: str) -> None:
    assert words in pool.run(refuse_odd, Layout.parse(layout).world, what, layout)[0]


def lay_out_operators() -> str:
    with pytest.raises(ValueError, match="has no module with `recompute_output`") as caught:
        Engine(OwnModel(), "cp=2,recompute=ops")
    return str(caught.value)


def test_context_parallel_attention_is_not_recomputed_by_op(pool: RankPool) -> None:
    assert "use recompute=full" in pool.run(lay_out_operators, 2)[0]


def lay_out_no_core() -> str:
    with pytest.raises(ValueError, match="context parallelism cannot shard") as caught:
        Engine(NoCore(), "cp=2")
    return str(caught.value)


def test_context_parallelism_names_what_a_model_lacks(pool: RankPool) -> None:
    said = pool.run(lay_out_no_core, 2)[0]
    assert "its attention must be the module echelon.CoreAttention" in said
    assert "its forward must take `positions`" in said
    assert "or use cp=1" in said


def refuse_inputs() -> list[str]:
    said = []
    engine = Engine(OwnModel(), "cp=2")
    tokens = torch.zeros(1, 5, dtype=torch.int64)
    for batch in (
        {"tokens": tokens, "labels": tokens[:, :4]},
        {"words": tokens},
        {"tokens": tokens, "labels": tokens / 2},
    ):
        with pytest.raises(ValueError, match="sequence") as caught:
            engine.step(batch)
        said.append(str(caught.value))
    return said


def test_inputs_that_cannot_be_sharded_are_named(pool: RankPool) -> None:
    said = pool.run(refuse_inputs, 2)[0]
    assert "every input must have the tokens of the sequence as its second dimension (tokens (1, 5), labels" in said[0]
    assert "no input called targets or labels is of whole numbers (words)" in said[1]
    assert "of whole numbers (tokens, labels)" in said[2]


def what_comes_next(text: str, size: int) -> Tensor:
    engine = Engine(models.build(replace(model_config.find_model("llama-tiny"), layers=2), "meta"), text)
    engine.model.eval()
    tokens = torch.arange(size)[None] % 7
    with engine.non_layer_params_unsharded():
        return engine.next_token_logits(tokens, 257)


@pytest.mark.parametrize("layout", ["cp=2", "cp=4,cp_kind=ulysses", "cp=2,pp=2", "tp=2,cp=2", "cp=2,zero=3"])
def test_generation_equals_one_device(pool: RankPool, layout: str) -> None:
    for size in (1, 9):
        wanted = pool.run(what_comes_next, 1, "dp=1", size)[0]
        for found in pool.run(what_comes_next, Layout.parse(layout).world, layout, size):
            assert torch.allclose(found, wanted, atol=1e-5)


def bytes_between_blocks(ranks: int) -> tuple[int, int]:
    """On a rank: bytes alive while all-gather attention attends, and those of the keys and values of all ranks."""
    axes = MeshAxes(Mesh(Layout(cp=ranks)), dist.get_rank(), ["cp"])
    attention = AllGatherAttention(axes["cp"], ZigzagOrder(ranks, 1, 64), causal=True, device=torch.device("cpu"))
    kv = torch.randn(2, 1, KV_HEADS, 64 // ranks, 256)
    with LivingBytes() as living:
        blocks = attention.kv_blocks(kv)
        next(blocks)
        alive = living.after_collectives()
        del blocks
    return alive, ranks * kv.nbytes


def test_gathered_keys_and_values_are_held_once(pool: RankPool) -> None:
    for alive, all_ranks in pool.run(bytes_between_blocks, 2, 2):
        assert all_ranks <= alive < 1.5 * all_ranks


def gradients_that_outlive_their_block(ranks: int) -> list[int]:
    """On a rank: at each block of backward, how many gradients of keys and values of earlier blocks are alive."""
    axes = MeshAxes(Mesh(Layout(cp=ranks)), dist.get_rank(), ["cp"])
    attention = AllGatherAttention(axes["cp"], ZigzagOrder(ranks, 1, 64), causal=True, device=torch.device("cpu"))
    q, k, v = (torch.randn(1, KV_HEADS, 64 // ranks, HEAD_DIM, requires_grad=True) for _ in range(3))
    seen: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def watched(*args: Any, **options: Any) -> Any:
        alive.append(sum(gradient() is not None for gradient in seen))
        gradients = attend_backward(*args, **options)
        seen.extend(weakref.ref(gradient) for gradient in gradients[1:])
        return gradients

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("echelon.parallel.cp.cp_attention.attend_backward", watched)
        mask = MaskSpec(query_positions=attention.local_positions, length=64, documents=None)
        attention.attend(q, k, v, mask).sum().backward()
    return alive


def test_gradients_of_a_block_are_freed_before_the_next(pool: RankPool) -> None:
    for alive in pool.run(gradients_that_outlive_their_block, 2, 2):
        assert len(alive) > 1
        assert not any(alive)
