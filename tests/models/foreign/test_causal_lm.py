"""transformers' classes under the loss contract compute what they computed, whole and in parts."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from foreign_families import FAMILIES, build_family, write_family

from echelon.layout.validation_error import ValidationError
from echelon.models.foreign.causal_lm import adapt, adapt_if_foreign, build_causal_lm
from echelon.models.foreign.float64_casts import float64_casts
from echelon.models.foreign.hf_source import is_hf_model, read_hf_source


def tokens(rows: int = 2, length: int = 11) -> torch.Tensor:
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_of_the_forward_equal_the_whole(name: str) -> None:
    """Embedding, layers one by one, and head: to the last bit what transformers' own forward gives."""
    torch.manual_seed(1)
    own = build_family(name, experts_implementation="eager").double().eval()
    with float64_casts(torch.float64):
        expected = own(input_ids=tokens(), use_cache=False).logits
    adapted = adapt(copy.deepcopy(own))
    assert type(adapted).__name__ == type(own).__name__
    whole = adapted.logits(tokens())
    adapted.runs_by_layer = True
    assert torch.equal(adapted.logits(tokens()), whole)
    assert torch.allclose(whole, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", FAMILIES)
def test_first_values_have_the_distributions_of_transformers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(2)
    own = build_family(name)
    built = build_causal_lm(read_hf_source(f"hf:{write_family(name, tmp_path)}"), "cpu", seed=5)
    assert sum(p.numel() for p in built.parameters()) == sum(p.numel() for p in own.parameters())
    buffers = dict(own.named_buffers())
    assert all(torch.equal(buffer, buffers[key]) for key, buffer in built.named_buffers())
    expected = {key: p.detach() for key, p in own.named_parameters()}
    for key, parameter in built.named_parameters():
        given, parameter = expected.get(key), parameter.detach()
        if given is None or given.numel() < 200:  # a part of a fused one, or too few to compare their spread
            continue
        assert float(parameter.std()) == pytest.approx(float(given.std()), rel=0.25, abs=1e-6), key
        assert float(parameter.mean()) == pytest.approx(float(given.mean()), abs=0.3 * float(given.std()) + 1e-6), key


def test_a_part_of_a_fused_weight_starts_as_that_part(tmp_path: Path) -> None:
    """The parts of q, k and v are drawn as slices of one tensor: splitting a weight changes no number."""
    source = read_hf_source(f"hf:{write_family('phi3', tmp_path)}")
    built, meta = build_causal_lm(source, "cpu", seed=5), build_causal_lm(source)
    for name, part in meta.fused_parts.items():
        rule = meta.init_rules[name].fused
        full = rule.values(5, part.name, torch.arange(torch.Size(part.shape).numel()), torch.float32).view(part.shape)
        assert torch.equal(built.get_parameter(name), full.narrow(part.dim, part.start, part.stop - part.start))


def test_fused_weights_are_found_and_others_left() -> None:
    sizes = {name: set(adapt(build_family(name)).layer_stack.fused.values()) for name in ("phi3", "gpt2", "gpt_neox")}
    assert sizes == {"phi3": {(32, 16, 16), (48, 48)}, "gpt2": {(32, 32, 32)}, "gpt_neox": set()}
    assert not adapt(build_family("mamba2")).layer_stack.fused  # its projection feeds a convolution


def test_the_loss_is_that_of_transformers() -> None:
    """The mean of ours over the targets: labels shifted, -100 ignored, a padded end masked."""
    torch.manual_seed(3)
    own = build_family("llama").double()
    given = tokens(3, 9)
    labels = given.masked_fill(torch.rand(3, 9, generator=torch.Generator().manual_seed(1)) < 0.3, -100)
    mask = torch.ones_like(given)
    mask[0, 6:] = 0
    expected = own(input_ids=given, attention_mask=mask, labels=labels.masked_fill(mask == 0, -100)).loss
    adapted = adapt(copy.deepcopy(own))
    total, count = adapted(**adapted.loss_inputs({"input_ids": given, "labels": labels, "attention_mask": mask}))
    assert float((total / count).detach()) == pytest.approx(float(expected.detach()), abs=1e-7)
    adapted.runs_by_layer = True  # as under tp and cp, where a user's loop still calls it in transformers' words
    assert float(adapted(input_ids=given, labels=labels, attention_mask=mask).loss.detach()) == pytest.approx(
        float(expected.detach()), abs=1e-7
    )


def test_called_as_before_it_is_what_it_was() -> None:
    own = build_family("qwen2").eval()
    expected = own(tokens(), output_hidden_states=True)
    got = adapt(own)(tokens(), output_hidden_states=True)
    assert torch.equal(got.logits, expected.logits)
    assert len(got.hidden_states) == len(expected.hidden_states)


def test_left_padding_is_refused() -> None:
    mask = torch.ones(2, 11, dtype=torch.int64)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="padding_side=right"):
        adapt(build_family("llama")).loss_inputs({"input_ids": tokens(), "attention_mask": mask})


