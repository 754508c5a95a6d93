"""Named sizes: their exact parameter counts, their FLOPs, unknown names, and small models of the same kind."""

import subprocess
import sys

import pytest

from echelon.layout.validation_error import ValidationError
from echelon.models import SIZES, ModelConfig, build, find_model, reduced_config


@pytest.mark.parametrize("name", [name for name in SIZES if name not in ("gpt3-175b", "llama-70b", "llama-405b")])
def test_formula_counts_what_the_module_has(name: str) -> None:
    model = build(find_model(name), "meta")
    assert find_model(name).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2-124m", 124_439_808),
        ("gpt2-350m", 354_823_168),
        ("gpt2-774m", 774_030_080),
        ("gpt2-1.5b", 1_557_611_200),
        ("llama-8b", 8_030_261_248),
        ("llama-70b", 70_553_706_496),
        ("llama-405b", 405_853_388_800),
    ],
)
def test_published_counts(name: str, parameters: int) -> None:
    assert find_model(name).parameters == parameters


def test_gpt3_has_about_175_billion() -> None:
    assert abs(find_model("gpt3-175b").parameters / 175e9 - 1) < 0.01


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_formula_with_grouped_queries_tied_and_untied(family: str, tied: bool) -> None:
    config = ModelConfig(
        name="x", family=family, layers=2, width=48, heads=6, kv_heads=2, ffn=40, vocab=13, max_seq_len=9, tied=tied
    )
    model = build(config, "meta")
    assert config.parameters == sum(p.numel() for p in model.parameters())
    inputs = [p.numel() for n, p in model.named_parameters() if n.startswith(("embed", "positions"))]
    head = 13 * 48 if tied else 0
    assert config.matmul_parameters == config.parameters - sum(inputs) + head
    assert config.flops_per_token(5) == 6 * config.matmul_parameters + 6 * 2 * 48 * 5


def test_conv_flops_count_every_position() -> None:
    config = find_model("conv-tiny")
    assert config.flops_per_token(1) == 6 * (9 * (3 * 8 * 256 + 8 * 16 * 64 + 16 * 32 * 16) + 32 * 10)
    assert config.matmul_parameters == config.parameters


def test_unknown_name_is_one_fault_with_the_legal_names() -> None:
    with pytest.raises(ValidationError) as caught:
        find_model("gpt2-124")
    (fault,) = caught.value.issues
    assert (fault.key, fault.value) == ("model", "gpt2-124")
    assert all(name in fault.legal for name in SIZES)
    assert "gpt2-124m" in fault.hint


def test_impossible_shapes_are_refused() -> None:
    good = {
        "name": "x",
        "family": "llama",
        "layers": 1,
        "width": 64,
        "heads": 4,
        "kv_heads": 2,
        "vocab": 9,
        "max_seq_len": 8,
    }
    assert ModelConfig(**good).head_dim == 16
    for change, match in (
        ({"family": "bert"}, "family is not one of gpt, llama, conv"),
        ({"heads": 5}, r"heads do not divide the width \(width=64, heads=5\)"),
        ({"kv_heads": 3}, r"kv_heads do not divide the heads \(heads=4, kv_heads=3\)"),
        ({"heads": 64}, r"even head_dim \(head_dim=1\)"),
        ({"dropout": 1.0}, r"dropout is not in \[0, 1\)"),
        ({"layers": 10**7}, r"layers exceed the limit of 10,000 \(layers=10000000\); use fewer"),
        ({"layers": 0, "vocab": 0}, r"layers is less than 1 .*; also vocab is less than 1"),
        ({"family": "conv", "layers": 4}, r"4 convolutions cannot halve the image \(max_seq_len=8\)"),
    ):
        with pytest.raises(ValueError, match=match):
            ModelConfig(**{**good, **change})


@pytest.mark.parametrize("name", list(SIZES))
def test_reduced_is_small_and_of_the_same_kind(name: str) -> None:
    config, small = find_model(name), reduced_config(find_model(name))
    assert small.parameters < 500_000
    assert (small.family, small.tied, small.dropout) == (config.family, config.tied, config.dropout)
    if config.family != "conv":
        assert (small.layers, small.width, small.vocab) == (4, 64, 257)
        # 4 heads cannot show a ratio of 3, or one above 4: one kv head is the nearest.
        ratio = config.heads // config.kv_heads
        assert small.heads // small.kv_heads == {1: 1, 2: 2}.get(ratio, 4)
        assert small.ffn % 16 == 0
        assert abs(small.ffn / small.width - config.ffn / config.width) <= 0.25


def test_reduced_takes_other_numbers_of_heads() -> None:
    small = reduced_config(find_model("llama-8b"), heads=8, layers=2)
    assert (small.heads, small.kv_heads, small.layers) == (8, 2, 2)
    assert reduced_config(find_model("llama-3b"), heads=6, width=96).kv_heads == 2


def test_sizes_load_no_torch() -> None:
    use = "from echelon.models import find_model; find_model('llama-8b').parameters"
    script = f"import sys; {use}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
