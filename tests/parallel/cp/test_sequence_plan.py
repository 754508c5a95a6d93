"""How the layers of a transformers class reach the tokens of other ranks: what a trial finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_families import build_family
from other_families import write_other_family

from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.models.foreign.causal_lm import adapt, build_causal_lm
from echelon.models.foreign.hf_source import read_hf_source
from echelon.parallel.cp import sequence_plan
from echelon.parallel.cp.sequence_gather import SequenceGather
from echelon.parallel.cp.sequence_plan import plan_sequences
from echelon.parallel.refused_layouts import find_layout_issues
from echelon.verification.verifier import Verifier
from echelon.verification.verify_case import VerifyCase

pytest.importorskip("transformers")

PLANS = {
    "llama": (4, []),
    "gpt_oss": (4, []),  # windows and sinks
    "gemma2": (4, []),  # capped scores and a scale of its own
    "gptj": (0, ["attn"] * 4),  # attention that calls no interface
    "bloom": (0, ["self_attention"] * 4),
    "falcon": (0, ["self_attention"] * 4),  # its layer changes outputs of children in place
    "qwen3_next": (2, ["linear_attn"] * 2),
    "mamba2": (0, ["mixer"] * 4),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_of_a_family(name: str) -> None:
    plan = plan_sequences(adapt(build_family(name)))
    assert not plan.problem
    assert (len(plan.cores), [path.rpartition(".")[2] for path in plan.gathered]) == PLANS[name]
    assert not plan.gathers_embedding
    assert not plan.gathers_positions


OTHER_PLANS: dict[str, tuple[int, list[str]]] = {
    "mpt": (0, ["attn"] * 4),  # its forward does not run without masks
    "roformer": (0, ["attention"] * 4),  # a table of positions that no rotary embedding is
    "xlstm": (0, ["mlstm_layer"] * 4),  # its forward cuts the sequence if a limit is short
    "nemotron_h": (1, ["mixer"]),  # layers in which no token meets another
    "llama4_text": (0, ["self_attn"] * 4),  # experts that return their tokens as one list
    "deepseek_v4": (0, ["0", "1", "2", "self_attn"]),  # residual streams, and layers that read tokens
}


@pytest.mark.parametrize("name", OTHER_PLANS)
def test_the_plan_of_another_family(name: str, tmp_path: Path) -> None:
    plan = plan_sequences(build_causal_lm(read_hf_source(f"hf:{write_other_family(name, tmp_path)}")))
    assert not plan.problem
    assert (len(plan.cores), [path.rpartition(".")[2] for path in plan.gathered]) == OTHER_PLANS[name]


CLASSES = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaModel

from echelon.models.foreign.causal_lm import adapt


class ShiftedLayer(LlamaDecoderLayer):
    # Tokens meet outside of the layer's children.
    def forward(self, hidden_states, **kwargs):
        before = torch.nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1]
        return super().forward(hidden_states + 0.5 * before, **kwargs)


class HiddenAttention(LlamaAttention):
    # The interface is called with a mask that is not causal: no token attends to itself, but the first one.
    def forward(self, hidden_states, position_embeddings, attention_mask, **kwargs):
        size = hidden_states.shape[1]
        shown = torch.ones(size, size, dtype=torch.bool, device=hidden_states.device).tril(-1)
        shown[0, 0] = True
        mask = torch.zeros(size, size, dtype=hidden_states.dtype, device=hidden_states.device)
        mask = mask.masked_fill(~shown, float("-inf"))[None, None]
        return super().forward(hidden_states, position_embeddings, mask, **kwargs)


class SinkAttention(LlamaAttention):
    # Scaled dot-product attention takes sinks, and does not read them; before transformers 5.22, caps of scores too.
    def forward(self, *args, **kwargs):
        sinks = torch.ones(self.config.num_attention_heads, dtype=torch.float64)
        return super().forward(*args, s_aux=sinks, **kwargs)


class SummedModel(LlamaModel):
    # Embeddings depend on earlier ones.
    def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids).cumsum(1)
        return super().forward(inputs_embeds=inputs_embeds, **kwargs)


def model(kind):
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=None, bos_token_id=1, eos_token_id=2,
    )

    class Custom(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            if kind == "layer":
                self.model.layers = torch.nn.ModuleList(ShiftedLayer(config, i) for i in range(2))
            elif kind in ("mask", "sinks"):
                attention = HiddenAttention if kind == "mask" else SinkAttention
                for index, layer in enumerate(self.model.layers):
                    layer.self_attn = attention(config, index)
            elif kind == "embedding":
                self.model = SummedModel(config)

    return adapt(Custom(config))


def batch(rows, step):
    tokens = torch.randint(0, 97, (rows, 17), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens, "targets": tokens.roll(-1, 1)}
"""
CUSTOM = {
    "layer": ([], ["model.layers.0", "model.layers.1"]),
    "mask": ([], ["model.layers.0.self_attn", "model.layers.1.self_attn"]),
    "sinks": (["model.layers.0.self_attn", "model.layers.1.self_attn"], []),
    "embedding": (["model.layers.0.self_attn", "model.layers.1.self_attn"], []),
}


