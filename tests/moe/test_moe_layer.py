"""The mixture layer against every expert on every token, and its parts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from echelon import rng
from echelon.kernels.gemm.grouped_gemm import grouped_gemm
from echelon.moe import build_gate
from echelon.moe.experts import ExpertDropout, Experts
from echelon.moe.moe_layer import MoELayer
from echelon.moe.token_permutation import TokenPermutation

WIDTH, FFN, EXPERTS = 16, 24, 8
GATES = {"mixtral": 2, "switch": 1, "gshard": 2, "expert-choice": 2.0, "deepseek-v3": 3, "qwen": EXPERTS}


def layer(gate: str, k: float, *, activation: str = "swiglu") -> MoELayer:
    torch.manual_seed(0)
    made = MoELayer(build_gate(gate, WIDTH, EXPERTS, k), Experts(EXPERTS, WIDTH, FFN, activation=activation)).double()
    for parameter in made.experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def dense(mixture: MoELayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Every expert computes every token, with weight 0 unless routed to it."""
    routing = mixture.gate(x)
    tokens = x.flatten(0, 1)
    weights = torch.zeros(len(tokens), EXPERTS + 1, dtype=x.dtype)
    weights = weights.index_put((routing.tokens, routing.experts), routing.weights, accumulate=True)[:, :EXPERTS]
    h = torch.einsum("nw,egfw->negf", tokens, mixture.experts.up)
    if mixture.experts.activation == "swiglu":
        h = F.silu(h[:, :, 0]) * h[:, :, 1]
    else:
        h = F.relu(h[:, :, 0]) if mixture.experts.activation == "relu" else F.gelu(h[:, :, 0], approximate="tanh")
    out = torch.einsum("nef,ewf->new", h, mixture.experts.down)
    return (out * weights.unsqueeze(-1)).sum(1).view_as(x), routing.loss


