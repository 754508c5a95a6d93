"""Our own program on GPUs: what its kernels keep, when it is fullest, and whose constants price it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from echelon.bench import own_steps
from echelon.kernels import loss
from echelon.layout import Layout
from echelon.memory.repeats import OPERATORS
from echelon.plan import cluster
from echelon.plan.activations import kept, repeats_of, tensors
from echelon.plan.calibrate import constants_of
from echelon.plan.case import Case
from echelon.plan.constants import FITTED, OWN
from echelon.plan.head import chunk_rows
from echelon.plan.layouts import Wish
from echelon.plan.memory import of_stage, states, worst
from echelon.plan.price import price
from echelon.plan.search import search
from echelon.plan.sources import shape_of

GIB = 2**30


def case(layout="dp=1,microbatch=8", model="llama-1b", devices="1xh200", seq_len=4096, **options):
    found = cluster.parse(devices)
    return Case(shape=shape_of(model), cluster=found, layout=Layout.parse(layout), seq_len=seq_len, **options)


def per_token(found):
    """Elements of two bytes that a layer keeps for a token, but for the few numbers of 32 bits beside them."""
    (layer, _), *_ = found.shape.layers
    beside = 16 + 4 * layer.attention.heads
    return (kept(found, layer, repeats_of(found)) / found.tokens - beside) / 2


# -- what is kept -----------------------------------------------------------------------------------------------------

WIDTH, Q, KV, OUT, FFN = 2048, 2048, 1024, 2048, 8192


def test_llama_keeps_what_its_backward_reads_once():
    assert per_token(case()) == pytest.approx(4 * WIDTH + Q + KV + OUT + 3 * FFN)


def test_ops_keeps_what_cannot_be_made_again():
    assert per_token(case("dp=1,microbatch=8,recompute=ops")) == pytest.approx(2 * WIDTH + Q + KV + OUT + 2 * FFN)


def test_8_bits_keep_one_byte_of_what_products_read():
    wide = 2 * WIDTH + Q + KV + OUT + 2 * FFN
    assert per_token(case(precision="fp8")) == pytest.approx(wide + (2 * WIDTH + OUT + FFN) / 2)
    assert per_token(case("dp=1,microbatch=8,recompute=ops", precision="fp8")) == pytest.approx(wide)


def test_gpt_keeps_its_own():
    found = case("dp=1", "gpt2-124m", seq_len=1024)
    assert per_token(found) == pytest.approx(4 * 768 + 4 * 768 + 2 * 3072)
    assert per_token(replace(found, layout=Layout(recompute="ops"))) == pytest.approx(2 * 768 + 4 * 768 + 3072)


@pytest.mark.parametrize("model", ["mixtral-8x7b", "deepseek-v3"])
def test_where_nobody_counted_a_share_is_assumed(model):
    found = case("dp=1,recompute=ops", model)
    assert not found.has_kernels
    assert repeats_of(found).kept == 1 - OPERATORS
    assert repeats_of(found).passing == 1


def test_making_again_costs_less_than_all_operators():
    """The activation is made on backward's way, and nothing is added to the stream again."""
    again = repeats_of(case("dp=1,recompute=ops"))
    assert 0.1 < again.passing < 0.5
    plain, ops = (price(case(f"dp=1,microbatch=8,recompute={kind}")).seconds for kind in ("none", "ops"))
    assert plain < ops < 1.03 * plain


# -- when it is fullest -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [257, 50257, 128256, 10**7])
def test_a_chunk_of_logits_is_the_losses(vocab):
    assert chunk_rows(vocab, 2) == loss.chunk_rows(vocab, 2)


def test_at_the_head_there_are_no_gradients_and_at_the_end_no_activations():
    """Many tokens: full of activations at the head. Few: full of gradients at the end."""
    many, few = of_stage(case(), 0).parts, of_stage(case("dp=1,recompute=full", seq_len=512), 0).parts
    assert "gradients" not in many
    assert many["logits"] > GIB
    assert few["gradients"] == states(case(), 0)["gradients"]
    assert few["activations"] < 0.01 * many["activations"]


def test_with_several_microbatches_gradients_are_there_in_32_bits():
    once, twice = (of_stage(case(f"dp=1,microbatch=8,accumulate={n}"), 0).parts for n in (1, 2))
    assert twice["gradients"] == 4 * shape_of("llama-1b").parameters
    assert twice["activations"] == once["activations"]


def test_8_bit_weights_are_kept_where_they_are_used_again():
    bf16, fp8 = (
        of_stage(case("dp=1,microbatch=2,accumulate=4", precision=kind), 0).parts["parameters"]
        for kind in ("bf16", "fp8")
    )
    layers = sum(n * layer.parameters for layer, n in shape_of("llama-1b").layers)
    assert fp8 - bf16 == pytest.approx(2 * layers)
    once = case(precision="fp8")
    assert of_stage(once, 0).parts["parameters"] == 2 * once.shape.parameters


def test_short_moments_take_half_of_the_optimizers_memory_and_of_its_time():
    long, short = (price(case(moment_bytes=size)) for size in (4, 2))
    assert short.memory.parts["optimizer"] == long.memory.parts["optimizer"] / 2
    assert short.times["update"] == pytest.approx(long.times["update"] * 20 / 28)


def test_others_keep_whole_states_throughout():
    parts = of_stage(case(program="others"), 0).parts
    assert (parts["master"], parts["gradients"]) == (2 * parts["parameters"], 2 * parts["parameters"])


# -- whose constants --------------------------------------------------------------------------------------------------


def test_ours_are_for_our_models_on_gpus_alone():
    assert constants_of(case()) == replace(FITTED, **OWN)
    for other in (case(program="others"), case(program="plain"), case(model="mixtral-8x7b"), case(precision="fp4")):
        assert constants_of(other) == FITTED
    assert not case("dp=1", "llama-tiny", "1xcpu", 64).has_kernels


def test_our_kernels_are_faster_and_leaner_than_plain_operators():
    ours, plain = (price(case(program=program)) for program in ("echelon", "plain"))
    assert ours.seconds < plain.seconds
    assert ours.memory.total < plain.memory.total


def test_kernels_of_all_precisions_take_less_in_8_bits():
    wide, narrow = (price(case(precision=kind)) for kind in ("bf16", "fp8"))
    assert narrow.seconds < wide.seconds
    assert tensors(narrow.case, narrow.case.shape.layers[0][0]) < tensors(wide.case, wide.case.shape.layers[0][0])


def test_the_table_of_measured_steps_is_near():
    """Within 10 % is what S11 asks; the constants were fitted to these, so the mean is much nearer."""
    table = own_steps.steps(Path(__file__).parents[2] / "bench" / "measured" / "h200.json")
    wrong = [abs(price(step.case).seconds / step.seconds - 1) for step in table]
    assert len(table) >= 10
    assert sum(wrong) / len(wrong) < 0.03


# -- search -----------------------------------------------------------------------------------------------------------


def test_the_search_makes_again_where_that_is_enough():
    """12 sequences at once leave too little of one H200 for all activations, and enough for those that `ops` keeps."""
    fixed = {"microbatch": 12}
    asked = Wish(shape=shape_of("llama-3b"), cluster=cluster.parse("1xh200"), batch=12, seq_len=4096, fixed=fixed)
    best = search(asked, top=1)[0]
    assert best.layout.recompute == "ops"
    kept_all = replace(best.case, layout=best.layout.replace(recompute="none"))
    assert worst(kept_all).total > asked.cluster.memory
