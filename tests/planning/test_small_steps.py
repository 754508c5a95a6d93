"""Steps of small and odd models, as one H200 took them (bench/small_steps.py), against what the planner predicts."""

from dataclasses import replace
from pathlib import Path

import pytest

from echelon.bench import planner_comparison
from echelon.bench.reference_shapes import reference_model
from echelon.layout import Layout
from echelon.planning.cluster import cluster
from echelon.planning.cost.count_work import count_work
from echelon.planning.model.model_shape import ChunkedLoss
from echelon.planning.model.model_sources import config_shape
from echelon.planning.priced_plan import price
from echelon.planning.scenario import Scenario

BENCH = Path(__file__).parents[2] / "bench"
STEPS = planner_comparison.read_steps(BENCH / "measured" / "h200-small.json")
SHORTEST = 0.03
"""seconds; what Python does once a step makes up most of shorter ones, and is not counted"""


def scenario(model: str, seq_len: int, batch: int, **settings) -> Scenario:
    shape, layout = config_shape(reference_model(model, seq_len)), Layout(microbatch=batch)
    return Scenario(shape=shape, cluster=cluster.parse_cluster("1xh200"), layout=layout, seq_len=seq_len, **settings)


@pytest.mark.parametrize(
    "step",
    STEPS,
    ids=lambda step: f"{step.scenario.shape.name}-{step.scenario.seq_len}x{step.scenario.layout.microbatch}",
)
def test_small_steps_take_what_they_took(step):
    seconds = price(step.scenario).seconds
    if step.seconds >= SHORTEST:
        assert seconds == pytest.approx(step.seconds, rel=0.10)
    else:
        assert 0.5 < seconds / step.seconds < 1.1


def test_a_vocabulary_that_is_not_loaded_by_16_bytes_is_slow():
    """A head of 50,257 takes 5.7 times as long as one of 50,304 or 50,264 (26.5 + 18.0 + 16.9 ms against 10.7).

    The fused loss pads its vocabulary; slices of one over tp are as they are, and so are a custom module's heads.
    """

    def head(vocab: int, tp: int = 1, changes=None, **settings) -> float:
        question = scenario("gpt2-124m", 1024, 32, **settings)
        layout, gpus = replace(question.layout, tp=tp), cluster.parse_cluster(f"{tp}xh200")
        question = replace(
            question, shape=replace(question.shape, vocab=vocab, **(changes or {})), layout=layout, cluster=gpus
        )
        work = count_work(question).microbatch.head_gemm
        return float(work.misaligned_flops / work.flops)

    assert head(50_257) == head(50_304) == head(50_264) == 0
    assert head(2 * 50_257, tp=2) > 5
    layers = scenario("gpt2-124m", 1024, 32).shape.layers
    custom = {"layers": tuple((replace(layer, fused=None, unfused=None), count) for layer, count in layers)}
    assert head(50_257, changes=custom) > 5
    assert head(50_257, changes={**custom, "loss": ChunkedLoss(divides_vocab=True)}) == 0, "as of transformers' models"
    assert head(2 * 50_304, tp=2) == 0
    assert head(50_257, program="megatron") == 0, "other programs pad it"


def test_steps_of_few_tokens_wait_for_the_host():
    few = scenario("gpt2-350m", 512, 4)
    times = price(replace(few, layout=replace(few.layout, accumulate=2))).times
    assert times["launches"] > sum(times.values()) / 2
    assert not price(few).times.get("launches"), "they are launched as one graph"
    assert price(scenario("gpt2-350m", 1024, 64)).times.get("launches", 0.0) < 1e-3


def test_a_compiled_loss_moves_a_third():
    """Four passes over logits of 16 bits; operators that are a kernel each move 24 bytes, float32 copies among them."""
    compiled, eager = (
        count_work(scenario("gpt2-124m", 1024, 32, program=program)).microbatch.loss_bytes
        for program in ("torch-compiled", "torch")
    )
    assert 3 * compiled == eager == 8 * 32 * 1024 * 50_257
