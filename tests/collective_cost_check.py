"""The collectives that ranks issue in a step, compared with the strategies' cost functions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from counting import CountCollectives, Seen

from echelon import models
from echelon.config.sections import OptimizerConfig
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout, Mesh
from echelon.layout.collective import Collective, count_collectives
from echelon.models.lora.add_lora import add_adapters
from echelon.models.lora.lora_options import LoRAOptions
from echelon.models.model_config import ModelConfig
from echelon.parallel.comm.mesh_axis import enumerate_groups
from echelon.parallel.tp.cost import TransformerSizes
from echelon.training.engine import Engine, ParallelOptions
from echelon.verification.verify_case import VerifyCase

SEQ_LEN = 33


@dataclass(frozen=True)
class Counted:
    issued: Seen
    claimed: Seen


ADAMW, NO_LORA = OptimizerConfig(lr=1e-2), LoRAOptions()


def count(
    model: ModelConfig, text: str, rule: OptimizerConfig = ADAMW, *, lora: LoRAOptions = NO_LORA, **choices: Any
) -> Counted:
    """On a rank: the collectives of the second step, really issued and as the strategies' cost functions claim them."""
    layout, clip = Layout.parse(text), 0.0 if rule.in_backward else 1.0
    built = add_adapters(models.build(model, "meta"), lora, seed=0)
    engine = Engine(built, layout, rule, clip=clip, options=ParallelOptions(**choices))
    engine.model.train()
    case = VerifyCase(model=model, seq_len=SEQ_LEN)
    engine.step(case.batch(0, layout.batch))
    with CountCollectives() as counter:
        engine.step(case.batch(1, layout.batch))
    claimed: Counter[Any] = Counter()
    for (kind, axis, size), times in count_collectives(_claims(engine, model, layout)).items():
        group = next(g for g in enumerate_groups(Mesh(layout), axis) if engine.parallel.axes.rank in g)
        claimed[kind, group, size] += times
    return Counted(counter.seen, claimed)


def _claims(engine: Engine, model: ModelConfig, layout: Layout) -> list[Collective]:
    size = engine.parallel.options.compute_dtype.itemsize
    if model.family == "conv":
        return engine.collectives()
    return engine.collectives(
        TransformerSizes.from_config(model, batch=layout.microbatch, seq_len=SEQ_LEN, element_bytes=size)
    )


def check(pool: RankPool, model: ModelConfig, layout: str, **choices: Any) -> list[Counted]:
    found = pool.run(count, Layout.parse(layout).world, model, layout, **choices)
    for rank, each in enumerate(found):
        assert each.issued == each.claimed, f"rank {rank}: {_unequal(each)}"
    return found


def check_together(pool: RankPool, model: ModelConfig, layout: str, **choices: Any) -> None:
    """The same where chance decides which rank receives how much: rows of experts are compared as sums over ranks."""
    found = pool.run(count, Layout.parse(layout).world, model, layout, **choices)
    totals: dict[str, Counter[tuple[int, str]]] = {"issued": Counter(), "claimed": Counter()}
    for rank, each in enumerate(found):
        for name, total in totals.items():
            seen: Seen = getattr(each, name)
            for kind, group, size in [key for key in seen if key[0] == "all_to_all"]:
                times = seen.pop((kind, group, size))
                total[len(group), "messages"] += times
                total[len(group), "bytes"] += times * size
        assert each.issued == each.claimed, f"rank {rank}: {_unequal(each)}"
    assert totals["issued"] == totals["claimed"], totals


def _unequal(each: Counted) -> str:
    keys = [key for key in each.issued | each.claimed if each.issued[key] != each.claimed[key]]
    return "; ".join(f"{key}: issued {each.issued[key]}, claimed {each.claimed[key]}" for key in keys)
