"""Off the device: what crosses and what is held is what the costs say, and everybody reads finished values.

That it computes the same is test_transparency_offload.py's business.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from cpu_clock import ALWAYS
from offload_engines import ADAMW, SHAPE, engine_away, link_of, stepped
from tiny_engines import batch_of, error, largest_error, whole
from torch import Tensor, nn

from echelon.config.sections import OptimizerConfig
from echelon.launch.rank_pool import RankPool
from echelon.layout.placement import LogicalParam, ParamGroupSpec
from echelon.memory.offload import cost as offload_cost
from echelon.memory.offload.host_transfer import DOWN, UP
from echelon.parallel.parallel_options import ParallelOptions
from echelon.training import step_comm_volume
from echelon.training.engine import Engine


class Scaled(nn.Module):
    """Sums of inputs times weights; no product of matrices, which not every CPU does in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scale() for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum(), len(x)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 32).view(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def scaled(layout: str, rule: OptimizerConfig) -> Engine:
    """After three steps."""
    options = ParallelOptions(compute_dtype=torch.bfloat16, master_dtype=torch.float32)
    engine = Engine(Scaled(), layout, rule, clip=0.5, options=options)
    for step in range(3):
        engine.step({"x": torch.linspace(-1, 1, 64, dtype=torch.float32).view(2, 4, 8) + step})
    engine.drain()
    return engine


# -- what crosses, and what is held -----------------------------------------------------------------------------------

STATES = (
    "dp=1,offload=optimizer",
    "dp=1,accumulate=2,offload=optimizer",
    "dp=1,offload=params",
    "dp=1,accumulate=2,recompute=full,offload=params",
)
RANKS = (
    "dp=2,zero=1,accumulate=2,offload=optimizer",
    "dp=2,zero=0,accumulate=2,offload=params",
    "dp=2,zero=3,offload=params",
    "pp=2,accumulate=2,offload=params",
)


def counted(layout: str, share: float) -> tuple[dict[str, int], dict[str, int]]:
    """On a rank: bytes that the second step moved, and what the cost says."""
    engine = stepped(engine_away(layout, host_share=share), 1)
    engine.drain()
    before = link_of(engine).bytes_moved.copy()
    stepped(engine, 1)
    engine.drain()
    moved = link_of(engine).bytes_moved - before
    ways = {"gradients": DOWN, "parameters": UP}
    assert set(moved) <= {(way, kind) for kind, way in ways.items()}
    return {kind: moved[way, kind] for kind, way in ways.items()}, engine.host_transfer_bytes()


@pytest.mark.parametrize("layout", STATES)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_copied_gradients_and_parameters_equal_the_cost(layout: str, share: float) -> None:
    moved, said = counted(layout, share)
    assert moved == said
    assert all(said.values())


@pytest.mark.parametrize("layout", RANKS)
def test_traffic_of_ranks_equals_the_cost(pool: RankPool, layout: str) -> None:
    for moved, said in pool.run(counted, 2, layout, 0.5):
        assert moved == said


def test_a_gradient_that_does_not_accumulate_is_copied_in_its_own_dtype() -> None:
    engine = scaled("offload=optimizer", ADAMW)
    size = sum(unit.numel for unit in engine.parallel.placement.param_groups)
    assert link_of(engine).bytes_moved == {(DOWN, "gradients"): 3 * 2 * size, (UP, "parameters"): 3 * 2 * size}
    assert engine.host_transfer_bytes() == {"gradients": 2 * size, "parameters": 2 * size}


def test_paged_gradients_are_copied_in_their_dtype_and_accumulate_in_the_masters() -> None:
    engine = scaled("accumulate=2,offload=params", ADAMW)
    size = sum(unit.numel for unit in engine.parallel.placement.param_groups)
    assert engine.host_transfer_bytes()["gradients"] == 2 * 2 * size
    assert link_of(engine).bytes_moved[DOWN, "gradients"] == 3 * engine.host_transfer_bytes()["gradients"]
    assert all(unit.grad.dtype == torch.float32 for unit in engine.parallel.sharded_model.param_groups)
    truth = whole(scaled("accumulate=2", ADAMW).parallel, "master")
    assert largest_error(whole(engine.parallel, "master"), truth) < 2e-3


def test_state_bytes_on_host_and_disk_equal_the_cost(tmp_path: Path) -> None:
    for layout, place in (("offload=optimizer", "host"), ("offload=params", "host"), ("offload=disk", "disk")):
        engine = stepped(engine_away(f"dp=1,accumulate=2,{layout}", disk_dir=str(tmp_path)), 1)
        engine.drain()
        said = step_comm_volume.offloaded_bytes(engine)
        hosts = [unit.offloaded for unit in engine.parallel.sharded_model.param_groups if unit.offloaded is not None]
        states = [state for state in engine.optimizer.states() if state.dim()]
        held = sum(state.nbytes for state in states) + sum(host.states.master.numel() * 8 for host in hosts)
        if place == "disk":
            assert said["disk"] == sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
            assert said["disk"] == 2 * held
            assert not any(host.states.master.untyped_storage().nbytes() for host in hosts)
        held += sum(
            tensor.nbytes
            for host in hosts
            for tensor in (host.grads.buffer, host.params.host_shard)
            if tensor is not None
        )
        assert said["host"] == (held if place == "host" else 0)


def unit(name: str, numel: int, *, kept: bool = False) -> ParamGroupSpec:
    return ParamGroupSpec(
        name=name, params=(LogicalParam(name=name, names=(name,), shape=(numel,)),), num_shards=1, stays_unsharded=kept
    )


def test_the_last_layers_are_offloaded_first_and_unsharded_groups_last() -> None:
    units = [unit("", 1, kept=True), unit("a", 10), unit("b", 10), unit("c", 10), unit("head", 9, kept=True)]
    assert offload_cost.choose_offloaded_units(units, 0.0) == frozenset()
    assert offload_cost.choose_offloaded_units(units, 0.25) == {"c"}
    assert offload_cost.choose_offloaded_units(units, 0.5) == {"b", "c"}
    assert offload_cost.choose_offloaded_units(units, 0.8) == {"a", "b", "c", "head"}
    assert offload_cost.choose_offloaded_units(units, 1.0) == {"", "a", "b", "c", "head"}


def test_the_minimum_share_is_offloaded() -> None:
    units = [unit(str(index), 10) for index in range(10)]
    assert offload_cost.min_offloaded_share(units, state_budget=1600, bytes_if_resident=16, bytes_if_offloaded=4) == 0.0
    assert offload_cost.min_offloaded_share(
        units, state_budget=1000, bytes_if_resident=16, bytes_if_offloaded=4
    ) == pytest.approx(0.5)
    assert offload_cost.min_offloaded_share(units, state_budget=100, bytes_if_resident=16, bytes_if_offloaded=4) == 1.0


def test_offload_traffic_for_plans() -> None:
    numbers = {
        "shard_params": 10.0,
        "activation_bytes": 7.0,
        "accumulate": 3,
        "compute_bytes": 2,
        "gradient_bytes": 4,
    }
    optimizer = offload_cost.offload_traffic("optimizer", **numbers)
    assert (optimizer.link_bytes, optimizer.host_updated_params, optimizer.disk_bytes) == (60.0, 10.0, 0.0)
    assert offload_cost.offload_traffic("optimizer", offloaded_share=0.5, **numbers).link_bytes == 30.0
    assert offload_cost.offload_traffic("params", **numbers).link_bytes == 3 * 10 * (4 + 2 * 2)
    disk, short = (offload_cost.offload_traffic("disk", state_bytes=size, **numbers).disk_bytes for size in (12, 6))
    assert (disk, short) == (240, 120)
    assert offload_cost.offload_traffic("activations", **numbers) == offload_cost.OffloadTraffic(link_bytes=42.0)
    assert offload_cost.offload_traffic("params+disk", **numbers).disk_bytes == 2 * 12 * 10 + 7 * 2 * 10


@pytest.mark.parametrize(
    ("offload", "early", "link", "page"),
    [
        ("optimizer", False, 0.0, 80.0),
        ("optimizer", True, 40.0, 120.0),
        ("params", False, 3 * 10 * (4 + 2 * 2), 120.0),
        ("activations", False, 42.0, 0.0),
    ],
)
def test_traffic_of_updates_on_the_device(offload: str, early: bool, link: float, page: float) -> None:
    """States travel each way, gradients only where they are on the host, and the host updates nothing."""
    traffic = offload_cost.offload_traffic(
        offload,
        shard_params=10.0,
        activation_bytes=7.0,
        accumulate=3,
        compute_bytes=2,
        gradient_bytes=4,
        state_bytes=8,
        updates_on_device=True,
        early_gradients=early,
    )
    assert (traffic.link_bytes, traffic.page_bytes, traffic.host_updated_params) == (link, page, 0.0)


# -- shares, and readers ----------------------------------------------------------------------------------------------


def trained(layout: str, share: float) -> dict[str, Tensor]:
    return whole(stepped(engine_away(layout, host_share=share)).parallel, "master")


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("dp=2,zero=1,accumulate=2", "optimizer"),
        ("dp=2,zero=1", "params+activations"),
        ("dp=2,zero=3", "optimizer"),
        ("tp=2", "params+disk"),
        ("pp=2,accumulate=2", "optimizer+activations"),
    ],
)
def test_a_share_of_the_states_may_stay(pool: RankPool, layout: str, kind: str) -> None:
    truth = pool.run(trained, 2, layout, 0.0)[0]
    found = pool.run(trained, 2, f"{layout},offload={kind}", 0.5)[0]
    assert largest_error(found, truth) <= 1e-10


