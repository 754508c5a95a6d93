"""GPT and Llama on one device: causal, documents apart, the loss contract, tied weights, first values, dropout."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from echelon import rng
from echelon.models import ModelConfig, build, find_model, init_weights
from echelon.models.attention import AttentionContext
from echelon.models.layers import loss_sum

FAMILIES = ["gpt-tiny", "llama-tiny"]


def tokens(rows: int = 2, length: int = 33) -> Tensor:
    return torch.randint(257, (rows, length), generator=torch.Generator().manual_seed(0))


def model(name: str, **changes: object) -> nn.Module:
    config: ModelConfig = replace(find_model(name), layers=2, **changes)  # type: ignore[arg-type]
    built = build(config, dtype=torch.float64)
    # Initial weights are small; larger ones make every path matter in the comparisons below.
    with torch.no_grad():
        for p in built.parameters():
            if p.dim() > 1:
                p.mul_(5)
    return built


def close(a: Tensor, b: Tensor) -> bool:
    a, b = a.detach(), b.detach()
    return bool((a - b).abs().max() <= 1e-12 * max(1.0, float(b.abs().max())))


def gradients(built: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in built.named_parameters() if p.grad is not None}
    built.zero_grad()
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_a_later_token_does_not_change_earlier_logits(name: str) -> None:
    built, x = model(name), tokens()
    y = x.clone()
    y[:, 20] = (y[:, 20] + 1) % 257
    before, after = built.logits(x), built.logits(y)
    assert before.shape == (2, 33, 257)
    assert close(before[:, :20], after[:, :20])
    assert (before[:, 20:] - after[:, 20:]).abs().amax(-1).min() > 1e-6


@pytest.mark.parametrize("dropout", [0.0, 1e-18])
@pytest.mark.parametrize("name", FAMILIES)
def test_documents_do_not_see_each_other(name: str, dropout: float) -> None:
    """A dropout that never drops takes the path without a fused kernel."""
    built, x = model(name, dropout=dropout), tokens()
    documents = torch.tensor([[0] * 10 + [1] * 23, [4] * 30 + [2] + [7, 7]])
    total, count = built(x, x, documents)
    total.backward()
    together = gradients(built)
    parts = [(0, 0, 10), (0, 10, 33), (1, 0, 30), (1, 30, 31), (1, 31, 33)]
    losses = [built(x[row : row + 1, a:b], x[row : row + 1, a:b])[0] for row, a, b in parts]
    torch.stack(losses).sum().backward()
    apart = gradients(built)
    assert count == 66
    assert close(total, torch.stack(losses).sum())
    assert all(close(together[key], apart[key]) for key in together)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_document_is_no_documents(name: str) -> None:
    built, x = model(name), tokens()
    assert close(built(x, x, torch.zeros_like(x))[0], built(x, x)[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_the_path_with_dropout_computes_the_same_attention(name: str) -> None:
    built, x = model(name, dropout=1e-18), tokens()
    built(x, x)[0].backward()
    plain = gradients(built)
    total = built.eval()(x, x)[0]
    total.backward()
    fused = gradients(built)
    assert close(built.train()(x, x)[0], total)
    assert all(close(plain[key], fused[key]) for key in plain)


def test_grouped_queries_equal_repeated_heads() -> None:
    grouped = model("llama-tiny")
    full = build(replace(grouped.config, kv_heads=4), dtype=torch.float64)
    state = grouped.state_dict()
    for key in state:
        if key.endswith(("attn.k.weight", "attn.v.weight")):
            state[key] = state[key].view(2, 16, 64).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    assert close(grouped.logits(tokens()), full.logits(tokens()))


def test_llama_is_the_reference_of_transformers_in_small() -> None:
    """One block by hand: rotation of halves, scaled scores, SwiGLU, RMSNorm."""
    built, x = model("llama-tiny", kv_heads=4), tokens(1, 5)
    block, h = built.blocks[0], built.embed(tokens(1, 5))[0]

    def norm(v: Tensor, weight: Tensor) -> Tensor:
        return v / (v.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    n = norm(h, block.norm1.weight)
    out = torch.zeros_like(h)
    for head in range(4):
        q, k, v = (n @ m.weight[head * 16 : head * 16 + 16].T for m in (block.attn.q, block.attn.k, block.attn.v))
        rate = 500_000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
        angle = torch.arange(5, dtype=torch.float64)[:, None] * rate
        turn = torch.polar(torch.ones_like(angle), angle)
        q, k = (torch.view_as_real(torch.complex(t[:, :8], t[:, 8:]) * turn) for t in (q, k))
        scores = torch.einsum("ixc,jxc->ij", q, k) / 4
        scores += torch.full((5, 5), -torch.inf, dtype=torch.float64).triu(1)
        out += scores.softmax(-1) @ v @ block.attn.o.weight[:, head * 16 : head * 16 + 16].T
    h = h + out
    n = norm(h, block.norm2.weight)
    h = h + (nn.functional.silu(n @ block.mlp.gate.weight.T) * (n @ block.mlp.up.weight.T)) @ block.mlp.down.weight.T
    captured = []
    block.register_forward_hook(lambda _m, _i, o: captured.append(o))
    built.logits(x)
    assert close(captured[0][0], h)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_is_a_wide_sum_over_valid_targets(name: str, dtype: torch.dtype) -> None:
    built, x = build(find_model(name), dtype=dtype), tokens()
    targets = tokens().roll(-1, 1)
    targets[:, -1] = -100
    targets[0, :5] = -100
    total, count = built(x, targets)
    assert count == 2 * 32 - 5
    assert (total.shape, count.shape, count.dtype) == ((), (), torch.int64)
    assert total.dtype == dtype
    logits = built.logits(x).log_softmax(-1)
    expected = sum(-logits[b, t, targets[b, t]] for b in range(2) for t in range(33) if targets[b, t] != -100)
    assert torch.allclose(total, expected, rtol=1e-5)


def test_loss_of_narrow_logits_is_fp32() -> None:
    logits = torch.randn(4, 257).bfloat16()
    total, count = loss_sum(logits, torch.tensor([1, 2, -100, 4]))
    assert (total.dtype, int(count)) == (torch.float32, 3)
    assert torch.equal(total, loss_sum(logits.float(), torch.tensor([1, 2, -100, 4]))[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_no_valid_target_is_zero_and_not_nan(name: str) -> None:
    built, x = model(name), tokens()
    total, count = built(x, torch.full_like(x, -100))
    total.backward()
    assert (float(total.detach()), int(count)) == (0.0, 0)
    assert all(not g.any() for g in gradients(built).values())


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_tied_weights_are_one_parameter(name: str, tied: bool, device: str) -> None:
    built = build(replace(find_model(name), tied=tied), device, dtype=torch.float64)
    names = [n for n, _ in built.named_parameters()]
    assert (built.head.weight is built.embed.weight) == tied
    assert ("head.weight" in names) != tied
    assert names[0] == "embed.weight"
    assert not list(built.buffers())
    assert {p.dtype for p in built.parameters()} == {torch.float64}


def test_a_sequence_beyond_the_maximum_is_refused() -> None:
    for name in FAMILIES:
        with pytest.raises(ValueError, match=r"exceeds the model.s maximum \(length=257, max_seq_len=256\)"):
            build(find_model(name), "meta").logits(torch.zeros(1, 257, dtype=torch.int64, device="meta"))


# --- first values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_initial_weights_follow_parameter_names(name: str) -> None:
    built = build(find_model(name), seed=3)
    parameters = dict(built.named_parameters())
    for key, parameter in parameters.items():
        p = parameter.detach()
        init = built.initial(key)
        index = torch.arange(p.numel())
        assert torch.equal(p.flatten(), init.values(3, key, index, p.dtype))
        if init.distribution == "normal":
            std = 0.02 / 8**0.5 if key.endswith(("o.weight", "down.weight")) else 0.02
            assert abs(float(p.std()) / std - 1) < 0.05
            assert abs(float(p.mean())) < 0.05 * std
        else:
            assert init == (rng.ZEROS if key.endswith("bias") else rng.ONES)
            assert key.endswith("bias") or "norm" in key
    assert not torch.equal(parameters["blocks.0.attn.q.weight"], parameters["blocks.1.attn.q.weight"])
    with pytest.raises(ValueError, match=r"unknown initialisation of a parameter \(blocks.0.extra.weight\)"):
        built.initial("blocks.0.extra.weight")


def test_seed_decides_and_the_global_generator_does_not_move() -> None:
    before = torch.get_rng_state()
    a, b, c = (build(find_model("gpt-tiny"), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(a.embed.weight, b.embed.weight)
    assert not torch.equal(a.embed.weight, c.embed.weight)
    init_weights(c, 1)
    assert torch.equal(a.embed.weight, c.embed.weight)


@pytest.mark.parametrize("name", FAMILIES)
def test_first_loss_is_that_of_a_guess(name: str) -> None:
    total, count = build(find_model(name))(tokens(), tokens(1, 66).view(2, 33).flip(1))
    assert abs(float(total.detach() / count) - 5.55) < 0.15


# --- dropout ----------------------------------------------------------------------------------------------------------


def with_dropout(name: str, samples: list[int]) -> tuple[nn.Module, rng.RandomStream]:
    built, stream = model(name, dropout=0.1), rng.RandomStream(0)
    # Per block attention, drop1, drop2; one behind the embedding.
    assert rng.attach_stream(built, stream) == 2 * 3 + 1
    stream.samples = torch.tensor(samples)
    return built, stream


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_drop_the_same_alone_as_in_a_batch(name: str) -> None:
    built, stream = with_dropout(name, [8, 9, 10, 11])
    x = tokens(4)
    whole = built(x, x)[0]
    whole.backward()
    together = gradients(built)
    assert not close(whole, built.eval()(x, x)[0])
    built.train()
    losses = []
    for row in range(4):
        stream.samples = torch.tensor([8 + row])
        total = built(x[row : row + 1], x[row : row + 1])[0]
        total.backward()
        losses.append(total.detach())
    apart = gradients(built)
    assert close(whole, torch.stack(losses).sum())
    assert all(close(together[key], apart[key]) for key in together)


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: object) -> Tensor:
        out: Tensor = checkpoint(self.inner, *inputs, use_reentrant=False, preserve_rng_state=False)
        return out


@pytest.mark.parametrize("name", FAMILIES)
def test_recomputed_blocks_drop_the_same(name: str) -> None:
    built, _ = with_dropout(name, [8, 9])
    x = tokens()
    built(x, x)[0].backward()
    plain = gradients(built)
    for i, block in enumerate(built.blocks):
        built.blocks[i] = Recomputed(block)
    built(x, x)[0].backward()
    recomputed = gradients(built)
    assert all(torch.equal(plain[key.replace(".inner", "")], recomputed[key]) for key in recomputed)
    assert len(plain) == len(recomputed)


@pytest.mark.parametrize("name", FAMILIES)
def test_heads_are_read_from_the_projections(name: str) -> None:
    """Half of the heads, with half of each projection, give half of the sum: what tensor parallelism relies on."""
    built, stream = with_dropout(name, [8, 9])
    attention = built.blocks[0].attn
    x = torch.randn(2, 12, 64, dtype=torch.float64)
    seen = AttentionContext(torch.arange(12)[None])
    whole = attention(x, seen)
    bias = attention.o.bias
    if bias is not None:
        whole = whole - bias
    parts = []
    for half in range(2):
        part = build(built.config, dtype=torch.float64).blocks[0].attn
        for key in ("q", "k", "v", "o"):
            ours, theirs = getattr(part, key), getattr(attention, key)
            ours.weight = nn.Parameter(theirs.weight.chunk(2, dim=1 if key == "o" else 0)[half])
            if theirs.bias is not None:
                ours.bias = None if key == "o" else nn.Parameter(theirs.bias.chunk(2)[half])
        part.core.dropout = rng.Dropout(0.1, "blocks.0.attn.core.dropout", stream)
        part.core.dropout.window[1] = (2 * half, 4)
        parts.append(part(x, seen))
    assert close(parts[0] + parts[1], whole)
