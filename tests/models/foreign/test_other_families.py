"""What classes do that the listed families do not: each found by trying all of transformers' causal models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_families import write_family
from other_families import write_other_family

from echelon.checkpoint.hf.foreign_weights import init_from_hf_dir
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.models.foreign.causal_lm import DividedSequences, adapt, build_causal_lm, build_on_meta
from echelon.models.foreign.float64_casts import float64_casts
from echelon.models.foreign.hf_source import read_hf_source
from echelon.parallel.refused_layouts import find_hf_layout_issues, find_layout_issues
from echelon.verification.verifier import Verifier
from echelon.verification.verify_case import VerifyCase

transformers = pytest.importorskip("transformers")


def build(kind: str, folder: Path, **changes: Any) -> Any:
    return build_causal_lm(read_hf_source(f"hf:{write_other_family(kind, folder, **changes)}"))


BY_LAYER = ["bart", "openai-gpt", "deepseek_v4", "roberta", "gemma3", "axk2", "jetmoe", "opt"]
"""embeddings that count tokens, lists as outputs, tokens read by layers, positions from 2 on, images, masks, values"""


@pytest.mark.parametrize("kind", BY_LAYER)
def test_parts_of_the_forward_equal_the_whole(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = transformers.AutoConfig.from_pretrained(write_other_family(kind, tmp_path))
    own = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().eval()
    tokens = torch.randint(3, 97, (2, 11), generator=torch.Generator().manual_seed(0))
    with float64_casts(torch.float64):
        expected = own(input_ids=tokens, use_cache=False).logits
    adapted = adapt(copy.deepcopy(own))
    assert not adapted.layer_problem
    adapted.runs_by_layer = True
    assert torch.allclose(adapted.logits(tokens), expected, rtol=0, atol=1e-14)


def test_the_list_of_layers_is_one_that_a_text_reaches(tmp_path: Path) -> None:
    """The tower of images comes first, and has more weights here."""
    assert build("git", tmp_path).layer_stack.path == "git.encoder.layer"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("zamba", "read original_hidden_states beside"),
        ("gemma4_text", "read per_layer_input beside"),
        ("hrm_text", "calls model.H_module"),
        ("mllama", "does not call model.layers one after another"),
        ("glm_moe_dsa", "not given its prev_topk_indices"),
    ],
)
def test_layers_that_cannot_run_alone_are_refused_with_the_reason(kind: str, words: str, tmp_path: Path) -> None:
    spec = f"hf:{write_other_family(kind, tmp_path)}"
    for layout in ("pp=2", "tp=2", "cp=2"):
        (issue,) = find_hf_layout_issues(spec, Layout.parse(layout))
        assert words in str(issue)
        assert issue.hint in ("use pp=1", "use sp=0", "use cp=1")
    assert not find_hf_layout_issues(spec, Layout.parse("dp=4,tp=2,sp=0,zero=3"))
    model: Any = build(kind, tmp_path)
    with pytest.raises(ValueError, match="one by one"):
        model.pipeline_model()


def test_a_refusal_starts_no_rank(pool: RankPool, tmp_path: Path) -> None:
    case = VerifyCase(model=f"hf:{write_other_family('zamba', tmp_path)}", steps=1, seq_len=17)
    verdict = Verifier(pool, case).verify_layout(Layout.parse("pp=2"))
    assert verdict.trouble.startswith("pp=2 runs the layers of ZambaForCausalLM one by one")
    assert len(verdict.trouble.splitlines()) == 1


def test_experts_without_a_common_form_are_not_divided(tmp_path: Path) -> None:
    """Llama 4 calls its experts with tokens alone, which a router has multiplied."""
    (issue,) = find_layout_issues(build("llama4_text", tmp_path), Layout.parse("dp=2,ep=2"))
    assert "no experts with stacked weights" in str(issue)


def test_layers_that_are_skipped_at_random_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"skips layers of .* at random.*layerdrop"):
        build("bart", tmp_path, decoder_layerdrop=0.5)


def test_no_parameter_is_drawn_while_a_class_is_built(tmp_path: Path) -> None:
    """`torch.normal` ignores the meta device: every process would have values of its own."""
    model = build_on_meta(read_hf_source(f"hf:{write_other_family('diffllama', tmp_path)}"))
    assert all(parameter.is_meta for parameter in model.parameters())


def test_models_inside_models_initialise_their_own_modules(tmp_path: Path) -> None:
    """xLSTM's inner model reads its own attributes to do so."""
    assert build("xlstm", tmp_path).init_rules