def test_documents_are_kept_apart() -> None:
    """Two documents in a sequence give the logits that each has alone."""
    model = adapt(build_family("llama").double()).eval()
    given, documents = tokens(1, 10), torch.tensor([[0] * 4 + [1] * 6])
    packed = model.logits(given, documents)
    alone = torch.cat([model.logits(given[:, :4]), model.logits(given[:, 4:])], dim=1)
    assert torch.allclose(packed, alone, rtol=0, atol=1e-12)


def test_models_without_a_language_head_are_refused() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(*FAMILIES["llama"][:1], **FAMILIES["llama"][1])
    with pytest.raises(ValueError, match="build it with AutoModelForCausalLM"):
        adapt_if_foreign(transformers.AutoModel.from_config(config))
    linear = torch.nn.Linear(2, 2)
    assert adapt_if_foreign(linear) is linear


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("[]", "names no model_type"),
        ("{}", "names no model_type"),
        ('{"model_type": "llama"}', "impossible vocab_size"),
        ('{"model_type": "mine", "auto_map": {}, "vocab_size": 9}', "which is never run"),
        ("{", "config.json"),
        (json.dumps({"model_type": "llama", "vocab_size": -4}), "impossible vocab_size"),
    ],
)
def test_directories_that_are_no_model_are_refused(config: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValidationError, match=words):
        read_hf_source(f"hf:{tmp_path}")


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    assert is_hf_model(f"hf:{tmp_path}/none")
    with pytest.raises(ValidationError, match=r"config\.json"):
        read_hf_source(f"hf:{tmp_path}/none")


READS_EMBEDDING = """
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel


class Layer(LlamaDecoderLayer):
    def forward(self, hidden_states, start=None, **kwargs):
        return super().forward(hidden_states + start, **kwargs)


class Inner(LlamaModel):
    def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
        inputs_embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return super().forward(inputs_embeds=inputs_embeds, start=inputs_embeds.clone(), **kwargs)


class Model(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = Inner(config)
        self.model.layers[0] = Layer(config, 0)
"""


def test_layers_that_read_the_embedding_run_whole() -> None:
    """As it is written, it runs; in parts, a stage without embeddings would give its layers zeros."""
    namespace: dict[str, Any] = {"__name__": "reads_embedding"}
    exec(READS_EMBEDDING, namespace)
    model = adapt(namespace["Model"](build_family("llama").config))
    assert not adapt(build_family("gemma3")).reads_embedding
    total, count = model(tokens=tokens(), targets=tokens())
    assert float(total.detach()) > float(count)
    model.runs_by_layer = True
    with pytest.raises(ValueError, match="read the embedding beside their input"):
        model(tokens=tokens(), targets=tokens())


def test_dropout_that_is_called_as_a_function_is_found() -> None:
    """GPT-2 drops attention probabilities in a fused function, OPT values in two calls beside it."""
    kinds: dict[str, Any] = {}
    for name in ("gpt2", "opt", "llama"):
        stack = adapt(build_family(name)).layer_stack
        kinds[name] = (set(stack.dropouts[:-1]), set(stack.attention_dropouts))
    assert kinds == {
        "gpt2": ({(0.1,)}, {(0,)}),
        "opt": ({(0.1, 0.1)}, {()}),
        "llama": ({()}, {()}),
    }


def test_logits_of_a_padded_batch_ignore_the_padding() -> None:
    model = adapt(build_family("llama").double()).eval()
    given = tokens(1, 8)
    assert torch.allclose(model.logits(given)[:, :5], model.logits(given[:, :5]), rtol=0, atol=1e-12)
    assert float(F.softmax(model.logits(given), -1).sum().detach()) == pytest.approx(8.0)