@pytest.mark.parametrize(
    ("layout", "kind"),
    [("dp=1", "optimizer"), ("dp=1,accumulate=2", "optimizer"), ("dp=1,accumulate=2", "params"), ("dp=1", "disk")],
)
def test_readers_wait_for_the_update(layout: str, kind: str) -> None:
    """Moments, master values, losses of an evaluation and logits, each right after a step."""
    plain, away = engine_away(layout), engine_away(f"{layout},offload={kind}")
    batch = batch_of(SHAPE, 4, seed=9)
    for step in range(2):
        for engine in (plain, away):
            engine.step(batch_of(SHAPE, 4, seed=step))
        assert largest_error(whole(away.parallel, "master"), whole(plain.parallel, "master")) <= 1e-10
        assert largest_error(whole(away.parallel), whole(plain.parallel)) <= 1e-10
        totals = [
            sum(float(state.double().abs().sum()) for state in e.optimizer.states() if state.dim())
            for e in (plain, away)
        ]
        assert totals[1] == pytest.approx(totals[0], rel=1e-12)
        losses = [engine.evaluate(engine.microbatches(batch)) for engine in (plain, away)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-12)
        said = []
        for engine in (plain, away):
            with engine.non_layer_params_unsharded():
                said.append(engine.next_token_logits(batch["tokens"][:1], SHAPE.vocab))
        assert error(said[1], said[0]) <= 1e-10


