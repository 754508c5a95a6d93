"""Models with experts: which layers have them, published counts, causality, their losses, and small ones of a kind."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from echelon.config.run_config import Config
from echelon.layout import ValidationError
from echelon.models import SIZES, ModelConfig, build, find_model, model_config, reduced_config
from echelon.models.layers import loss_sum
from echelon.models.moe_config import MoEConfig, override_gate
from echelon.models.transformer_block import validate_gate
from echelon.moe import GATES
from echelon.moe.moe_layer import MoELayer

NAMES = [name for name, config in SIZES.items() if config.moe is not None]
TINY = [name for name in NAMES if name.endswith("-tiny")]
EVERY_OTHER = MoEConfig(experts=4, k=1, ffn=24, gate="switch", activation="relu", every=2, shared_ffn=20)


def tokens(rows: int = 2, length: int = 24) -> Tensor:
    return torch.randint(257, (rows, length), generator=torch.Generator().manual_seed(0))


def model(name: str) -> nn.Module:
    built = build(replace(find_model(name), layers=2), dtype=torch.float64)
    with torch.no_grad():
        for p in built.parameters():
            if p.dim() > 1:
                p.mul_(5)
    return built


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("mixtral-8x7b", 46_702_792_704, 12.9e9),
        ("qwen3-30b-a3b", 30_532_122_624, 3.3e9),
        ("deepseek-v2", 235_741_434_880, 21e9),
        # Its files hold 685 billion: 14 of them are the layer that predicts a second token.
        ("deepseek-v3", 671_026_404_352, 37e9),
    ],
)
def test_published_counts(name: str, total: int, active: float) -> None:
    config = find_model(name)
    assert config.parameters == total
    assert config.parameters - config.idle_parameters == pytest.approx(active, rel=0.02)
    # MFU counts what multiplies: without the embedding.
    assert config.matmul_parameters == config.parameters - config.idle_parameters - config.vocab * config.width


def test_switch_costs_a_token_what_its_dense_model_does() -> None:
    """One expert of the dense size for each token: only the routers, less the experts' missing biases, are more."""
    config = find_model("switch-base-8")
    dense = replace(config, moe=None)
    routers, biases = 6 * 8 * 768, 6 * (3072 + 768)
    assert config.matmul_parameters == dense.matmul_parameters + routers - biases
    assert config.parameters == dense.parameters + routers - biases + 6 * 7 * 2 * 768 * 3072


@pytest.mark.parametrize("name", ["switch-base-8", "deepseek-v3", "mixtral-8x7b"])
def test_experts_are_where_the_configuration_says(name: str) -> None:
    built = build(find_model(name), "meta")
    found = [index for index, block in enumerate(built.blocks) if isinstance(block.mlp, MoELayer)]
    wanted = {"switch-base-8": range(1, 12, 2), "deepseek-v3": range(3, 61), "mixtral-8x7b": range(32)}
    assert found == [*wanted[name]]


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_formula_with_shared_experts_in_every_other_layer(family: str) -> None:
    config = ModelConfig(
        name="x", family=family, layers=5, width=48, heads=6, kv_heads=6, ffn=40, vocab=13, max_seq_len=9
    )
    config = replace(config, moe=replace(EVERY_OTHER, dense_layers=1))
    built = build(config, "meta")
    assert config.parameters == sum(p.numel() for p in built.parameters())
    assert config.num_moe_layers == 2
    assert config.idle_parameters == 2 * 3 * 2 * 48 * 24


@pytest.mark.parametrize("name", TINY)
def test_a_later_token_does_not_change_earlier_logits(name: str) -> None:
    built, x = model(name).eval(), tokens()
    y = x.clone()
    y[:, 15] = (y[:, 15] + 1) % 257
    before, after = built.logits(x).detach(), built.logits(y).detach()
    assert float((before[:, :15] - after[:, :15]).abs().max()) < 1e-12
    assert float((before[:, 15] - after[:, 15]).abs().max()) > 1e-6


