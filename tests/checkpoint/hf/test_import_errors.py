"""What is refused, in words, and with nothing left behind."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_models import MODELS, build, save
from safetensors.torch import load_file, save_file

from echelon.checkpoint.hf import logit_check
from echelon.checkpoint.hf.convert_model import export_model, import_model
from echelon.layout.validation_error import ValidationError
from echelon.models.hf import hf_config_reader, param_names
from echelon.models.hf.hf_architectures import TRAINABLE


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in several files."""
    return save(build("llama"), tmp_path_factory.mktemp("hf") / "theirs", max_shard_size="10KB")


@pytest.fixture
def theirs(whole: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    import shutil

    return Path(shutil.copytree(whole, tmp_path / "theirs"))


def refused(theirs: Path, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        import_model(theirs, theirs.parent / "ours")
    assert {path.name for path in theirs.parent.iterdir()} == {"theirs"}


def edit(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    given = json.loads(file.read_text())
    change(given)
    file.write_text(json.dumps(given))


def place(theirs: Path, name: str) -> Path:
    return theirs / json.loads((theirs / "model.safetensors.index.json").read_text())["weight_map"][name]


# -- files ------------------------------------------------------------------------------------------------------------


def test_missing_shards_are_all_named(theirs: Path) -> None:
    gone = sorted(theirs.glob("*.safetensors"))[1:3]
    for file in gone:
        file.unlink()
    refused(theirs, rf"shard that the index names is missing \(.*{gone[0].name}\); also .*{gone[1].name}\)")


@pytest.mark.parametrize(
    "spoil", [lambda b: b[:-5], lambda b: b"\xff" * 8 + b[8:], lambda b: b.replace(b"offsets", b"0ffsets", 1)]
)
def test_a_corrupt_or_short_file_is_named(theirs: Path, spoil: Callable[[bytes], bytes]) -> None:
    file = sorted(theirs.glob("*.safetensors"))[0]
    file.write_bytes(spoil(file.read_bytes()))
    refused(theirs, f"invalid safetensors file .*{file.name}.*fetch the model again")


class Trap:
    """Says so when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("sprung"),))


def test_no_pickle_is_opened(theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trap = pickle.dumps(Trap())
    (theirs / "pytorch_model.bin").write_bytes(trap)
    import_model(theirs, tmp_path / "beside")  # there are safetensors: the pickle is not looked at
    place(theirs, "model.norm.weight").write_bytes(trap)
    with pytest.raises(ValueError, match="invalid safetensors file"):
        import_model(theirs, tmp_path / "ours")
    edit(
        theirs / "model.safetensors.index.json",
        lambda index: index["weight_map"].update({"model.norm.weight": "pytorch_model.bin"}),
    )
    with pytest.raises(ValueError, match="only safetensors are opened"):
        import_model(theirs, tmp_path / "ours")
    for file in (*theirs.glob("*.safetensors"), theirs / "model.safetensors.index.json"):
        file.unlink()
    with pytest.raises(ValueError, match=r"weights are pickles.*pytorch_model.bin.*save_pretrained"):
        import_model(theirs, tmp_path / "ours")
    assert not (tmp_path / "sprung").exists()
    assert not (tmp_path / "ours").exists()


def test_an_index_stays_in_its_folder(theirs: Path) -> None:
    edit(
        theirs / "model.safetensors.index.json",
        lambda index: index["weight_map"].update({"model.norm.weight": "../x.safetensors"}),
    )
    refused(theirs, r"not a safetensors file of its folder .*\.\./x\.safetensors")


def test_index_and_files_must_agree(theirs: Path) -> None:
    edit(theirs / "model.safetensors.index.json", lambda index: index["weight_map"].pop("model.norm.weight"))
    refused(theirs, r"index and the files differ .*not in the index: model.norm.weight")


def test_names_and_shapes_are_listed_at_once(theirs: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for file in (*theirs.glob("*.safetensors"),):
        tensors |= load_file(file)
        file.unlink()
    (theirs / "model.safetensors.index.json").unlink()
    tensors["model.surplus.weight"] = tensors.pop("model.norm.weight")
    tensors["lm_head.weight"] = torch.zeros(97, 31)
    save_file(tensors, theirs / "model.safetensors")
    refused(
        theirs,
        r"missing: model.norm.weight; unknown: model.surplus.weight; "
        r"wrong shape: lm_head.weight is \(97, 31\), expected \(97, 32\)",
    )


@pytest.mark.parametrize("name", ["config.json", "shard", "model.safetensors.index.json"])
def test_a_link_out_of_the_folder_is_refused(theirs: Path, tmp_path: Path, name: str) -> None:
    file = theirs / name if name != "shard" else place(theirs, "lm_head.weight")
    outside = tmp_path.parent / f"outside-{file.name}"
    file.rename(outside)
    file.symlink_to(outside)
    refused(theirs, rf"a link leads out of the model's directory \(.*{file.name} -> .*; copy the file into it")


def test_the_links_of_the_cache_are_followed(theirs: Path, tmp_path: Path) -> None:
    """Hugging Face's cache stores contents once, in blobs, and a snapshot links to them."""
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
    blobs.mkdir(parents=True)
    snapshot.parent.mkdir()
    theirs.rename(snapshot)
    for number, file in enumerate([*snapshot.iterdir()]):
        file.rename(blobs / str(number))
        file.symlink_to(f"../../blobs/{number}")
    assert import_model(snapshot, tmp_path / "ours").tensors > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(theirs: Path, value: float) -> None:
    file = place(theirs, "lm_head.weight")
    state = load_file(file)
    state["lm_head.weight"][3, 1] = value
    save_file(state, file, metadata={"format": "pt"})
    refused(theirs, r"weights are not finite \(head\.weight: 1 of .* as float32; from lm_head\.weight\)")


def test_weights_beyond_the_range_of_a_dtype_are_refused(theirs: Path) -> None:
    file = place(theirs, "lm_head.weight")
    state = load_file(file)
    state["lm_head.weight"][3, 1] = 1e5
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"as float16; .*choose a dtype with a larger range"):
        import_model(theirs, theirs.parent / "ours", dtype="float16")
    assert import_model(theirs, theirs.parent / "ours", dtype="bfloat16").tensors > 0


def test_a_tensor_in_two_shards_is_refused(theirs: Path) -> None:
    first, last = sorted(theirs.glob("*.safetensors"))[:: len(list(theirs.glob("*.safetensors"))) - 1]
    state = load_file(first)
    save_file({**load_file(last), **state}, last, metadata={"format": "pt"})
    refused(theirs, rf"tensors are stored twice \(.*{last.name} and {first.name}: {next(iter(state))}")


def test_narrow_weights_are_refused(theirs: Path) -> None:
    file = place(theirs, "model.norm.weight")
    save_file({key: x.to(torch.float8_e4m3fn) for key, x in load_file(file).items()}, file)
    refused(theirs, "weights of unsupported dtypes .*F8_E4M3.*unquantised")


def test_a_directory_with_files_is_not_written_over(theirs: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("kept")
    with pytest.raises(ValueError, match="exists and is not empty"):
        import_model(theirs, tmp_path / "full")
    (tmp_path / "empty").mkdir()
    import_model(theirs, tmp_path / "empty")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]


def test_a_failure_on_the_way_leaves_nothing(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a full disk does."""

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    refused(theirs, "cannot be written .*No space left on device.*free space")


# -- configs ----------------------------------------------------------------------------------------------------------

WRONG: tuple[tuple[str, dict[str, Any], str], ...] = (
    (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        "rope_parameters.*does not describe yarn scaling.*factor",
    ),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "scales rotary embeddings .*dynamic"),
    ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "scales rotary .*longrope.*linear, llama3, yarn"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1.0, "beta_slow": 3.0}},
        "rope_parameters.*does not describe yarn scaling.*beta_slow < beta_fast",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
        "rope_parameters.*does not describe.*low_freq",
    ),
    ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling.*contradicts rope_parameters"),
    ("llama", {"rope_parameters": {"rope_theta": -1}}, "rope_theta=-1 is not a valid number"),
    ("llama", {"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta=Infinity is not a valid number"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps=NaN is not a valid number"),
    ("llama", {"vocab_size": 2**40}, "vocab_size=1099511627776 is not a valid number"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.*contradicts rope_parameters"),
    ("llama", {"attention_bias": True}, "attention_bias=true is not computed by our models; legal: false"),
    ("llama", {"hidden_act": "gelu"}, 'hidden_act="gelu" is not computed'),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config.*is not a quantisation that import reads"),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config.*weight_block_size"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "legal: LlamaForCausalLM"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads"),
    ("mistral", {"sliding_window": 16}, "sliding_window=16 is a window.*set max_position_embeddings to 16"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16}, "sliding_window=16 is a window"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=true is not computed"),
    ("gpt2", {"attn_pdrop": 0.5}, "resid_pdrop.*not the rate of all dropout"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not computed"),
    ("qwen3_moe", {"mlp_only_layers": [1], "num_hidden_layers": 3}, "mlp_only_layers.*as ours cannot"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=false is not computed"),
    ("deepseek_v3", {"num_experts_per_tok": 2}, "groups by their 2 best experts, and ours by 1"),
    ("deepseek_v2", {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05 is not computed"),
)


@pytest.mark.parametrize(("name", "change", "words"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_what_our_models_do_not_compute(name: str, change: dict[str, Any], words: str) -> None:
    kind, values = MODELS[name]
    good = {"model_type": kind, "sliding_window": None, **values}
    hf_config_reader.parse_hf_config(good, "fine")
    with pytest.raises(ValidationError, match=words):
        hf_config_reader.parse_hf_config({**good, **change}, "wrong")


ODD = (None, -1, 0, 1.5, "x", [], {}, True, [1], {"rope_type": 3}, 10**30, float("inf"), float("nan"))


@pytest.mark.parametrize("name", MODELS)
def test_whatever_stands_in_a_config(name: str) -> None:
    """It is read or refused, and never a surprise."""
    kind, values = MODELS[name]
    good = {
        "model_type": kind,
        "architectures": [TRAINABLE[kind].class_name],
        "sliding_window": None,
        **values,
    }
    keys = {
        *good,
        *TRAINABLE[kind].supported_values,
        "rope_theta",
        "rope_scaling",
        "quantization_config",
        "layer_types",
        "use_sliding_window",
        "dtype",
    }
    for key in keys:
        for value in ODD:
            with suppress(ValueError):
                hf_config_reader.parse_hf_config({**good, key: value}, "odd")


def test_all_faults_of_a_config_come_together() -> None:
    given = {"model_type": "llama", **MODELS["llama"][1], "mlp_bias": True, "hidden_act": "relu", "vocab_size": None}
    with pytest.raises(ValidationError) as found:
        hf_config_reader.parse_hf_config(given, "wrong")
    assert [fault.key for fault in found.value.issues] == ["hidden_act", "mlp_bias", "vocab_size"]
    with pytest.raises(ValidationError, match=r'model_type=lama .*did you mean "llama"'):
        hf_config_reader.parse_hf_config({"model_type": "lama"}, "wrong")


# -- the check --------------------------------------------------------------------------------------------------------


def test_a_wrong_line_of_the_table_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up have one shape: only logits tell them apart."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(param_names, "_MLP", {"gate": "up_proj", "up": "gate_proj", "down": "down_proj"})
    with pytest.raises(ValueError, match=r"logits differ from those of transformers .*nothing was written"):
        export_model("llama-tiny", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_key_of_the_config_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from echelon.checkpoint.hf import convert_model

    right = convert_model.hf_config

    def wrong(*given: Any) -> dict[str, Any]:
        return {**right(*given), "rms_norm_eps": 1e-3}

    monkeypatch.setattr(convert_model, "hf_config", wrong)
    with pytest.raises(ValueError, match="logits differ"):
        export_model("llama-tiny", tmp_path / "out")


def test_a_check_that_does_not_fit_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_check, "available_host_bytes", lambda: 100 * 2**30)
    with pytest.raises(
        ValueError, match=r"unsharded model in memory \(650.5 GiB in float32, 100.0 available; gpt3-175b\)"
    ):
        export_model("gpt3-175b", tmp_path / "out")


def test_without_transformers_our_own_import_is_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_check.importlib.util, "find_spec", lambda _name: None)
    done = export_model("gpt-tiny", tmp_path / "out")
    assert done.check == logit_check.LogitCheck("import", 0.0)
    again = logit_check._reimport_logits
    monkeypatch.setattr(logit_check, "_reimport_logits", lambda *given: again(*given) + 0.1)
    with pytest.raises(ValueError, match="logits differ from those of import"):
        export_model("gpt-tiny", tmp_path / "other")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
