"""Stages of a model are cut by the parameters of its matmuls."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon import models
from echelon.models.model_config import find_model
from echelon.pipeline.execution.stage_assignment import cut_into_stages


@pytest.mark.parametrize(("vocab", "blocks"), [(16, [4, 4]), (1 << 14, [7, 1])])
def test_the_lm_head_counts_and_the_embedding_does_not(vocab: int, blocks: list[int]) -> None:
    """Both are as large as six blocks here: the first stage gets more blocks for the head, none less for a lookup."""
    model = replace(find_model("llama-tiny"), layers=8, vocab=vocab, tied=False)
    stages = cut_into_stages(models.build(model, "meta"), (0, 1))
    assert [sum(layer.name.startswith("blocks.") for layer in stages.layers(stage)) for stage in (0, 1)] == blocks