@pytest.mark.parametrize("name", TINY)
def test_losses_of_balance_count_once_for_each_target(name: str) -> None:
    built, x = model(name).eval(), tokens()
    targets = x.roll(-1, 1)
    targets[0, :10] = -100
    evaluated, _ = built(x, targets)
    built.training = True  # of the whole alone: gates draw nothing
    total, count = built(x, targets)
    plain, same = loss_sum(built.logits(x), targets)
    balance = torch.zeros(2, dtype=torch.float64)

    def note(_module: nn.Module, _inputs: object, out: tuple[Tensor, Tensor]) -> None:
        balance.add_(out[1].detach())

    for block in built.blocks:
        if isinstance(block.mlp, MoELayer):
            block.mlp.register_forward_hook(note)
    built.logits(x)
    assert count == same == 38
    assert float(balance.min()) > 0
    assert torch.allclose(total, plain + 14 * balance[0] + 24 * balance[1], rtol=1e-12)
    assert torch.allclose(evaluated, plain, rtol=1e-12)


def test_a_built_gate_starts_without_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """It did not: what was in memory before decided which experts a token saw."""
    empty = nn.Module.to_empty

    def dirty(self: nn.Module, **options: object) -> nn.Module:
        empty(self, **options)  # type: ignore[arg-type]
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.data.fill_(torch.nan)
        return self

    monkeypatch.setattr(nn.Module, "to_empty", dirty)
    built = build(find_model("deepseek-tiny"))
    assert not any(tensor.isnan().any() for tensor in built.state_dict().values())
    assert all(not buffer.any() for buffer in built.buffers())
    assert len(list(built.buffers())) == 3


@pytest.mark.parametrize("name", NAMES)
def test_reduced_moe_models_are_small_and_run(name: str) -> None:
    config, small = find_model(name), reduced_config(find_model(name))
    assert config.moe is not None
    assert small.moe is not None
    assert (small.moe.gate, small.moe.every) == (config.moe.gate, config.moe.every)
    assert bool(small.moe.shared_ffn) == bool(config.moe.shared_ffn)
    assert small.num_moe_layers in (2, 3, 4)
    assert (small.mla is None) == (config.mla is None)
    total, count = build(small)(tokens(), tokens().flip(1))
    total.backward()
    assert abs(float(total.detach() / count) - 5.55) < 0.3


# -- another gate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("size", ["moe-tiny", "qwen-moe-tiny", "mixtral-8x7b"])
def test_any_gate_replaces_that_of_a_named_model(name: str, size: str) -> None:
    mixture = model_config.find_model(size).moe
    assert mixture is not None
    found = override_gate(mixture, f"{name},cap=4" if name == "expert-choice-capped" else name)
    assert found.gate == name
    assert validate_gate(found) == []


@pytest.mark.parametrize("name", GATES)
def test_every_gates_parameters_are_counted(name: str) -> None:
    """Those of two levels were not."""
    changed = model_config.override_config(replace(find_model("moe-tiny"), layers=2), gate=name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = build(changed, "meta")
        assert build(reduced_config(changed), "meta") is not None
    assert changed.parameters == sum(parameter.numel() for parameter in built.parameters())


def test_a_gate_with_options() -> None:
    changed = model_config.override_config(
        model_config.find_model("moe-tiny"), gate="switch, capacity_factor=1.5,jitter=0", expert_dropout=0.4
    )
    assert changed.moe == MoEConfig(
        experts=8, k=1, ffn=88, gate="switch", options=(("capacity_factor", 1.5), ("jitter", 0)), dropout=0.4
    )
    gate = build(changed, "meta").blocks[0].mlp.gate
    assert (gate.capacity_factor, gate.jitter) == (1.5, 0)
    assert model_config.override_config(
        model_config.find_model("moe-tiny"), gate="qwen,k=3,normalise=true"
    ).moe.options == (("normalise", True),)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("swich", 'is an unknown gate.*did you mean "switch"'),
        ("switch,k=2", r"a token has one expert \(k=2\)"),
        ("mixtral,balanc=1", 'not an option of the gate mixtral.*did you mean "balance"'),
        ("mixtral,3", "is not option=value"),
        ("mixtral,k=two", "is not a number"),
        ("hierarchical,k=3", "k is not a multiple of k_groups"),
    ],
)
def test_invalid_gates_are_reported_before_training_starts(text: str, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Config.load(None, ["model=moe-tiny", f"gate={text}"])


def test_a_gate_requires_moe_layers() -> None:
    with pytest.raises(
        ValidationError, match=r"gate=switch has no effect with model=llama-tiny, which has no MoE layers"
    ):
        Config.load(None, ["model=llama-tiny", "gate=switch"])