def test_a_head_inside_a_module_with_a_bias_is_found(tmp_path: Path) -> None:
    """BERT's bias belongs to the module around its head, which is no stub then."""
    logits = build("bert", tmp_path).logit_map
    assert logits.divides_tokens
    assert logits.divides_vocab


@pytest.mark.parametrize("kind", ["phi3", "qwen4_exp_text", "marian"])
def test_logits_are_mapped_without_the_values_of_weights(kind: str, tmp_path: Path) -> None:
    """Streams of hidden states are wider than embeddings; tables of positions are parameters; a probe leaves LongRoPE's
    frequencies on the meta device."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    folder = tmp_path / kind
    if kind == "phi3":
        write_family(kind, folder, rope_parameters=rope, original_max_position_embeddings=16)
    else:
        try:
            write_other_family(kind, folder)
        except Exception as error:  # whatever a release of transformers raises for layers that it has not
            pytest.skip(f"this release of transformers has other layers of {kind} ({type(error).__name__})")
    assert build_causal_lm(read_hf_source(f"hf:{folder}")).logit_map.divides_tokens


@pytest.mark.parametrize(("kind", "counts_from_zero"), [("roberta", False), ("bert", True), ("bart", False)])
def test_positions_are_handed_in_where_a_class_counts_as_we_do(
    kind: str, counts_from_zero: bool, tmp_path: Path
) -> None:
    model = build(kind, tmp_path)
    assert model.layer_stack.takes_positions == counts_from_zero
    if not counts_from_zero:
        with pytest.raises(ValueError, match=r"mask_documents=false"):
            model.logits(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64))


def test_tables_stay_as_the_layers_had_them(tmp_path: Path) -> None:
    """Phi-3's frequencies follow the length; the head sees a slice of the sequence, which is shorter."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    changes = {"rope_parameters": rope, "original_max_position_embeddings": 8}
    source = read_hf_source(f"hf:{write_family('phi3', tmp_path, **changes)}")
    model = build_causal_lm(source, "cpu", dtype=torch.float64)
    model.runs_by_layer = True
    model.logits(torch.arange(11).view(1, -1))
    long = model.model.rotary_emb.inv_freq.clone()
    model.layer_stack.head(model, torch.zeros(1, 4, 32, dtype=torch.float64))
    assert torch.equal(model.model.rotary_emb.inv_freq, long)


def test_layers_that_read_tokens_get_those_of_full_sequences(tmp_path: Path) -> None:
    """DeepSeek V4 routes the first layers by a table of tokens, under context parallelism too."""
    model = build("deepseek_v4", tmp_path)
    tokens, local = torch.arange(3, 11).view(1, 8), [0, 1, 6, 7]

    class Sequences:
        length, local_length = 8, 4

        def gather(self, x: torch.Tensor) -> torch.Tensor:
            return torch.arange(8).view(1, 8) if x.equal(torch.tensor([local])) else tokens

    divided: Any = DividedSequences(
        sequences=Sequences(),  # type: ignore[arg-type]
        full_layers=frozenset({0, 1}),
        full_embedding=False,
        full_tables=False,
    )
    model.divided = divided
    calls = model._layer_calls(tokens[:, local], None, torch.tensor([local]))
    assert [call.kwargs["input_ids"].tolist() for call in calls] == [tokens.tolist()] * 2 + [[[3, 4, 9, 10]]] * 2


def test_integer_tables_are_read_from_weights(tmp_path: Path) -> None:
    """DeepSeek V4 routes the first layers by a table of tokens, which its weights have under another name."""
    torch.manual_seed(1)
    config = transformers.AutoConfig.from_pretrained(write_other_family("deepseek_v4", tmp_path))
    own = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        own.model.layers[0].mlp.gate.tid2eid.random_(0, 4)
    own.save_pretrained(tmp_path)
    source = read_hf_source(f"hf:{tmp_path}")
    model = build_causal_lm(source)
    init_from_hf_dir(model, source)
    assert torch.equal(model.model.layers[0].mlp.gate.tid2eid, own.model.layers[0].mlp.gate.tid2eid)
