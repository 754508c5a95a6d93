"""What the planner counts is what a run counts: the same functions, of a shape and of a real model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from echelon import models
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.models import model_config
from echelon.parallel.dp import cost as dp_cost
from echelon.parallel.dp.zero import expert_sharding_policy
from echelon.parallel.parallel_options import ParallelOptions
from echelon.parallel.tp.cost import TransformerSizes
from echelon.planning.cluster import cluster
from echelon.planning.cost.count_work import count_work
from echelon.planning.cost.memory_model import peak_memory, state_bytes_by_category
from echelon.planning.memory_options import MemoryOptions
from echelon.planning.model.model_sources import config_shape, resolve_shape
from echelon.planning.scenario import Scenario
from echelon.training.engine import Engine

SEQ_LEN = 64


def counted(name: str, text: str) -> tuple[dict[str, int], float, float]:
    """On a rank of a real run: bytes of states, and bytes on the wire over dp and over tp in a step."""
    layout, model = Layout.parse(text), model_config.find_model(name)
    options = ParallelOptions(compute_dtype=torch.bfloat16, master_dtype=torch.float32)
    engine = Engine(models.build(model, "meta"), layout, options=options)
    units, policy = engine.parallel.placement.param_groups, engine.parallel.policy
    experts = expert_sharding_policy(layout, policy)
    held = dp_cost.state_bytes(units, policy, compute_bytes=2, master_bytes=4, moments=2, expert_policy=experts)
    for group in engine.parallel.sharded_model.param_groups if model.moe else ():
        assert group.policy.reshards_params == (group.spec.num_shards > 1 and layout.zero == 3)
    traffic = TransformerSizes(
        layers=model.layers,
        width=model.width,
        batch=layout.microbatch,
        seq_len=SEQ_LEN,
        dropout=False,
        element_bytes=2,
        loss_bytes=4,
    )
    wire = {"dp": 0.0, "tp": 0.0}
    for item in engine.collectives(traffic):
        ranks = engine.parallel.axes[item.axis].size
        share = {"all_reduce": 2.0}.get(item.op, 1.0) * (ranks - 1) / ranks
        axis = "tp" if item.axis == "tp" else "dp" if item.purpose in ("gradients", "parameters") else ""
        if axis:
            wire[axis] += share * item.bytes * item.count
    return held, wire["dp"], wire["tp"]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama-tiny", "dp=2,zero=0"),
        ("llama-tiny", "dp=2,zero=1,accumulate=2"),
        ("llama-tiny", "dp=2,zero=2,accumulate=3"),
        ("llama-tiny", "tp=2,sp=0"),
        ("llama-tiny", "tp=2"),
        ("llama-tiny", "tp=2,accumulate=2"),
        ("moe-tiny", "dp=2,ep=2,zero=3"),
        ("moe-tiny", "dp=4,shard=2,ep=2,zero=1"),
        ("moe-tiny", "dp=4,shard=2,zero=2"),
    ],
)
def test_states_and_collectives_of_a_plan_equal_those_of_a_run(pool: RankPool, model: str, layout: str) -> None:
    """Under ep=2,zero=3 a plan and a run counted no byte for the weights of experts, of which there is one copy."""
    world = Layout.parse(layout).world
    held, over_dp, over_tp = pool.run(counted, world, model, layout)[0]
    case = Scenario(
        shape=resolve_shape(model),
        cluster=cluster.parse_cluster(f"{world}xh100"),
        layout=Layout.parse(layout),
        seq_len=SEQ_LEN,
    )
    planned = state_bytes_by_category(case, 0)
    for name, size in held.items():
        # Padding to equal shards, and the rows that a vocabulary of 257 is padded to, are a run's own.
        assert planned.get(name, 0) == pytest.approx(size, rel=0.02), name
    work = count_work(case)
    # Under zero=3 a run does not gather the last layer a second time: a small part of a model of real size.
    assert work.dp.wire_bytes == pytest.approx(over_dp, rel=0.02 if case.layout.zero < 3 else 0.15)
    assert work.microbatch.tp.wire_bytes * case.layout.accumulate == pytest.approx(over_tp, rel=0.02)


def held_for_collectives(text: str, buffer_bytes: int) -> tuple[int, int]:
    """On a rank of a real run: the most bytes of unsharded parameters, and of unsharded gradients, at once."""
    layout, model = Layout.parse(text), replace(model_config.find_model("llama-tiny"), layers=5)
    options = ParallelOptions(compute_dtype=torch.bfloat16, master_dtype=torch.float32, max_group_bytes=buffer_bytes)
    engine = Engine(models.build(model, "meta"), layout, options=options)
    engine.model.train()
    groups, most = engine.parallel.sharded_model.param_groups, [0, 0]

    def look(*_: object) -> None:
        params = sum(group.unsharded_param.untyped_storage().nbytes() for group in groups)
        grads = [grad for group in groups for grad in (group.grads.tensor, group.reduction._sent) if grad is not None]
        most[:] = max(most[0], params), max(most[1], sum(grad.nbytes for grad in grads))

    for module in engine.model.modules():
        module.register_forward_hook(look, prepend=True)
    for group in groups:
        for parameter in group.parameters.values():
            parameter.register_post_accumulate_grad_hook(look)
    ids = torch.arange(layout.batch * 9).view(layout.batch, 9) % 200
    engine.step({"tokens": ids[:, :-1], "targets": ids[:, 1:].clone()})
    return most[0], most[1]


@pytest.mark.parametrize("buffer_bytes", [0, 24_576])
@pytest.mark.parametrize(
    "layout", ["dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=2,zero=3,accumulate=2", "dp=2,pp=2,zero=3,accumulate=2"]
)
def test_buffers_of_a_plan_equal_those_of_a_run(pool: RankPool, layout: str, buffer_bytes: int) -> None:
    """Two layers of parameters and of gradients at once, and what is outside the layers: nothing is counted once."""
    parsed, shape = Layout.parse(layout), config_shape(replace(model_config.find_model("llama-tiny"), layers=5))
    params, grads = pool.run(held_for_collectives, parsed.world, layout, buffer_bytes)[0]
    case = Scenario(
        shape=shape,
        cluster=cluster.parse_cluster("8xh100"),
        layout=parsed,
        seq_len=SEQ_LEN,
        memory_options=MemoryOptions(buffer=buffer_bytes),
    )
    held = (params if parsed.zero == 3 else 0) + (grads if parsed.zero > 1 else 0)
    # Rows that a vocabulary of 257 is padded to, and modules smaller than the buffer, are a run's own.
    assert peak_memory(case).parts.get("buffers", 0) == pytest.approx(held, rel=0.02)
