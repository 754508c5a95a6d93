"""The training loop, on the warm ranks of the pool: `train_here` joins the group that is there."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from unittest.mock import patch

import pytest
from tiny_engines import whole

from echelon import data
from echelon.config.lr_schedule import learning_rate
from echelon.config.run_config import Config
from echelon.config.sections import DataConfig, EvalConfig, LRScheduleConfig, OptimizerConfig, SampleConfig
from echelon.layout import Layout
from echelon.training.engine import Engine
from echelon.training.loop import train_on_rank
from echelon.training.run.run_dir import Run

TEXT = "".join(f"def line_{number}(x): return x + {number}\n" for number in range(400))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(8):
        (folder / f"{number}.txt").write_text(TEXT[number * 900 : (number + 1) * 900])
    return str(data.prepare_token_file(folder, folder / "cache", tokenizer=data.load_tokenizer("bytes")))


@pytest.fixture
def config(tokens, tmp_path):
    return Config(
        data=DataConfig(path=(tokens,), eval_fraction=0.1),
        seq_len=32,
        batch=4,
        steps=3,
        dtype="float64",
        sample=SampleConfig(tokens=8),
        eval=EvalConfig(every=2, batches=1),
        optimizer=OptimizerConfig(lr=1e-2),
        run=str(tmp_path / "run"),
    )


def trained(pool, config, layout, **changes):
    config = dataclasses.replace(config, layout=layout, **changes)
    first, *others = pool.run(train_on_rank, Layout.parse(layout).world, config, True)
    # Rank 0 alone names the run; what they computed is equal.
    assert all(other.run == "" and other.loss == first.loss for other in others)
    return Run.open(first.run), first


CHANGES = {
    "plain": {},
    "masked documents": {"mask_documents": True},
    "gpt, dropout": {"model": "gpt-tiny", "dropout": 0.1},
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_layout_logs_the_losses_of_one_process(pool, config, name):
    changes = dict(CHANGES[name])
    if changes.pop("mask_documents", False):
        changes["data"] = dataclasses.replace(config.data, mask_documents=True)
    layouts = ("dp=1", "dp=2,zero=3", "tp=2", "dp=2", "pp=2,accumulate=2", "dp=2,pp=2,schedule=zb-v")
    runs = {layout: trained(pool, config, layout, **changes) for layout in layouts}
    shown = {
        layout: [
            (r["kind"], r["loss"], r.get("norm"), r.get("count"), r.get("lr")) for r in run.records() if "loss" in r
        ][:-1]
        for layout, (run, _) in runs.items()
    }
    truth = shown["dp=1"]
    assert [kind for kind, *_ in truth] == ["step", "step", "evaluation", "step", "evaluation"]
    losses = [loss for kind, loss, *_ in truth if kind == "step"]
    assert losses[-1] < losses[0]
    for layout, records in shown.items():
        for found, expected in zip(records, truth, strict=True):
            assert found[0] == expected[0]
            assert found[1:] == pytest.approx(expected[1:], abs=1e-10), layout
    texts = {next(run.records("end"))["sample"] for run, _ in runs.values()}
    assert len(texts) == 1


def test_the_log_has_a_record_of_every_event(pool, config):
    run, summary = trained(pool, config, "dp=2")
    lines = [json.loads(line) for line in (run.path / "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [step["step"] for step in steps] == [1, 2, 3]
    wanted = {"loss", "tokens_per_s", "mfu", "hfu", "memory", "lr", "norm", "count", "skipped", "seconds"}
    assert all(wanted <= step.keys() for step in steps)
    assert all(step["count"] == 4 * 32 for step in steps)
    assert all(step["memory"] > 0 for step in steps)
    assert lines[-1]["kind"] == "end"
    assert lines[-1]["loss"] == summary.loss == steps[-1]["loss"]
    assert run.plan["layout"] == "dp=2,microbatch=2"
    assert {"reduction", "dtypes", "samples"} <= {row[0] for row in run.plan["derived"]}
    assert run.config.layout == "dp=2"
    assert 0 < summary.goodput < 1
    assert summary.mfu == summary.hfu > 0


def test_a_run_is_never_overwritten(pool, config):
    first, _ = trained(pool, config, "dp=1", steps=1)
    log = (first.path / "log.jsonl").read_bytes()
    second, _ = trained(pool, config, "dp=1", steps=1)
    assert second.path.name == "run-2"
    assert (first.path / "log.jsonl").read_bytes() == log


def test_recomputation_shows_in_hfu_and_in_nothing_else(pool, config):
    plain, _ = trained(pool, config, "dp=1", steps=2)
    losses = [[record["loss"] for record in plain.records("step")]]
    for recompute in ("full", "sqrt", "selective"):
        again, summary = trained(pool, config, f"dp=1,recompute={recompute}", steps=2)
        assert summary.hfu > summary.mfu
        losses.append([record["loss"] for record in again.records("step")])
    assert all(found == losses[0] for found in losses)


def test_evaluation_and_sample_can_be_turned_off(pool, config):
    off = {"eval": EvalConfig(every=0), "sample": SampleConfig(tokens=0), "steps": 1}
    run, summary = trained(pool, config, "dp=1", **off)
    assert summary.eval_loss is None
    assert [record["kind"] for record in run.records()] == ["start", "step", "end"]
    assert next(run.records("end"))["sample"] == ""


def test_a_loss_in_the_log_is_a_mean_per_token(pool, config):
    run, _ = trained(pool, config, "dp=1", steps=1)
    assert next(run.records("step"))["loss"] == pytest.approx(math.log(257), abs=0.2)


def train_slow_to_drain(config, seconds):
    drain = Engine.drain

    def slow(self):
        time.sleep(seconds)
        drain(self)

    Engine.drain = slow
    try:
        return train_on_rank(config, True)
    finally:
        Engine.drain = drain


def test_an_asynchronous_run_logs_in_order_and_counts_its_drain(pool, config):
    """Steps are logged one step late, so that no rank waits; an evaluation waits for all ranks anyway."""
    layout = {"layout": "pp=2,schedule=2bw,accumulate=2", "tied": False}
    config = dataclasses.replace(config, **layout, sample=SampleConfig(tokens=0), eval=EvalConfig(every=1, batches=1))
    summary, _ = pool.run(train_slow_to_drain, 2, config, 0.5)
    order = [
        (record["kind"], record["step"])
        for record in Run.open(summary.run).records()
        if record["kind"] in ("step", "evaluation")
    ]
    assert order == [(kind, step) for step in (1, 2, 3) for kind in ("step", "evaluation")]
    assert summary.tokens_per_s < 2 * config.batch * config.seq_len / 0.5


def changes_of_the_weights(config):
    """On a rank of a run: for every step, (the norm of the weights' change, the gradient norm)."""
    found, step = [], Engine.step_microbatches

    def recorded(engine, *args, **named):
        before = whole(engine.parallel, "master")
        result = step(engine, *args, **named)
        after = whole(engine.parallel, "master")
        change = sum(float((after[name] - before[name]).square().sum()) for name in before)
        found.append((math.sqrt(change), result.norm))
        return result

    with patch.object(Engine, "step_microbatches", recorded):
        train_on_rank(config, True)
    return found


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_each_step_moves_the_weights_by_its_learning_rate_and_clipped_gradient(pool, config, clip):
    """Of plain SGD: lr x min(norm, clip), with another lr in every step. Logs alone cannot tell what was applied."""
    rule = OptimizerConfig(name="sgd", lr=0.5, weight_decay=0.0)
    schedule = LRScheduleConfig(name="cosine", warmup=2, final=0.1)
    config = dataclasses.replace(config, optimizer=rule, schedule=schedule, steps=5, clip=clip, layout="dp=2")
    rates = [learning_rate(step, 5, config) for step in range(5)]
    assert len(set(rates)) == 5
    for (moved, norm), lr in zip(pool.run(changes_of_the_weights, 2, config)[0], rates, strict=True):
        assert norm > 0.05
        assert moved == pytest.approx(lr * (clip or norm), rel=1e-4)
