"""Regression tests, each with the story of its bug."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_engines import SGD, batch_of, float64, tiny
from torch import nn

import echelon as ec
from echelon import models
from echelon.launch.rank_failure import RankError
from echelon.layout import Layout
from echelon.memory.checkpointing.checkpoint_wrapper import CheckpointSegment, _LayerCall
from echelon.models.hf.hf_config_reader import parse_hf_config
from echelon.models.hf.hf_config_writer import hf_config
from echelon.models.model_dir import SavedModel
from echelon.models.moe_config import MoEConfig
from echelon.optim.torch_optimizer import TorchOptimizer
from echelon.parallel.dp.grad_reduction import flat_norm
from echelon.parallel.parallel_options import ParallelOptions
from echelon.pipeline.execution import runtime
from echelon.rng import RandomStream
from echelon.training.loop import train_on_rank
from tests.pipeline import odd_pipeline_models


class Two(nn.Module):
    """A small root and a large layer: under ZeRO different hooks gather their parameter groups."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.first = nn.Linear(4, 40)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList([nn.Linear(40, 40)])

    def forward(self, x):
        return self.layers[0](self.drop(torch.tanh(self.first(x))))


def loop(layout, look):
    torch.manual_seed(0)
    model = ec.wrap(Two().double(), layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.arange(8, dtype=torch.float64).reshape(2, 4)
    for _ in range(3):
        model(x).square().mean().backward()
        if look == "between backward and step":
            with torch.no_grad():
                model(x)
        optimizer.step()
        optimizer.zero_grad()
    if look == "after a change by hand":
        with torch.no_grad():
            model(x)
            for parameter in model.parameters():
                parameter.mul_(0.5)
    return model(x).square().mean().item()


@pytest.mark.parametrize("look", ["", "between backward and step", "after a change by hand"])
@pytest.mark.parametrize("layout", ["dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3"])
def test_wrapped_models_computed_with_old_parameters(pool, layout, look):
    """Under zero=1 and zero=2 a wrapped model's first unit was one step behind.

    `wrap` marked the parameter groups as updated in a hook that ran after the root group's own, which had already found
    its old parameters unsharded. And it marked them once per backward pass: a forward pass between backward and step
    cleared the mark, and every rank then kept the others' old shards for good.
    """
    (truth,) = pool.run(loop, 1, "dp=1", look)
    assert pool.run(loop, 2, layout, look) == pytest.approx([truth, truth], abs=1e-12)


def with_dropout():
    model = ec.wrap(Two(dropout=0.5), "dp=2")
    model(torch.ones(3, 4)).sum().backward()
    return True


def test_wrap_refused_every_model_with_dropout(pool):
    """Counter-based dropout asks for the number of each sample. The engine knows it; a custom loop does not."""
    assert pool.run(with_dropout, 2) == [True, True]


def twice():
    model = ec.wrap(Two(), "dp=2")
    losses = [model(torch.full((2, 4), value)).sum() for value in (1.0, 2.0)]
    for loss in losses:
        loss.backward()


def test_a_second_backward_pass_was_not_reduced(pool):
    """Two forward passes, then two backward passes: the second one's gradients were added without a reduction."""
    with pytest.raises(RankError, match="its gradients would not be reduced"):
        pool.run(twice, 2)


def test_ec_train_was_shadowed_by_a_package():
    """Importing a module of the package `echelon.train` bound the package over the public function: `ec.train()` raised
    "'module' object is not callable". Packages are now called training, planning and verification."""
    code = "from echelon.config.run_config import Config; import echelon as ec; ec.train(Config(), steps=1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert "a Config has all its settings already" in done.stderr


def test_a_gloo_group_was_mistaken_for_cuda(pool, tmp_path):
    """gloo calls itself "cpu:gloo,cuda:gloo" on every machine; training in an existing group required CUDA."""
    (tmp_path / "own.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Model(nn.Linear):\n    def forward(self, x):\n        return super().forward(x).sum(), torch.tensor(2)\n"
        "def build():\n    return Model(2, 2)\n"
        "def batch(rows, step):\n    return {'x': torch.ones(rows, 2)}\n"
    )
    config = ec.Config(model=f"{tmp_path}/own.py:build", batch=2, steps=1, run=str(tmp_path / "run"))
    if torch.cuda.is_available():
        pytest.skip("a machine with CUDA")
    assert pool.run(train_on_rank, 2, config, True)[0].steps == 1


class Region(nn.Module):
    split = {"net": "region", "net.0": "column", "net.1": "row"}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))

    def forward(self, x):
        return self.net(x).sum(), torch.tensor(x.shape[0])


def region(layout):
    return ec.Engine(Region(), layout).step({"x": torch.ones(2, 3, 4)}).count


