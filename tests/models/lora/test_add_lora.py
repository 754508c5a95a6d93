"""`add_lora`: which linears get adapters, what is frozen, and what a wrong pattern says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon import models
from echelon.layout import ValidationError
from echelon.models.lora.adapter import adapted_names, remove_adapters
from echelon.moe.gates.gate import Gate


def tiny(name: str = "llama-tiny") -> Any:
    return models.build(models.SIZES[name], dtype=torch.float64)


def trained(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def test_all_linears_of_the_layers_and_not_the_head() -> None:
    model = ec.add_lora(tiny(), rank=2)
    assert {name.rpartition(".")[2] for name in adapted_names(model)} == {"q", "k", "v", "o", "gate", "up", "down"}
    assert all(".lora." in name for name in trained(model))


def test_of_an_moe_model_the_dense_parts() -> None:
    model = ec.add_lora(tiny("deepseek-tiny"), rank=2)
    names = adapted_names(model)
    assert any(".shared." in name for name in names)
    assert not any("experts" in name or isinstance(model.get_submodule(name), Gate) for name in names)


def test_the_outputs_change_when_b_does_and_not_before() -> None:
    tokens = torch.arange(6)[None]
    model = tiny().eval()
    before = model.logits(tokens)
    ec.add_lora(model, rank=2, targets=["q"])
    torch.testing.assert_close(model.logits(tokens), before, rtol=0, atol=0)
    model.blocks[0].attn.q.lora.B[0].data.fill_(0.1)
    assert (model.logits(tokens) - before).abs().max() > 1e-6
    torch.testing.assert_close(remove_adapters(model).logits(tokens), before, rtol=0, atol=0)


def test_the_scale_of_rank_stabilised_adapters() -> None:
    plain, stable = (
        ec.add_lora(tiny(), rank=4, alpha=8, rslora=on).blocks[0].attn.q.lora.scale for on in (False, True)
    )
    assert (plain, stable) == (2.0, 4.0)


def test_a_starts_as_the_weight_of_a_linear_of_as_many_inputs() -> None:
    model = ec.add_lora(nn.Sequential(nn.Linear(400, 8)), rank=4, targets=["0"])
    largest = float(model[0].lora.A.detach().abs().max())
    assert 0.99 / 400**0.5 < largest < 1 / 400**0.5


def test_modules_that_are_trained_in_full() -> None:
    model = ec.add_lora(tiny(), rank=2, targets=["blocks.0.attn.q"], train=["norm1", "head"])
    assert {name for name in trained(model) if ".lora." not in name} == {
        "head.weight",
        *(f"blocks.{layer}.norm1.weight" for layer in range(len(model.blocks))),
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"targets": ["q,vv"]},
            "lora.targets=vv matches no linear of the model; legal: patterns of names such as q, k",
        ),
        ({"targets": ["attention.q"]}, "lora.targets=attention.q matches no linear"),
        ({"targets": ["dwn"]}, 'did you mean "down"?'),
        ({"train": ["layernorm"]}, "lora.train=layernorm matches no module with parameters"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as raised:
        ec.add_lora(tiny(), rank=2, **options)
    assert message in str(raised.value)


def test_adapters_are_added_once() -> None:
    with pytest.raises(ValueError, match="has adapters already"):
        ec.add_lora(ec.add_lora(tiny(), rank=2), rank=2)


def test_a_custom_model_and_attention_of_torch() -> None:
    """torch's attention reads the weight of its output projection, and would never call an adapter."""
    model = nn.TransformerEncoderLayer(8, 2, 16)
    assert adapted_names(ec.add_lora(model, rank=2)) == ["linear1", "linear2"]


def test_wrapped_in_a_users_loop() -> None:
    model = ec.add_lora(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), rank=2, seed=3)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    wrapped = ec.wrap(model, "dp=1")
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=0.01)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(3):
        loss = wrapped(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    state = wrapped.full_state_dict()
    assert all(torch.equal(state[name], value) for name, value in frozen.items())
