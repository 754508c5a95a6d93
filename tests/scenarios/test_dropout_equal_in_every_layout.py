"""Dropout 0.1, the same seed in every layout: identical initial weights, identical masks, identical gradients."""

from __future__ import annotations

import pytest
import torch
from tiny_engines import batch_of, engine_of, largest_error, one_device, tiny, whole

from echelon import rng

SHAPES = {family: tiny(family, dropout=0.1, tied=family == "gpt") for family in ("gpt", "llama")}
LAYOUTS = ("dp=2", "dp=2,zero=3,accumulate=2", "tp=2", "tp=4,sp=0,recompute=full", "dp=2,tp=2,zero=1,recompute=full")
ROWS, LENGTH = 4, 9


def masks_of(model, shown):
    """Records the mask of every dropout's forward, with its slice of dimension 1."""

    def note(module, args, out):
        first = module.window.get(1, (0, 0))[0]
        shown.append((module.site, module.stream.samples.tolist(), first, out != 0))

    for module in model.modules():
        if isinstance(module, rng.Dropout):
            module.register_forward_hook(note)


def on_a_layout(family, layout):
    engine = engine_of(SHAPES[family], layout)
    first = whole(engine.parallel, "master")
    shown = []
    masks_of(engine.model, shown)
    result = engine.step(batch_of(SHAPES[family], ROWS, LENGTH))
    return first, shown, result.loss, whole(engine.parallel), "recompute=full" in layout


def truth(family):
    model = one_device(SHAPES[family])
    stream = rng.RandomStream(0)
    rng.attach_stream(model, stream)
    stream.samples = torch.arange(ROWS)
    first = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    shown = []
    masks_of(model, shown)
    total, count = model(**batch_of(SHAPES[family], ROWS, LENGTH))
    total.backward()
    gradients = {name: parameter.grad / count for name, parameter in model.named_parameters()}
    return first, {site: mask for site, _, _, mask in shown}, (total.detach() / count).item(), gradients


@pytest.mark.parametrize("family", SHAPES)
def test_weights_masks_and_gradients_are_those_of_one_device(pool, family):
    first, masks, loss, gradients = truth(family)
    assert len(masks) == 7, "one after the embedding, three in each layer"
    for layout in LAYOUTS:
        seen = {site: torch.zeros_like(mask) for site, mask in masks.items()}
        for weights, shown, shown_loss, found, again in pool.run(on_a_layout, world(layout), family, layout):
            assert all(torch.equal(weights[name], value) for name, value in first.items()), layout
            assert abs(shown_loss - loss) < 1e-10
            assert largest_error(found, gradients) < 1e-10, layout
            counts = dict.fromkeys(masks, 0)
            for site, samples, start, mask in shown:
                counts[site] += 1
                expected = masks[site][samples, start : start + mask.shape[1]]
                assert torch.equal(mask[:, : expected.shape[1]], expected), (layout, site)
                seen[site][samples, start : start + mask.shape[1]] = True
            per_step = 2 if "accumulate=2" in layout else 1
            inner = [count for site, count in counts.items() if site.endswith("attn.core.dropout")]
            assert inner == [per_step * (2 if again else 1)] * 2, f"{layout}: recomputed, with the same mask"
        assert all(bool(mask.all()) for mask in seen.values()), "together the ranks saw every element"


def test_another_seed_and_another_step_have_other_masks(pool):
    ((_, shown, _, _, _),) = pool.run(on_a_layout, 1, "gpt", "dp=1")
    (later,) = pool.run(second_step, 1)
    assert not torch.equal(shown[0][3], later[-1][3])


def second_step():
    engine, shown = engine_of(SHAPES["gpt"], "dp=1"), []
    masks_of(engine.model, shown)
    for _ in range(2):
        engine.step(batch_of(SHAPES["gpt"], ROWS, LENGTH))
    return [entry for entry in shown if entry[0] == shown[0][0]]


def world(layout):
    from echelon.layout import Layout

    return Layout.parse(layout).world