def test_a_step_without_targets_changes_nothing() -> None:
    engine = stepped(engine_away("offload=optimizer"), 1)
    before = {name: value.clone() for name, value in whole(engine.parallel, "master").items()}
    nothing = batch_of(SHAPE, 4)
    nothing["targets"].fill_(-100)
    assert engine.step(nothing).skipped
    assert largest_error(whole(engine.parallel, "master"), before) == 0.0


@pytest.mark.parametrize("states", ["float32", "bfloat16"])
def test_low_precision_states_on_the_host_equal_the_devices(states: str) -> None:
    """float32 masters beside bfloat16 parameters: in two halves on the device, in one piece on the host."""
    rule = OptimizerConfig(lr=1e-2, states=states)
    found = [whole(scaled(layout, rule).parallel, "master") for layout in ("dp=1", "dp=1,offload=optimizer")]
    assert largest_error(found[1], found[0]) < 2e-3


class Many(Scaled):
    """Enough targets that the mean gradient underflows in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = self.layers[:2]

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return super().forward(x)[0], 10**8


def short_sums(offload: str, steps: int) -> dict[str, Tensor]:
    """Gradients add up on the device in float16, and the master values are float32."""
    options = ParallelOptions(compute_dtype=torch.float16, master_dtype=torch.float32, reduce_dtype=torch.float16)
    rule = OptimizerConfig(name="sgd", lr=1e5, weight_decay=0.0)
    engine = Engine(Many(), f"accumulate=2,offload={offload}", rule, clip=1.0, options=options)
    for step in range(steps):
        engine.step({"x": torch.linspace(-1, 1, 64, dtype=torch.float16).view(2, 4, 8) + step})
    return whole(engine.parallel, "master")


@pytest.mark.parametrize("kind", ["optimizer", "params"])
def test_16_bit_gradients_are_scaled_in_the_masters_dtype(kind: str) -> None:
    """They were multiplied on the device, in their own type: nothing was left of them, and nothing was learnt."""
    found, truth, before = short_sums(kind, 1), short_sums("none", 1), short_sums("none", 0)
    assert largest_error(truth, before) > 1e-3
    assert largest_error(found, truth) < 1e-5  # `params` adds them up in float32


def test_buffers_of_16_bit_gradients_are_released() -> None:
    """One of them was lost with every unit, and the second step waited for ever."""
    done: list[dict[str, Tensor]] = []
    thread = threading.Thread(target=lambda: done.append(short_sums("optimizer", 4)), daemon=True)
    thread.start()
    thread.join(ALWAYS)
    assert done


class Skipping(nn.Module):
    """A layer that is not called in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scale() for _ in range(5))

    def forward(self, x: Tensor, left_out: Tensor) -> tuple[Tensor, int]:
        for place, layer in enumerate(self.layers):
            x = x if place == int(left_out[0]) else x + torch.tanh(layer(x))
        return x.square().sum(), len(x)


def skipped(layout: str, folder: Path) -> dict[str, Tensor]:
    options = ParallelOptions(
        compute_dtype=torch.float64, master_dtype=torch.float64, reduce_dtype=torch.float64, disk_dir=str(folder)
    )
    engine = Engine(Skipping().double(), layout, ADAMW, options=options)
    for step, place in enumerate((2, 9, 4, 9, 1, 9)):
        x = torch.linspace(-1, 1, 64, dtype=torch.float64).view(2, 4, 8) + step
        engine.step({"x": x, "left_out": torch.full((2,), place)})
    return whole(engine.parallel, "master")


@pytest.mark.parametrize("kind", ["optimizer", "params", "params+disk"])
def test_read_ahead_of_a_skipped_layer_is_not_used_later(tmp_path: Path, kind: str) -> None:
    """With `disk`, the next step computed with the values from before the update."""
    found, truth = skipped(f"offload={kind}", tmp_path), skipped("", tmp_path)
    assert largest_error(found, truth) <= 1e-10