def test_sequence_parallelism_without_an_embedding_lost_the_sequence(pool):
    """tp=2 means sp=1. A user's table without an embedding never sharded the sequence, and collectives gathered 0
    positions of it: a sum over nothing, or an error about sizes from deep inside. The error now gives the remedy."""
    with pytest.raises(RankError, match="use sp=0"):
        pool.run(region, 2, "tp=2")
    assert pool.run(region, 2, "tp=2,sp=0") == [2, 2]
    assert Layout.parse("tp=2").sp == 1


def load_inside(layout, dtype):
    model = ec.wrap(Two().to(dtype), layout)
    model.module.load_state_dict(Two().state_dict())


@pytest.mark.parametrize(("layout", "dtype"), [("dp=2,zero=3", torch.float32), ("dp=2", torch.bfloat16)])
def test_loading_into_slices_killed_the_process(pool, layout, dtype):
    """`load_state_dict` copied into storage that zero=3 had freed: SIGSEGV. Under bfloat16 it copied into what the next
    forward pass overwrites."""
    with pytest.raises(RankError, match=r"ValueError: .*call model.load_full_state_dict\(state\) on every rank"):
        pool.run(load_inside, 2, layout, dtype)


def test_loading_into_unsharded_parameters_works():
    model, other = ec.wrap(Two()), ec.wrap(Two())
    model.load_state_dict(other.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    with pytest.raises(ValueError, match="assign=True"):
        model.module.load_state_dict(Two().state_dict(), assign=True)


def test_a_state_dict_was_one_step_old():
    """In bfloat16 the optimizer has master weights, and the module's parameters follow at the next forward pass."""
    model = ec.wrap(Two().bfloat16())
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    given = model.state_dict()
    assert all(
        torch.equal(given["module." + name], value.bfloat16()) for name, value in model.full_state_dict().items()
    )


def too_large():
    return ec.wrap(Two(), Layout(dp=4))


def test_wrap_took_a_layout_of_another_world_and_models_without_parameters(pool):
    """A layout was checked against the world as text only; `nn.Tanh()` ended in StopIteration."""
    with pytest.raises(RankError, match=r"ValidationError: .*world"):
        pool.run(too_large, 2)
    with pytest.raises(ValueError, match="the model has no parameters"):
        ec.wrap(nn.Tanh())


NO_GUARD = """
import torch
from torch import nn
import echelon as ec

class Model(nn.Linear):
    def forward(self, x):
        return super().forward(x).sum(), torch.tensor(len(x))

def build():
    return Model(2, 2)

def batch(rows, step):
    return {{"x": torch.ones(rows, 2)}}

print("the script runs", flush=True)
{call}
"""


@pytest.mark.parametrize(
    "call",
    [
        "ec.train(build, steps=1, batch=2, device='cpu')",
        "ec.train(build, steps=1, batch=2, device='cpu', procs=2)",
        "assert ec.verify(build, 'dp=1', batch=batch).passed",
    ],
)
def test_a_script_without_a_main_guard_ran_twice(tmp_path, call):
    """A rank reads the file to find the function, and reading it trained again."""
    script = Path(tmp_path, "script.py")
    script.write_text(NO_GUARD.format(call=call))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode != 0
    assert 'put the call under `if __name__ == "__main__":`' in done.stderr
    assert not Path(tmp_path, "runs").exists()


def test_an_engine_was_never_collected():
    """Hooks on parameters held what held the parameters: each engine kept its model and process groups for ever."""
    import gc
    import weakref

    from tiny_engines import batch_of, engine_of, tiny

    engine = engine_of(tiny(), "dp=1")
    engine.step(batch_of(tiny(), 2))
    gone = [
        weakref.ref(engine),
        weakref.ref(engine.parallel.sharded_model),
        weakref.ref(engine.parallel.sharded_model.param_groups[0]),
    ]
    del engine
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]


def engines_in_turn():
    """The losses of two engines alone and in turn, and of another before and after they are dropped."""
    import gc

    def made(seed, schedule="pipedream"):
        torch.manual_seed(seed)
        return ec.Engine(
            odd_pipeline_models.Plain().double(), f"pp=2,accumulate=2,schedule={schedule}", options=float64()
        )

    def stepped(engines):
        return [engine.step(odd_pipeline_models.batch(4, step)).loss for step in range(3) for engine in engines]

    before = stepped([made(0, "1f1b")])
    alone = [stepped([made(seed)]) for seed in (0, 1)]
    together = stepped([made(0), made(1)])
    gc.collect()
    return alone, [together[0::2], together[1::2]], before, stepped([made(0, "1f1b")])


def test_p2p_transfers_of_two_engines_mixed(pool):
    """On gloo all engines used the same tags. One with microbatches in flight received another's tensors; one that was
    dropped in the middle of its stream left the next waiting for ever."""
    for alone, together, before, after in pool.run(engines_in_turn, 2):
        assert together == alone
        assert after == before


