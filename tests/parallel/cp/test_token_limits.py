"""Which numbers of a config count tokens, and what a trial sets instead."""

from __future__ import annotations

from types import SimpleNamespace

from echelon.parallel.cp.token_limits import find_token_limits, shorten


def test_limits_are_found_by_the_words_of_their_keys() -> None:
    inner = SimpleNamespace(model_type="text", sliding_window=4096, hidden_size=64)
    config = SimpleNamespace(
        max_position_embeddings=131072,
        sliding_window=None,
        attention_chunk_size=8192,
        floor_scale=8192.0,
        index_topk=2,
        index_block_size=128,
        topk_group=4,
        max_window_layers=28,
        position_biased_input=True,
        rope_parameters={"full": {"original_max_position_embeddings": 4096}, "rope_theta": 10000.0},
        text_config=inner,
        id2label={0: "a"},
        _window=9,
    )
    limits = find_token_limits(config)
    assert limits == {
        "max_position_embeddings": 7,
        "attention_chunk_size": 3,
        "floor_scale": 2,
        "index_block_size": 2,
        "rope_parameters.full.original_max_position_embeddings": 7,
        "text_config.sliding_window": 3,
    }
    shorten(config, limits)
    assert (config.floor_scale, inner.sliding_window, inner.hidden_size) == (2, 3, 64)
    assert config.rope_parameters["full"] == {"original_max_position_embeddings": 7}
    assert find_token_limits(config) == {}
