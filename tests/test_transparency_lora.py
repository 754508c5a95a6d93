"""LoRA adapters on a frozen model: every layout equals one device, for our models and for classes of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from collective_cost_check import check
from foreign_families import write_family
from torch import Tensor, nn

from echelon.config.sections import LoRAConfig
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.models.lora.lora_options import LoRAOptions
from echelon.models.model_config import find_model
from echelon.models.reduced_model import reduced_config
from echelon.verification.verifier import TOLERANCE, LayoutVerdict, Verifier
from echelon.verification.verify_case import FLOAT64, VerifyCase

ALL = LoRAConfig(rank=2, alpha=4.0, dropout=0.1)
SOME = LoRAConfig(rank=3, targets=("blocks.2.attn.q,blocks.2.mlp.down",), rslora=True)
"""adapters in one layer: those before it have no backward"""
NORMS = {"llama-tiny": "norm1", "gpt-tiny": "norm1", "hf:llama": "*layernorm", "hf:gpt2": "ln_1"}
"""modules that are trained in full"""


def verdict_of(
    model: str, layout: str, pool: RankPool, folder: Path, lora: LoRAConfig, leave_out: str = ""
) -> LayoutVerdict:
    config = replace(FLOAT64, lora=lora)
    if model.startswith("hf:"):
        spec = f"hf:{write_family(model.removeprefix('hf:'), folder)}"
        case = VerifyCase(model=spec, steps=2, seq_len=17, config=config)
    else:
        case = VerifyCase(model=replace(find_model(model), dropout=0.1), reduce=True, steps=2, config=config)
    verdict = Verifier(pool, case, leave_out).verify_layout(Layout.parse(layout))
    assert not verdict.trouble, verdict.trouble
    assert verdict.passed == (verdict.max_error <= TOLERANCE), verdict
    return verdict


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama-tiny", "dp=2"),
        ("llama-tiny", "dp=2,zero=3,recompute=full"),
        ("llama-tiny", "tp=2"),
        ("llama-tiny", "tp=2,sp=0"),
        ("llama-tiny", "pp=2,accumulate=2"),
        ("llama-tiny", "pp=2,schedule=zb-h1,accumulate=4"),
        ("llama-tiny", "pp=2,schedule=2bw,accumulate=4"),
        ("llama-tiny", "cp=2,tp=2"),
        ("llama-tiny", "dp=2,offload=optimizer+params"),
        ("gpt-tiny", "dp=2,tp=2,pp=2,zero=1,accumulate=2"),
        ("hf:llama", "dp=2,zero=3"),
        ("hf:llama", "tp=2"),
        ("hf:llama", "cp=2"),
        ("hf:gpt2", "tp=2,sp=0"),
        ("hf:gpt2", "tp=2"),
        ("hf:gpt2", "pp=2,accumulate=2"),
    ],
)
def test_adapters_compute_what_one_device_does(model: str, layout: str, pool: RankPool, tmp_path: Path) -> None:
    assert verdict_of(model, layout, pool, tmp_path, replace(ALL, train=(NORMS[model],))).passed


@pytest.mark.parametrize(
    ("model", "layout", "lora"),
    [
        ("moe-tiny", "dp=2,ep=2", ALL),
        ("hf:mixtral", "dp=2,ep=2", ALL),
        ("deepseek-v3", "dp=2,tp=2,ep=2", ALL),
        ("llama-tiny", "dp=2,zero=3", SOME),
        ("llama-tiny", "dp=2,pp=2,zero=3,accumulate=2", SOME),
        ("gpt-tiny", "tp=2,pp=2,accumulate=2", replace(SOME, train=("embed",))),
    ],
)
def test_adapters_on_some_linears_and_beside_experts(
    model: str, layout: str, lora: LoRAConfig, pool: RankPool, tmp_path: Path
) -> None:
    assert verdict_of(model, layout, pool, tmp_path, lora).passed


@pytest.mark.soak
@pytest.mark.parametrize("model", NORMS)
@pytest.mark.parametrize(
    "layout",
    ["dp=2", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "tp=4,sp=0", "pp=2,accumulate=2", "cp=2", "dp=2,tp=2,pp=2,zero=1"],
)
def test_adapters_on_every_axis(model: str, layout: str, pool: RankPool, tmp_path: Path) -> None:
    assert verdict_of(model, layout, pool, tmp_path, replace(ALL, train=(NORMS[model],))).passed


@pytest.mark.parametrize(
    "layout", ["dp=2,zero=1", "dp=2,zero=3,accumulate=2", "tp=2", "tp=2,sp=0", "dp=2,pp=2,zero=3,accumulate=2"]
)
def test_frozen_weights_are_gathered_and_never_reduced(layout: str, pool: RankPool) -> None:
    """Counted collectives equal the cost functions: of the frozen weights all-gathers alone, and those under zero=3."""
    check(pool, reduced_config(find_model("llama-tiny")), layout, lora=LoRAOptions(rank=2))


@pytest.mark.parametrize("model", ["llama-tiny", "hf:gpt2"])
def test_the_gradient_of_a_replicated_factor_must_be_reduced(model: str, pool: RankPool, tmp_path: Path) -> None:
    """B starts at random: from zero, a wrong gradient of A would not show in the first step."""
    verdict = verdict_of(model, "tp=2,sp=0", pool, tmp_path, ALL, leave_out="tp:all_reduce")
    assert not verdict.passed
    assert verdict.axis == "tp"


class CalledTwice(nn.Module):
    """A layer that runs before and after the others."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.layers = nn.Linear(6, 8), nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.inputs(x)
        for number in (0, 1, 0, 2):
            x = torch.tanh(self.layers[number](x)) + x
        return x.square().sum(), torch.tensor(len(x))


def called_twice() -> nn.Module:
    return CalledTwice()


def rows(number: int, step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(number, 6, generator=torch.Generator().manual_seed(step))}


@pytest.mark.parametrize("train", [("inputs",), ()])
def test_frozen_weights_of_a_layer_that_is_called_twice(train: tuple[str, ...], pool: RankPool) -> None:
    """The backward of its second call freed what that of the first had yet to read."""
    config = replace(FLOAT64, lora=replace(ALL, dropout=0.0, train=train))
    case = VerifyCase(
        model=f"{__file__}:called_twice", batch_function=f"{__file__}:rows", steps=2, seed=0, config=config
    )
    verdict = Verifier(pool, case).verify_layout(Layout.parse("dp=2,zero=3"))
    assert not verdict.trouble, verdict.trouble
    assert verdict.passed, verdict.first_difference