def recorded_while_the_clock_goes_back():
    from itertools import count
    from types import SimpleNamespace

    engine = ec.Engine(odd_pipeline_models.Plain(), "pp=2,accumulate=2")
    real, back = runtime.time, count(1e9, -1)
    runtime.time = SimpleNamespace(time=lambda: next(back))
    try:
        engine.pipeline.start_recording()
        engine.step(odd_pipeline_models.batch(4, 0))
        _planned, measured = engine.pipeline.finish_recording()
    finally:
        runtime.time = real
    return [end - start for rank in range(2) for _, start, end in measured.spans(rank)]


def test_a_clock_that_was_set_back_ended_a_run(pool):
    """The last step is recorded by the clock of the day, and an action that ended before it began was refused."""
    assert set(pool.run(recorded_while_the_clock_goes_back, 2)[0]) == {0.0}


def routers_when_they_are_read(layout):
    shape = tiny("llama", moe=MoEConfig(experts=4, k=2, ffn=12, gate="mixtral"))
    model = models.build(shape, "meta", dtype=torch.float64)
    engine = ec.Engine(model, layout, SGD, options=float64(max_group_bytes=2048, prefetch=0))
    found = []
    for unit in engine.parallel.sharded_model.param_groups:
        if unit.spec.name.endswith(".gate"):
            gate = engine.model.get_submodule(unit.spec.name)

            def scores(x, unit=unit, inner=gate.scores):
                found.append(unit.is_unsharded)
                return inner(x)

            gate.scores = scores
    engine.step(batch_of(shape, 4))
    return found


@pytest.mark.parametrize("layout", ["dp=2,ep=2,zero=3", "dp=2,ep=2,zero=1", "dp=2,cp=2,ep=2,zero=3"])
def test_routers_were_read_before_they_were_gathered(pool, layout):
    """With memory.buffer a router is its own parameter group, and under expert parallelism the gate's methods were
    called, not the gate: no hook gathered it. It read stale values, or ones that were still being gathered."""
    for found in pool.run(routers_when_they_are_read, Layout.parse(layout).world, layout):
        assert found
        assert all(found)


def test_the_norm_of_a_long_gradient_on_a_cpu_was_too_small():
    """On a CPU torch sums float32 sequentially: the norm of a hundred million numbers was off by a hundredth, and
    offloaded gradients were clipped by it."""
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.full((10_000_001,), 1e-4, dtype=dtype)
        assert float(flat_norm(values)) == pytest.approx(float(values.double().norm()), rel=1e-5)
        assert float(flat_norm(values, float("inf"))) == float(values[0])


def test_saved_tensors_of_a_recomputed_layer_were_freed_with_its_grad_fn():
    """Before torch 2.12 an autograd function frees its saved tensors when none of its outputs is left: a frame held
    only the function, and backward could not recompute the layer."""
    layer = nn.Sequential(nn.Linear(2, 2))
    segment = CheckpointSegment(RandomStream(0))
    segment.add("layer", layer)
    layer(torch.ones(1, 2, requires_grad=True)).sum().backward()
    frame = _LayerCall(segment.layers[0], None, ((torch.ones(2, requires_grad=True),), {}))
    assert isinstance(frame._saved, torch.Tensor)
    assert torch.equal(frame._saved.grad_fn.saved_tensors[0], torch.ones(2))


def updates_on_the_host(compute):
    engine = ec.Engine(
        models.build(tiny("llama"), "meta"), "offload=optimizer", options=ParallelOptions(compute_dtype=compute)
    )
    found = {type(update) for update in engine.optimizer.optimizers[1]._optimizers}
    engine.close()
    return found


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16, torch.float16])
def test_bf16_gradients_disabled_torchs_fused_update_on_the_host(pool, compute):
    """They are cast before the update, but the check read their original dtype: unfused torch on the host
    took 14 seconds for what the fused kernel does in half of one."""
    assert pool.run(updates_on_the_host, 1, compute) == [{TorchOptimizer}]


def test_the_balance_loss_of_an_imported_moe_shrank_with_its_dense_layers():
    """transformers' coefficient is of a mean over MoE layers, and was divided by the number of all layers: a Qwen3-MoE
    with a dense layer among two trained with half of its balance loss. Logits, which were compared, do not depend on
    it; the first comparison of losses with transformers found it."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
    given = {"model_type": "qwen3_moe", "vocab_size": 97, "max_position_embeddings": 64, **sizes}
    given |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0, 1, 2]}
    saved = parse_hf_config({**given, "router_aux_loss_coef": 0.25}, "small")
    assert dict(saved.config.moe.options)["balance"] == 0.25
    assert hf_config(saved, "float32")["router_aux_loss_coef"] == 0.25


def test_no_layout_of_an_imported_moe_model_was_runnable(tmp_path):
    """Plans took every MoE model without a name of ours for one that `train` cannot build."""
    imported = SavedModel(config=replace(models.find_model("moe-tiny"), name="mine"))
    (tmp_path / "model.json").write_text(json.dumps(imported.to_json()))
    plans = ec.plan(str(tmp_path), "2xh100", batch=8, seq_len=64)
    assert plans
    assert all(plan.scenario.runnable for plan in plans)
