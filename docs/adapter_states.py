"""What a rank holds with LoRA adapters and without, by the planner's cost functions."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.planning.cost.memory_model import state_bytes_by_category
from echelon.planning.planner import find_plans

RANK, LAYOUTS = 16, ("dp=8", "dp=8,zero=1", "dp=8,zero=3", "dp=4,tp=2,zero=1", "dp=4,pp=2,zero=1,accumulate=4")
STATES = ("parameters", "master", "gradients", "optimizer")
GIB = 1 << 30


def held() -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """GiB of states of a rank of the first stage of llama-8b on 8 H100."""
    return ("layout", "", *STATES), [row for layout in LAYOUTS for row in _rows(layout)]


def _rows(layout: str) -> Iterator[tuple[str, ...]]:
    for what, rank in (("all weights", 0), (f"LoRA, rank {RANK}", RANK)):
        (plan,) = find_plans("llama-8b", "8xh100", batch=64, seq_len=4096, layout=layout, lora_rank=rank).plans
        states = state_bytes_by_category(plan.scenario, 0)
        yield f"`{layout}`" if not rank else "", what, *(f"{states[name] / GIB:.2f}" for name in STATES)
