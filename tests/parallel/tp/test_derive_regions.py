"""The regions that tensor parallelism finds in classes without a table, and the trial that proves each plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from foreign_families import FAMILIES, build_family
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.models.foreign.causal_lm import adapt
from echelon.parallel.tp.derive_regions import DerivedSplit, derive_split
from echelon.parallel.tp.region_plan import RegionPlan
from echelon.parallel.tp.region_trial import RefuseEmptyHeads, RegionCall, is_exact, run_whole


def derive(name: str, tp: int = 2) -> DerivedSplit:
    torch.manual_seed(0)
    return derive_split(adapt(build_family(name)), tp)


def of_layer(name: str, layer: int, tp: int = 2) -> dict[str, tuple[list[str], str]]:
    """Columns and row of each region of a layer, by the last part of its name."""
    path = adapt(build_family(name)).layer_stack.layer_names[layer]
    plans = [plan for plan in derive(name, tp).regions if plan.module == path or plan.module.startswith(f"{path}.")]
    return {plan.module.removeprefix(path).lstrip("."): (list(plan.columns), plan.row) for plan in plans}


QKV, GATED = ["q_proj", "k_proj", "v_proj"], (["gate_proj", "up_proj"], "down_proj")


def test_llama_gets_megatrons_plan() -> None:
    assert of_layer("llama", 0) == {"self_attn": (QKV, "o_proj"), "mlp": GATED}


def test_gpt2_gets_megatrons_plan() -> None:
    parts = ["c_attn.0", "c_attn.1", "c_attn.2"]
    assert of_layer("gpt2", 0) == {"attn": (parts, "c_proj"), "mlp": (["c_fc"], "c_proj")}


def test_latent_attention_is_split_after_its_latents() -> None:
    """The first projections to latents are small and stay whole inside the region."""
    assert of_layer("deepseek_v3", 0)["self_attn"] == (["q_b_proj", "kv_b_proj"], "o_proj")


def test_linears_that_the_layer_calls_itself_are_a_region() -> None:
    (plan,) = [plan for plan in derive("opt").regions if plan.row == "fc2"][:1]
    assert (list(plan.columns), plan.enters_at_columns) == (["fc1"], True)


def test_heads_are_divided_where_the_code_reads_them() -> None:
    plans = {name: next(p for p in derive(name).regions if len(p.columns) > 1) for name in ("phi3", "gpt2", "gpt_oss")}
    assert plans["phi3"].config == {"num_attention_heads": 2, "num_key_value_heads": 1}
    assert plans["gpt2"].attributes[""]["split_size"] == 16
    assert plans["gpt_oss"].head_params == ("sinks",)


def test_key_heads_that_ranks_share_are_copied() -> None:
    plan = next(plan for plan in derive("llama", tp=4).regions if plan.row == "o_proj")
    assert plan.columns == {"q_proj": 4, "k_proj": 2, "v_proj": 2}


def test_what_no_plan_splits_stays_whole() -> None:
    """Norms over all heads (OLMo 2), biases by head that the model hands in (Bloom), states (Mamba), odd degrees."""
    assert {name.rpartition(".")[2] for name in derive("olmo2").whole} == {"self_attn"}
    assert {name.rpartition(".")[2] for name in derive("bloom").whole} == {"self_attention"}
    assert {name.rpartition(".")[2] for name in derive("mamba2").whole} == {"mixer"}
    assert not [plan for plan in derive("llama", tp=3).regions if plan.row == "o_proj"]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_split_as_the_table_says(name: str) -> None:
    """Regions of four layers, two of each: attention and MLP. Experts are divided by ep."""
    expected = {"bloom": 4, "olmo2": 4, "mamba2": 0, "mixtral": 4, "qwen3_moe": 4, "gpt_oss": 4, "deepseek_v3": 5}
    assert len(derive(name).regions) == {**expected, "qwen3_next": 2}.get(name, 8)


class GatedMLP(nn.Module):
    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(self.norm(x)).relu())
        return y + x if self.residual else y


PLAN = RegionPlan(module="", columns={"up": 2}, row="down")


def trial(module: nn.Module, plan: RegionPlan = PLAN) -> bool:
    torch.manual_seed(0)
    call = RegionCall((torch.randn(2, 3, 6, dtype=torch.float64),), {})
    return is_exact(module.double(), call, run_whole(module, call), plan, 2)


def test_an_exact_plan_passes_the_trial() -> None:
    assert trial(GatedMLP(residual=False))


def test_a_plan_with_a_right_forward_and_wrong_gradients_fails() -> None:
    """The region's input also goes around it: each rank would count that gradient, and the forward is right."""
    assert not trial(GatedMLP(residual=True))


def test_a_plan_with_a_wrong_row_fails() -> None:
    module = GatedMLP(residual=False)
    assert not trial(module, replace(PLAN, columns={"down": 2}, row="up"))
    module.up = nn.Linear(6, 7)  # two ranks do not divide it
    module.down = nn.Linear(7, 6)
    assert not trial(module)


class HeadsAttention(nn.Module):
    """With as many heads of 2 elements as its projection has."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 2), nn.Linear(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).unflatten(-1, (-1, 2))[..., : x.shape[-1] * self.up.out_features // 12, :].transpose(1, 2)
        out: Tensor = self.down(F.scaled_dot_product_attention(heads, key=heads, value=heads).sum(1))
        return out


def test_a_plan_that_leaves_no_heads_fails_before_torch_runs_it() -> None:
    """Torch 2.11 ends the process where attention has no heads."""
    empty = torch.zeros(2, 0, 3, 4)
    with RefuseEmptyHeads(), pytest.raises(ValueError, match=r"attention has no heads \(shapes \[\(2, 0, 3, 4\)"):
        F.scaled_dot_product_attention(empty, empty, value=empty)
    assert not trial(HeadsAttention())