def write_model(kind: str, folder: Path) -> tuple[Path, Any]:
    path = folder / f"custom_{kind}.py"
    path.write_text(CLASSES + f"\n\ndef build():\n    return model({kind!r})\n")
    namespace: dict[str, Any] = {"__name__": path.stem}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    return path, namespace["build"]()


@pytest.mark.parametrize("kind", CUSTOM)
def test_tokens_that_meet_elsewhere_get_full_sequences(kind: str, pool: RankPool, tmp_path: Path) -> None:
    path, model = write_model(kind, tmp_path)
    plan = plan_sequences(model)
    assert (list(plan.cores), list(plan.gathered)) == CUSTOM[kind]
    assert plan.gathers_embedding == (kind == "embedding")
    for layout in ("cp=2", "cp=2,tp=2,sp=0", "cp=2,tp=2"):
        case = VerifyCase(model=f"{path}:build", batch_function=f"{path}:batch", steps=1)
        verdict = Verifier(pool, case).verify_layout(Layout.parse(layout))
        if kind == "layer" and layout == "cp=2,tp=2":
            assert "use sp=0, or cp=1" in verdict.trouble
        else:
            assert verdict.passed, verdict.trouble or verdict


def test_a_whole_layer_is_refused_under_sequence_parallelism() -> None:
    """Even one of which tp divides nothing: it is given slices of the rank's tokens."""
    gather = SequenceGather(None, adapt(build_family("llama")).layer_stack)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="use sp=0, or cp=1"):
        gather.attach("model.layers.0", torch.nn.Linear(2, 2), sequence_parallel=True)


def test_logits_that_need_other_tokens_are_refused() -> None:
    model = adapt(build_family("llama"))
    model.logit_map = type(model.logit_map)(divides_vocab=True)
    assert plan_sequences(model).problem == "its logits of a token depend on other tokens"
    (issue,) = find_layout_issues(model, Layout.parse("cp=2"))
    assert str(issue) == ("cp=2 cannot divide LlamaForCausalLM: its logits of a token depend on other tokens; use cp=1")


def test_a_model_that_no_trial_can_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapt(build_family("llama"))

    def fail(*_args: Any, **_options: Any) -> Any:
        raise RuntimeError("no positions")

    monkeypatch.setattr(sequence_plan, "_plan_layers", fail)
    assert plan_sequences(model).problem == "its layers do not run alone (no positions)"


def test_a_long_window_is_tried_as_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window beyond the tokens of the trial would hide nothing there."""
    from echelon.models.foreign import core_attention

    model = adapt(build_family("mistral", {"sliding_window": 4096}))
    assert len(plan_sequences(model).cores) == 4
    options = core_attention.ScoreOptions
    monkeypatch.setattr(core_attention, "ScoreOptions", lambda **given: options(**{**given, "window": None}))
    assert len(plan_sequences(model).gathered) == 4


def test_documents_are_refused_where_a_class_does_not_keep_them_apart() -> None:
    tokens, documents = torch.randint(3, 97, (1, 10)), torch.tensor([[0] * 4 + [1] * 6])
    for name in ("bloom", "opt", "mamba2"):
        with pytest.raises(ValueError, match=r"use data\.mask_documents=false"):
            adapt(build_family(name)).logits(tokens, documents)