@pytest.mark.parametrize(("gate", "k"), GATES.items())
@pytest.mark.parametrize("activation", ["swiglu", "relu", "gelu"])
def test_it_equals_every_expert_on_every_token(gate: str, k: float, activation: str) -> None:
    mixture = layer(gate, k, activation=activation).eval()
    x = torch.randn(3, 10, WIDTH, dtype=torch.float64, requires_grad=True)
    wanted = [x, *mixture.parameters()]
    found, expected = (
        (y, loss, torch.autograd.grad((y * y.detach().cos()).sum() + loss.sum(), wanted))
        for y, loss in (mixture(x), dense(mixture, x))
    )
    for a, b in zip((found[0], found[1], *found[2]), (expected[0], expected[1], *expected[2]), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


def test_experts_without_a_token_have_a_gradient_of_zero() -> None:
    mixture = layer("loss-free", 1)
    mixture.gate.bias[3] = 1e6
    y, _ = mixture(torch.randn(2, 5, WIDTH, dtype=torch.float64))
    y.sum().backward()
    alone = mixture.experts.up.grad.flatten(1).abs().sum(1)
    assert (alone > 0).tolist() == [expert == 3 for expert in range(EXPERTS)]


def test_a_tally_is_of_the_step_and_moves_the_bias() -> None:
    mixture = layer("loss-free", 2).train()
    for _ in range(2):
        mixture(torch.randn(2, 5, WIDTH, dtype=torch.float64))
    assert mixture.expert_load is not None
    assert int(mixture.expert_load[:-1].sum()) == 2 * 2 * 5 * 2
    load = mixture.expert_load[:-1]
    mixture.end_step(load)
    assert mixture.expert_load is None
    assert torch.equal(mixture.gate.bias.sign(), (load.double().mean() - load).sign())


def test_evaluation_and_repetitions_do_not_count() -> None:
    mixture = layer("mixtral", 2)
    mixture.eval()(torch.randn(1, 3, WIDTH, dtype=torch.float64))
    mixture.train()
    mixture.counts_load = False
    mixture(torch.randn(1, 3, WIDTH, dtype=torch.float64))
    assert mixture.expert_load is None


@pytest.mark.parametrize("ends", [[3, 3, 7, 10], [0, 0, 0, 0], [10, 10, 10, 10], [2, 5, 5, 8]])
def test_runs_of_rows_have_matrices_of_their_own(ends: list[int]) -> None:
    x = torch.randn(10, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 5, 6, dtype=torch.float64, requires_grad=True)
    found = grouped_gemm(x, weight, torch.tensor(ends, dtype=torch.int32))
    wanted = torch.zeros(10, 5, dtype=torch.float64)
    for run, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        wanted[start:end] = x[start:end] @ weight[run].t()
    assert torch.equal(found, wanted.detach())
    assert torch.autograd.gradcheck(lambda a, b: grouped_gemm(a, b, torch.tensor(ends, dtype=torch.int32)), (x, weight))


@pytest.mark.parametrize(("gate", "k"), GATES.items())
def test_what_is_sent_and_summed_are_each_other_s_inverse_in_backward(gate: str, k: float) -> None:
    torch.manual_seed(1)
    order = TokenPermutation.from_routing(build_gate(gate, WIDTH, EXPERTS, k).eval()(torch.randn(2, 6, WIDTH)))
    x = torch.randn(12, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(len(order.tokens), 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(order.permute, x)
    assert torch.autograd.gradcheck(order.sum_per_token, y)
    assert torch.allclose((order.permute(x) * y).sum(), (x * order.sum_per_token(y)).sum())


# -- dropout inside experts -------------------------------------------------------------------------------------------


def test_experts_drop_hidden_units_by_token_and_expert() -> None:
    mixture = layer("mixtral", 2)
    mixture.experts.drop = ExpertDropout(0.4)
    rng.attach_stream(mixture, stream := rng.RandomStream(7))
    stream.samples = torch.tensor([5, 9])
    x = torch.randn(2, 50, WIDTH, dtype=torch.float64)
    routing = mixture.gate(x)
    keys = mixture.experts.drop.assignment_keys(x, routing)
    assert keys is not None
    assert len(set(keys.tolist())) == 200
    factor = mixture.experts.drop.keep_factors(keys, 0, torch.empty(200, FFN, dtype=torch.float64))
    assert abs(float((factor == 0).double().mean()) - 0.4) < 0.03
    assert set(factor.flatten().tolist()) == {0.0, 1 / (1 - 0.4)}  # what is kept is larger: the mean stays
    tokens = x.flatten(0, 1).index_select(0, routing.tokens)
    h = torch.einsum("aw,agfw->agf", tokens, mixture.experts.up[routing.experts])
    h = F.silu(h[:, 0]) * h[:, 1] * factor
    y = torch.einsum("af,awf->aw", h, mixture.experts.down[routing.experts]) * routing.weights.unsqueeze(1)
    wanted = torch.zeros(100, WIDTH, dtype=torch.float64).index_add(0, routing.tokens, y)
    assert torch.allclose(mixture(x)[0].flatten(0, 1), wanted, rtol=0, atol=1e-12)
    assert torch.equal(mixture(x)[0], mixture(x)[0])
    stream.samples = torch.tensor([5, 10])
    assert not torch.equal(mixture(x)[0][1].flatten(), wanted[50:].flatten())
    assert mixture.eval().experts.drop.assignment_keys(x, routing) is None


def test_parts_of_an_expert_drop_what_the_whole_would() -> None:
    drop = ExpertDropout(0.4)
    keys = torch.arange(20) * 12345
    whole = drop.keep_factors(keys, 0, torch.empty(20, FFN))
    parts = [drop.keep_factors(keys, first, torch.empty(20, FFN // 2)) for first in (0, FFN // 2)]
    assert torch.equal(torch.cat(parts, 1), whole)
