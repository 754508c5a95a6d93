from __future__ import annotations

import pytest
from tiny_engines import batch_of, engine_of, tiny

from echelon.data import load_tokenizer
from echelon.layout import Layout
from echelon.training import generate

SHAPE = tiny("llama")


def written(layout, prompt, tokens):
    engine = engine_of(SHAPE, layout)
    engine.step(batch_of(SHAPE, 4))
    found = generate.generate_text(engine, load_tokenizer("bytes"), prompt, tokens)
    again = generate.generate_text(engine, load_tokenizer("bytes"), prompt, tokens)
    return found, again, engine.model.training, engine.step(batch_of(SHAPE, 4)).loss


@pytest.fixture(scope="module")
def truth(pool):
    return pool.run(written, 1, "dp=1", "def ", 12)[0]


@pytest.mark.parametrize("layout", ["dp=2,zero=1", "dp=2,zero=3", "tp=2", "dp=2,tp=2,zero=3"])
def test_every_layout_generates_the_same_text(pool, truth, layout):
    for found, again, training, loss in pool.run(written, Layout.parse(layout).world, layout, "def ", 12):
        assert found == again == truth[0]
        assert training
        assert loss == pytest.approx(truth[3], abs=1e-10)


def test_the_prompt_is_not_repeated(truth):
    assert len(truth[0]) > 3
    assert not truth[0].startswith("def ")


@pytest.mark.parametrize("prompt", ["", "a prompt that is longer than the model's thirty-two positions"])
def test_any_prompt_is_accepted(pool, prompt):
    ((found, *_),) = pool.run(written, 1, "dp=1", prompt, 4)
    assert isinstance(found, str)
