"""Losses, gradients and three training steps of every family equal those of transformers' own models, in float64.

`verify` compares layouts with one device of the same model code. This compares the model code: attention, rotations,
norms, gates, balance losses, and the weights after AdamW with clipping, with code that is not ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tiny_engines import float64, whole
from torch import Tensor, nn
from transformers_training import (
    BETAS,
    BIAS_SPEED,
    CLIP,
    EPS,
    FAMILIES,
    LR,
    WEIGHT_DECAY,
    RefuseNarrowFloats,
    Trained,
    batches,
    reference,
)

from echelon import models
from echelon.config.sections import OptimizerConfig
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.models.hf.hf_architectures import TRAINABLE
from echelon.models.model_config import ModelConfig
from echelon.training.engine import Engine

TOLERANCE = 1e-9
"""relative to the norm of the tensor"""
RULE = OptimizerConfig(name="adamw", lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)


def our_model(config: ModelConfig, state: dict[str, Tensor]) -> nn.Module:
    model = models.build(config, "cpu", dtype=torch.float64).train()
    model.load_state_dict(state)
    return model


def largest_error(tensors: dict[str, Tensor], truths: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative difference, and whose it is."""
    errors = {name: float((tensor - truths[name]).norm() / truths[name].norm()) for name, tensor in tensors.items()}
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst


def split_zeros(config: ModelConfig, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients, and those that only rounding makes other than zero: softmax ignores a bias that all scores share."""
    zeros = {name for name in tensors if config.family == "gpt" and name.endswith("attn.k.bias")}
    return {k: v for k, v in tensors.items() if k not in zeros}, {k: v for k, v in tensors.items() if k in zeros}


def check_gradients(expected: Trained) -> None:
    model, batch = our_model(expected.config, expected.state), batches()[0]
    with RefuseNarrowFloats():
        total, count = model(**batch)
        loss = total / count
        loss.backward()
    assert loss.item() == pytest.approx(expected.losses[0], rel=TOLERANCE, abs=0.0)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == dict(model.named_parameters()).keys()
    gradients, zeros = split_zeros(expected.config, gradients)
    assert all(float(gradient.norm()) < 1e-14 for gradient in zeros.values())
    assert min(float(gradient.norm()) for gradient in gradients.values()) > 1e-4
    assert largest_error(gradients, expected.gradients) < (TOLERANCE, "")


def train(
    config: ModelConfig, state: dict[str, Tensor], layout: str
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Three steps of our engine: losses, norms, and the weights with the buffers that this rank has."""
    engine = Engine(our_model(config, state), layout, RULE, clip=CLIP, options=float64())
    results = [engine.step(batch) for batch in batches()]
    weights = whole(engine.parallel, "master")
    weights |= {name: buffer.clone() for name, buffer in engine.model.named_buffers() if name.endswith("gate.bias")}
    return [result.loss for result in results], [result.norm for result in results], weights


def check_training(
    expected: Trained, losses: Sequence[float], norms: Sequence[float], weights: dict[str, Tensor]
) -> None:
    assert losses == pytest.approx(expected.losses, rel=TOLERANCE, abs=0.0)
    assert norms == pytest.approx(expected.norms, rel=TOLERANCE, abs=0.0)
    assert min(norms) > CLIP
    assert largest_error(weights, expected.weights) < (TOLERANCE, "")
    # What three steps change is a small part of the weights, and has the same bar.
    changes, truths = ({k: x[k] - expected.state[k] for k in weights} for x in (weights, expected.weights))
    assert largest_error(split_zeros(expected.config, changes)[0], truths) < (TOLERANCE, "")
    biases = [name for name in weights if name.endswith("gate.bias")]
    assert all(float(changes[name].abs().max()) >= 0.9 * BIAS_SPEED for name in biases)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_and_three_steps_equal_those_of_transformers(name: str) -> None:
    expected = reference(name)
    check_gradients(expected)
    losses, norms, weights = train(expected.config, expected.state, "accumulate=2")
    assert weights.keys() == expected.weights.keys() - ({"head.weight"} if expected.config.tied else set())
    check_training(expected, losses, norms, weights)


def test_at_least_ten_families_are_compared() -> None:
    assert {model_type for model_type, _ in FAMILIES.values()} >= {*TRAINABLE, "phi3", "dots1"}
    assert len({model_type for model_type, _ in FAMILIES.values()}) >= 10


SAMPLE = [("gpt2", "tp=2,pp=2"), ("deepseek_v3", "dp=2,ep=2,zero=3")]
DENSE = ("dp=2,zero=3,accumulate=2", "tp=2,pp=2", "cp=2,dp=2,zero=2", "pp=2,schedule=zb-h1,accumulate=4")
MOE = ("dp=2,ep=2,zero=3", "tp=2,ep=2", "cp=2,dp=2,ep=4", "pp=2,dp=2,ep=2,accumulate=2")


def run_on_ranks(pool: RankPool, name: str, layout: str) -> None:
    expected, world = reference(name), Layout.parse(layout).world
    for losses, norms, weights in pool.run(train, world, expected.config, expected.state, layout):
        check_training(expected, losses, norms, weights)


@pytest.mark.parametrize(("name", "layout"), SAMPLE)
def test_many_ranks_train_as_transformers_does(pool: RankPool, name: str, layout: str) -> None:
    run_on_ranks(pool, name, layout)


@pytest.mark.soak
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_on_ranks_trains_as_transformers_does(pool: RankPool, name: str) -> None:
    for layout in MOE if reference(name).config.moe is not None else DENSE:
        run_on_ranks(pool, name, layout)
