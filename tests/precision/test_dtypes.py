"""The types that a configuration asks for: in force, counted, and reported."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from collective_cost_check import check
from tiny_engines import batch_of, tiny, whole
from torch import nn

from echelon import models
from echelon.config.run_config import Config
from echelon.config.sections import OptimizerConfig, PrecisionConfig
from echelon.layout import Layout, ValidationError
from echelon.layout.placement import LogicalParam
from echelon.models import model_config
from echelon.models.moe_config import MoEConfig
from echelon.optim import cost
from echelon.parallel.dp import cost as dp_cost
from echelon.parallel.parallel_options import ParallelOptions
from echelon.precision import accumulation_dtype
from echelon.precision.keep_fp32 import mark_fp32_entries
from echelon.training.engine import Engine
from echelon.training.engine_options import loss_scale_settings, parallel_options
from echelon.training.logging.metrics import PeakFlops
from echelon.training.logging.resolved_settings import resolved_settings

SHAPE = tiny("llama")
SMALL = replace(model_config.find_model("llama-tiny"), layers=2, width=32, ffn=48, max_seq_len=64)
MIXED = tiny("llama", moe=MoEConfig(experts=4, k=2, ffn=12, gate="mixtral"))
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

# -- from the configuration -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "types"),
    [
        ((), (F32, F32, F32)),
        (("dtype=float64",), (torch.float64, torch.float64, torch.float64)),
        (("dtype=bfloat16",), (BF16, F32, F32)),
        (("dtype=float16", "precision.reduce=same"), (F16, F32, F16)),
        (("dtype=float16", "precision.reduce=bfloat16"), (F16, F32, BF16)),
        (("dtype=bfloat16", "precision.master=none"), (BF16, BF16, F32)),
        (("dtype=bfloat16", "precision.master=none", "precision.reduce=same"), (BF16, BF16, BF16)),
    ],
)
def test_settings_become_dtypes(settings, types):
    options = parallel_options(Config.load(None, settings), torch.device("cpu"))
    assert (options.compute_dtype, options.master_dtype, options.grad_dtype) == types


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ((), "none"),
        (("dtype=float16",), "dynamic, from 65536"),
        (("dtype=float16", "precision.loss_scale=none"), "none"),
        (("dtype=float16", "precision.loss_scale=512"), "512, fixed"),
        (("dtype=bfloat16", "precision.loss_scale=dynamic", "precision.scale_start=4"), "dynamic, from 4"),
    ],
)
def test_settings_become_a_loss_scale(settings, scale):
    assert str(loss_scale_settings(Config.load(None, settings))) == scale


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("precision.master=none",), "requires bfloat16 weights"),
        (("dtype=float16", "precision.master=none"), "requires bfloat16 weights with stochastic rounding"),
        (("precision.loss_scale=0",), "is out of range"),
        (("precision.loss_scale=dynamyc",), 'did you mean "dynamic"?'),
        (("precision.loss_scale=true",), "is not a number"),
        (("precision.keep_fp32=*norm*",), "has no effect with dtype=float32"),
        (("precision.scale_every=5",), "has no effect with precision.loss_scale=auto"),
        (("dtype=float16", "precision.compute=fp8"), "requires dtype=bfloat16"),
        (("dtype=bfloat16", "precision.master=none", "layout=offload=optimizer"), "keeps master weights on the host"),
    ],
)
def test_incompatible_settings_are_refused(settings, words):
    with pytest.raises(ValidationError) as error:
        Config.load(None, settings)
    assert words in str(error.value)


def test_a_configuration_round_trips():
    config = Config(dtype="float16", precision=PrecisionConfig(loss_scale=8.0, reduce="same", keep_fp32=("*norm*",)))
    assert Config.from_toml(config.to_toml()).precision == config.precision


# -- parts in float32 -------------------------------------------------------------------------------------------------


def kept(shape, layout, patterns, compute=F16, lr=1.0):
    """On a rank: the types of parameters, the loss of a step, the weights after it, and logits."""
    options, rule = (
        ParallelOptions(compute_dtype=compute, keep_fp32=patterns),
        OptimizerConfig(name="sgd", lr=lr, weight_decay=0.0),
    )
    engine = Engine(models.build(shape, "meta"), layout, rule, options=options)
    engine.model.train()
    result = engine.step(batch_of(shape, 4))
    types = {name: parameter.dtype for name, parameter in engine.model.named_parameters()}
    with engine.non_layer_params_unsharded():
        logits = engine.next_token_logits(torch.zeros(1, 5, dtype=torch.int64), 3)
    return types, result.loss, whole(engine.parallel, "master"), logits


PATTERNS = {
    "norms": (SHAPE, ("*norm*",)),
    "head": (SHAPE, ("head",)),
    "embedding, tied": (replace(SHAPE, tied=True), ("embed",)),
    "gate and up": (SHAPE, ("*.gate", "*.up")),
    "a whole layer": (SHAPE, ("blocks.0",)),
    "all but a layer": (SHAPE, ("blocks.0", "embed", "head")),
    "gates of experts": (MIXED, ("*.gate",)),
    "experts": (MIXED, ("*.experts",)),
}
LAYOUTS = ("dp=2,zero=3", "tp=2", "pp=2,accumulate=2", "dp=2,zero=1", "offload=optimizer", "dp=2,zero=3,offload=params")


@pytest.mark.parametrize("name", PATTERNS)
def test_parts_are_kept_in_float32(pool, name):
    shape, patterns = PATTERNS[name]
    truth = pool.run(kept, 1, shape, "dp=1,accumulate=2", (), F32)[0]
    before = pool.run(kept, 1, shape, "dp=1,accumulate=2", (), F32, 1e-30)[0]
    moved = {key: float((truth[2][key] - before[2][key]).abs().max()) for key in before[2]}
    some = LAYOUTS[-2:] if "a layer" in name else LAYOUTS[:1]  # on the host, the largest unit is a wide one
    for layout in ("dp=1,accumulate=2", *(LAYOUTS if name == "norms" else some)):
        for types, loss, found, logits in pool.run(kept, Layout.parse(layout).world, shape, layout, patterns):
            assert set(types.values()) == {F16, F32}
            assert loss == pytest.approx(truth[1], abs=5e-3)
            assert float((logits - truth[3]).abs().max()) < 1e-2
            off = {key: float((found[key] - truth[2][key]).abs().max()) / moved[key] for key in moved}
            assert max(off.values()) < 0.05, off


def test_only_modules_that_a_pattern_names_are_kept_in_float32(pool):
    types, *_ = pool.run(kept, 1, SHAPE, "dp=1", ("*norm*",))[0]
    assert {name for name, kind in types.items() if kind == F32} == {name for name in types if "norm" in name}


@pytest.mark.parametrize("pattern", ["embed", "head"])
def test_a_tied_weight_is_kept_in_float32_by_either_name(pattern):
    tied = LogicalParam(name="embed.weight", names=("embed.weight", "head.weight"), shape=(4, 2))
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4)})
    assert [param.keep_fp32 for param in mark_fp32_entries(model, [tied], [pattern])] == [True]


def test_a_module_is_not_kept_in_float32_by_the_start_of_its_name():
    """blocks.1 is no part of blocks.10."""
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(11))})
    params = [LogicalParam(name=name, names=(name,), shape=(2, 2)) for name, _ in model.named_parameters()]
    kept = [param.name for param in mark_fp32_entries(model, params, ["blocks.1"]) if param.keep_fp32]
    assert kept == ["blocks.1.weight"]


def test_a_pattern_that_names_nothing_is_an_error():
    with pytest.raises(ValueError, match=r"no module with parameters matches precision.keep_fp32 \(\*nrom\*\)"):
        Engine(models.build(SHAPE, "meta"), options=ParallelOptions(compute_dtype=F16, keep_fp32=("*norm*", "*nrom*")))


# -- bytes ------------------------------------------------------------------------------------------------------------

CHOICES = {
    "half": {"compute_dtype": F16},
    "reduced in bfloat16": {"compute_dtype": F16, "reduce_dtype": BF16},
    "reduced in half": {"compute_dtype": F16, "reduce_dtype": F16},
    "norms in float32": {"compute_dtype": F16, "reduce_dtype": F16, "keep_fp32": ("*norm*",)},
}


@pytest.mark.parametrize("choice", CHOICES)
def test_collectives_have_the_configured_dtypes(pool, choice):
    layouts = ("dp=2,zero=3,accumulate=2", "dp=2,tp=2,zero=1") if choice == "norms in float32" else ("dp=2,zero=2",)
    for layout in layouts:
        check(pool, SMALL, layout, **CHOICES[choice])


def held(layout, options, states):
    rule = OptimizerConfig(states=states)
    engine = Engine(models.build(SMALL, "meta"), layout, rule, options=options)
    engine.optimizer.step(1e-3, torch.ones((), dtype=torch.float64), torch.tensor(True))
    engine.parallel.sharded_model.after_update()
    units = engine.parallel.sharded_model.param_groups
    full, masters, gradients = (
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        for tensors in (
            [unit.unsharded_param for unit in units],
            [tensor for unit in units for tensor in unit.master.tensors()],
            [t for unit in units for t in (unit.grad, unit.grads.tensor) if t is not None],
        )
    )
    measured = {
        "parameters": sum(full.values()),
        "master": sum(size for pointer, size in masters.items() if pointer not in full),
        "gradients": sum(gradients.values()),
        "optimizer": sum(t.untyped_storage().nbytes() for t in engine.optimizer.states() if t.dim()),
        "versions": 0,
    }
    claimed = dp_cost.state_bytes(
        [unit.spec for unit in units],
        engine.parallel.policy,
        compute_bytes=options.compute_dtype.itemsize,
        master_bytes=options.master_dtype.itemsize,
        moments=2,
        moment_bytes=cost.state_bytes_per_element(rule) / 2,
        reduce_bytes=options.grad_dtype.itemsize,
        float16=options.compute_dtype == F16,
    )
    return measured, claimed


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("states", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [
        ParallelOptions(compute_dtype=F16, reduce_dtype=F16),
        ParallelOptions(compute_dtype=BF16, master_dtype=BF16),
        ParallelOptions(compute_dtype=BF16, master_dtype=BF16, reduce_dtype=BF16, keep_fp32=("*norm*",)),
    ],
    ids=["half", "no master", "no master, short sums, norms in float32"],
)
def test_state_bytes_equal_the_cost(pool, options, states, zero):
    for measured, claimed in pool.run(held, 2, f"dp=2,zero={zero}", options, states):
        short = {key: size for key, size in claimed.items() if key != "optimizer" or not options.keep_fp32}
        for key, size in short.items():
            assert measured[key] == pytest.approx(size, rel=0.01), key


# -- printed ----------------------------------------------------------------------------------------------------------


def printed(layout, settings):
    config = Config.load(None, [f"layout={layout}", "model=llama-tiny", "batch=8", *settings])
    engine = Engine(
        models.build(SHAPE, "meta"), layout, options=parallel_options(config, torch.device("cpu")),
        loss_scale=loss_scale_settings(config),
    )  # fmt: skip
    rows = resolved_settings(replace(config, batch=engine.layout.batch), engine, PeakFlops(flops=1.0, source=""), 1)
    return {name: (value, why) for name, value, why in rows}


def test_the_dtypes_in_force_are_printed(pool):
    rows = pool.run(printed, 2, "dp=2,accumulate=2", ["dtype=float16", 'precision.keep_fp32=["*norm*"]'])[0]
    assert rows["dtypes"][0] == "compute float16, master float32, gradients float32"
    assert rows["loss scale"][0] == "dynamic, from 65536"
    assert rows["reduction"][0].endswith(", in float32")
    assert rows["in float32"][0].startswith("5 parameters: blocks.0.norm1.weight")
    rows = pool.run(
        printed, 2, "dp=2,accumulate=2", ["dtype=bfloat16", "precision.master=none", "precision.reduce=same"]
    )[0]
    assert rows["dtypes"] == (
        "compute bfloat16, master none (stochastic rounding), gradients bfloat16",
        "gradients accumulate and are reduced as in precision.reduce; the accumulation dtype of GEMMs is float32",
    )
    assert rows["reduction"][0].endswith(", in bfloat16")


def test_gemms_accumulate_in_float32():
    matmul = torch.backends.cuda.matmul
    before = [getattr(matmul, name) for name in accumulation_dtype.SETTINGS]
    with accumulation_dtype.fp32_accumulation():
        assert [getattr(matmul, name) for name in accumulation_dtype.SETTINGS] == [False, False]
    assert [getattr(matmul, name) for name in accumulation_dtype.SETTINGS] == before
