"""What the docs and the help call missing, refused or incompatible is so today; names and counts in them exist.

A sentence with a word of `DENIAL` must contain a key of CLAIMS, whose checks run here. So a feature cannot be built,
nor a refusal lifted, while the docs still deny it; and a new denial needs something that is executed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import typer.main
from test_docs import ALL, FENCE, PAGES, ROOT

import echelon
from echelon.cli import app
from echelon.config.run_config import Config
from echelon.layout import KEYS, ValidationError

DENIAL = re.compile(
    r"\bnot (?:yet )?(?:built|implemented|supported)\b|\bnot yet\b|"
    r"(?<!-)\bplan[- ]only\b|\bunsupported\b|\bincompatible\b|"
    r"\bdoes not (?:implement|support|run)\b|\brefuse[sd]?\b|\breject(?:s|ed)?\b|"
    r"\bcannot be (?:run|exported|trained)\b|\bpriced as a baseline\b|\bpriced, not run\b",
    re.IGNORECASE,
)
SOURCE = ROOT / "src" / "echelon"
Check = Callable[[], None]


# -- the checks -------------------------------------------------------------------------------------------------------


def refuses(settings: str, *given: str) -> Check:
    """`train` accepts the configuration `given`, and refuses it with each of `settings` (a text of several) too."""

    def check() -> None:
        Config.load(None, given)
        for setting in settings.split():
            with pytest.raises(ValidationError):
                Config.load(None, [*given, setting])

    return check


def wrap_refuses(layout: str = "", model: str = "llama-tiny", *, words: str) -> Check:
    def check() -> None:
        from echelon import models

        built, ranks = models.build(models.find_model(model), "meta"), echelon.Layout.parse(layout).world
        with patch("echelon.training.wrap.world_size", lambda: ranks), pytest.raises(ValueError, match=words):
            echelon.wrap(built, layout)

    return check


def asserted_in(path: str, *names: str) -> Check:
    """Tests with these names assert it."""

    def check() -> None:
        text = (ROOT / "tests" / path).read_text(encoding="utf-8")
        assert [name for name in names if not re.search(rf"^def {name}\(", text, re.MULTILINE)] == []

    return check


def fails_in(page: str, command: str) -> Check:
    """The page has this command in a block that must fail, which tests/test_docs.py runs."""

    def check() -> None:
        assert any(b.page.name == page and b.info == ("sh", "fails") and command in b.body for b in ALL)

    return check


def absent(*words: str) -> Check:
    """No command, configuration key, layout key, module or function has one of these in its name."""

    def check() -> None:
        pattern = re.compile("|".join(words), re.IGNORECASE)
        assert sorted(name for name in names_in_the_code() if pattern.search(name)) == []

    return check


@cache
def names_in_the_code() -> frozenset[str]:
    names = {*commands(), *(key.name for key in KEYS), *configuration_keys()}
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        kinds = (ast.FunctionDef, ast.ClassDef)
        names |= {path.stem, *(node.name for node in ast.walk(tree) if isinstance(node, kinds))}
    return frozenset(names)


def not_imported(module: str, *packages: str) -> Check:
    def check() -> None:
        files = chain.from_iterable((SOURCE / package).rglob("*.py") for package in packages)
        assert [path.name for path in files if module in path.read_text(encoding="utf-8")] == []

    return check


def grid_refuses_fp8() -> None:
    asserted_in("parallel/tp_grid/test_grid_parallel.py", "test_fp8_gemms_are_refused_on_a_grid")()


def export_refuses(model: str) -> Check:
    def check() -> None:
        from echelon import models
        from echelon.models.hf.param_names import hf_model_type

        with pytest.raises(ValueError, match="transformers has no model"):
            hf_model_type(models.find_model(model))

    return check


ASYNC = "layout=pp=2,schedule=2bw"
CLAIMS: dict[str, tuple[Check, ...]] = {
    # README
    "Invalid input is rejected before any process starts": (
        asserted_in("scenarios/test_invalid_requests_are_refused.py", "test_each_is_refused_with_its_rule"),
    ),
    "Not built yet: launchers for Slurm, Ray and Kubernetes": (
        absent("slurm", "^ray$", "kubernetes", "^watch$"),
        absent("asynchronous_data", "parameter_server", "local_sgd", "diloco", "power_?sgd", "error_feedback"),
        absent("kv_cache", "key_value_cache"),
    ),
    "DataParallel (one process, many devices)": (not_imported("DataParallel", "training", "parallel", "launch"),),
    # transformers models
    "A branch on anything else is refused": (
        asserted_in("planning/test_trace_module.py", "test_branches_on_other_values_are_refused_with_their_place"),
    ),
    "Context parallelism is refused where logits of a token depend on those of others": (
        asserted_in("parallel/cp/test_sequence_plan.py", "test_logits_that_need_other_tokens_are_refused"),
    ),
    "and where a layer does not run alone": (
        asserted_in("parallel/cp/test_sequence_plan.py", "test_a_model_that_no_trial_can_run_is_refused"),
    ),
    '"-" is refused before the first step': (
        asserted_in(
            "models/foreign/test_other_families.py",
            "test_layers_that_cannot_run_alone_are_refused_with_the_reason",
        ),
    ),
    "A whole layer that gets full sequences is incompatible with `tp` and `sp=1`": (
        asserted_in("parallel/cp/test_sequence_plan.py", "test_tokens_that_meet_elsewhere_get_full_sequences"),
    ),
    "is found by running its forward on given logits": (
        asserted_in("models/foreign/test_router_loss.py", "test_another_loss_is_refused"),
    ),
    "Others refuse them: `opt`": (
        asserted_in(
            "parallel/cp/test_sequence_plan.py", "test_documents_are_refused_where_a_class_does_not_keep_them_apart"
        ),
    ),
    # LoRA
    "DoRA, biases and other methods are refused by name": (
        asserted_in("checkpoint/hf/test_peft_adapter.py", "test_an_adapter_that_computes_something_else_is_refused"),
    ),
    # CONTRIBUTING, docs/README
    "has a row in `tests/test_claims.py`": (),
    "`tests/test_claims.py` checks that": (),
    # asynchronous pipelines
    "Such a pipeline is **plan only**": (not_imported("stage_replication", "training", "parallel", "cli"),),
    "PipeDream's stages on different numbers of ranks": (not_imported("stage_replication", "training", "parallel"),),
    "No layout asks for it, and `train` does not run it": (not_imported("stage_replication", "training", "layout"),),
    "Tied weights on two stages are not supported": (
        refuses(ASYNC, "model=gpt-tiny", "layout=pp=2"),
        fails_in("asynchronous-pipelines.md", "schedule=2bw"),
    ),
    # bad numbers
    "they are incompatible with `replay.every`": (
        refuses(f"{ASYNC} layout=offload=optimizer layout=offload=params", "replay.every=2"),
        refuses("optimizer.in_backward=true", "replay.every=2", "clip=0"),
    ),
    # checkpoints
    "**Changed data or another model** is refused": (
        asserted_in(
            "training/run/test_run_fingerprint.py",
            "test_a_changed_model_file_is_refused",
            "test_changed_text_is_refused_and_restored_text_resumes",
        ),
    ),
    "or that another process is training, is refused": (
        asserted_in(
            "checkpoint/test_resume.py",
            "test_a_run_that_is_running_is_not_resumed_beside_itself",
            "test_a_run_whose_checkpoints_are_gone_does_not_start_anew",
        ),
    ),
    "A new run is refused where there are checkpoints of another": (
        asserted_in("checkpoint/test_resume.py", "test_a_new_run_keeps_out_of_the_checkpoints_of_another"),
    ),
    # compression, memory
    "`recompute=ops` holds its tensors uncompressed, and is refused": (
        refuses("layout=recompute=ops", "compress=lossless"),
    ),
    "what cannot is refused before a process starts": (refuses("layout=recompute=ops", "compress=lossless"),),
    # configuration
    "A key that is unknown or has no effect is refused": (
        refuses("shard.prefetch=2 shard.reshard_after_forward=false", "layout=dp=2"),
        asserted_in("config/test_run_config.py", "test_keys_without_effect_on_a_custom_model"),
    ),
    # data parallelism
    "Echelon does not implement the single-controller approach": (
        not_imported("DataParallel", "training", "parallel", "launch"),
    ),
    # automatic sharding
    "need modules, and refuse a graph": (
        asserted_in(
            "test_transparency_traced.py",
            "test_context_and_expert_parallelism_are_refused",
            "test_settings_that_change_modules_are_refused",
        ),
    ),
    # classes of transformers
    "what needs single layers is refused before ranks start": (
        asserted_in(
            "models/foreign/test_other_families.py",
            "test_layers_that_cannot_run_alone_are_refused_with_the_reason",
            "test_a_refusal_starts_no_rank",
        ),
    ),
    "One that skips layers at random (`layerdrop`) is refused": (
        asserted_in("models/foreign/test_other_families.py", "test_layers_that_are_skipped_at_random_are_refused"),
    ),
    # data
    "A record with both fields or with neither is refused": (
        asserted_in("data/test_records.py", "test_a_record_with_both_fields_or_neither_is_refused"),
    ),
    "An invalid `.tokens` file, and a text with NUL bytes, are refused": (
        asserted_in("data/test_token_file.py", "test_every_flipped_bit_is_found", "test_foreign_and_missing_files"),
    ),
    # elastic
    "without it the run is refused, with the issues": (refuses("layout=dp=4", "layout=dp=2", "batch=6"),),
    "`elastic.replan` is incompatible with asynchronous schedules": (refuses(ASYNC, "elastic.replan=true"),),
    # experts
    "a layout whose copies cross groups is refused": (
        refuses("layout=dp=12,shard=6,ep=4", "model=moe-tiny", "layout=dp=12,shard=6,ep=2"),
    ),
    "gates route full ones: refused": (refuses("layout=pp=2,schedule=terapipe", "model=moe-tiny", "layout=pp=2"),),
    "DeepSeek-V3's layer that predicts a second token is not built": (absent("nextn", "multi_token", "second_token"),),
    # failures
    "of a launcher that has ended | refused if they are no numbers": (
        asserted_in("launch/test_world.py", "test_invalid_variables_are_refused"),
    ),
    "`ulimit -n` is too small for the ranks | refused before a rank starts": (
        asserted_in(
            "launch/test_world.py",
            "test_invalid_variables_are_refused",
            "test_too_few_open_files_are_refused_before_ranks_start",
        ),
    ),
    "Invalid faults are refused before any process starts": (fails_in("failures.md", "--inject kil:rank=1"),),
    # Hugging Face
    "Bytes that have changed on the disk since they were written are refused by name": (
        asserted_in("checkpoint/test_storage.py", "test_one_byte_of_any_file"),
    ),
    "All that our models do not compute is refused": (
        asserted_in("checkpoint/hf/test_import_errors.py", "test_what_our_models_do_not_compute"),
    ),
    "Pickles (`.bin`, `.pt`) are refused": (
        asserted_in("checkpoint/hf/test_import_errors.py", "test_no_pickle_is_opened"),
    ),
    "and a link out of it is refused": (
        asserted_in("checkpoint/hf/test_import_errors.py", "test_a_link_out_of_the_folder_is_refused"),
    ),
    "or becomes so in the requested dtype, is refused with its name": (
        asserted_in("checkpoint/hf/test_import_errors.py", "test_weights_beyond_the_range_of_a_dtype_are_refused"),
    ),
    "the export is refused before it begins": (
        asserted_in("checkpoint/hf/test_import_errors.py", "test_a_check_that_does_not_fit_is_refused_first"),
    ),
    "any other gate that transformers does not have cannot be exported": (
        *(export_refuses(model) for model in ("switch-tiny", "gshard-tiny", "conv-tiny")),
    ),
    # long sequences
    "`schedule=terapipe` slices sequences itself, and is incompatible with cp": (
        refuses("layout=pp=2,cp=2,schedule=terapipe", "layout=pp=2,schedule=terapipe"),
    ),
    # offload
    "`optimizer.in_backward` updates before the norm is known: it is refused": (
        refuses("layout=offload=optimizer", "optimizer.in_backward=true", "clip=0"),
    ),
    "so `ec.wrap` refuses `offload`": (wrap_refuses("offload=optimizer", words="offload requires the engine"),),
    "they are incompatible with `activations`": (
        refuses("compress=lossless", "layout=offload=activations"),
        refuses("memory.arena=true", "layout=offload=activations,recompute=full"),
        refuses("layout=offload=activations,recompute=budget:1GiB", "layout=recompute=budget:1GiB"),
    ),
    "they refuse everything but `activations`": (
        refuses(f"{ASYNC},offload=optimizer {ASYNC},offload=params", f"{ASYNC},offload=activations"),
    ),
    # optimizers
    "In a pipeline it is refused: gradients of several microbatches": (
        refuses("layout=pp=2", "optimizer.in_backward=true", "clip=0"),
    ),
    "A dynamic loss scale is refused too": (refuses("dtype=float16", "optimizer.in_backward=true", "clip=0"),),
    "`optimizer.ema` is refused with asynchronous pipelines": (refuses(ASYNC, "optimizer.ema=0.9"),),
    # pipelines
    "`ec.wrap` does not support pp": (wrap_refuses("pp=2", words="a pipeline needs the engine's loop"),),
    "An invalid schedule is rejected with every fault": (fails_in("pipelines.md", "echelon draw file:wrong.txt"),),
    "Echelon rejects a parameter that no layer uses": (
        asserted_in(
            "pipeline/test_runtime.py",
            "test_pipeline_layers_that_do_not_match_the_model_are_refused",
            "test_a_model_without_pipeline_layers_is_refused",
        ),
    ),
    # planning
    "PyTorch's `DataParallel` (priced, not run)": (not_imported("DataParallel", "training", "parallel", "launch"),),
    "so `--correct` refuses a cluster that has them": (
        asserted_in("planning/test_correction.py", "test_measured_curves_are_not_corrected_twice"),
    ),
    "layouts too that `train` refuses (fp8 with tp grids": (
        grid_refuses_fp8,
        asserted_in("planning/test_long_sequences.py", "test_only_models_that_support_cp_get_it"),
    ),
    "What does not fit is refused with its largest terms": (fails_in("planning.md", "echelon plan gpt3-175b"),),
    # randomness
    "modules with another kind of dropout are rejected": (
        asserted_in("test_rng.py", "test_attach_rejects_other_dropouts"),
    ),
    "dropout inside `nn.MultiheadAttention`) are rejected by name": (
        asserted_in("test_rng.py", "test_attach_rejects_other_dropouts"),
    ),
    # recomputation
    "a smaller budget is refused with the minimum": (
        asserted_in("memory/test_checkpoint_policy.py", "test_a_budget_below_the_minimum_is_refused_with_the_minimum"),
    ),
    "and `memory.partition` is refused": (
        refuses("memory.partition=true", "layout=tp=2,recompute=full"),
        refuses("memory.partition=true", "layout=tp=4,tp_kind=2d,recompute=full"),
    ),
    "With `schedule=terapipe` it is refused": (
        refuses("layout=pp=2,schedule=terapipe,recompute=budget:1GiB", "layout=pp=2,schedule=terapipe"),
    ),
    # tensor grids
    "are incompatible with a grid": (
        refuses("layout=tp=4,tp_kind=2d,sp=1", "layout=tp=4,tp_kind=2d"),
        grid_refuses_fp8,
    ),
    # help
    "Also rank what train refuses (fp8 with tp grids": (grid_refuses_fp8,),
}
"""a part of each sentence that denies something -> what shows it; none where the sentence is about this file"""


# -- what is read -----------------------------------------------------------------------------------------------------


@cache
def commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


@cache
def configuration_keys() -> frozenset[str]:
    return frozenset(key.name for key in list(Config.keys()))


def prose(page: Path) -> str:
    """A page without its code blocks and generated tables' marks."""
    return re.sub(r"<!--.*?-->", "\n\n", FENCE.sub("\n\n", page.read_text(encoding="utf-8")))


def sentences() -> Iterator[tuple[str, str]]:
    """(where, sentence) of the pages, of the help of every command, and of the meanings of keys."""
    texts = [(page.name, prose(page)) for page in PAGES]
    for name, command in commands().items():
        options = [option.help or "" for option in command.params if hasattr(option, "help")]
        texts.append((f"echelon {name} --help", "\n\n".join([command.help or "", *options])))
    texts.append(("echelon train --keys", "\n\n".join(key.meaning for key in list(Config.keys()))))
    texts.append(("layout keys", "\n\n".join(key.meaning for key in KEYS)))
    for where, text in texts:
        for block in re.split(r"\n\s*\n|\n(?=[-|*#]|\d+\. )", text):
            for sentence in re.split(r"(?<=[.?!])\s+(?=\S)", " ".join(block.split())):
                yield where, sentence


DENIALS = [(where, sentence) for where, sentence in sentences() if DENIAL.search(sentence)]


def test_every_denial_has_a_check() -> None:
    """Add a row to CLAIMS, with a check that fails once the sentence is false."""
    unchecked = [
        f"{where}: {sentence}"
        for where, sentence in DENIALS
        if sum(claim in sentence for claim in CLAIMS) < len(DENIAL.findall(sentence))
    ]
    assert unchecked == []


def test_every_claim_is_still_made() -> None:
    assert [claim for claim in CLAIMS if not any(claim in sentence for _, sentence in DENIALS)] == []


@pytest.mark.parametrize("claim", [claim for claim, checks in CLAIMS.items() if checks])
def test_what_is_denied_is_missing_or_refused(claim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for check in CLAIMS[claim]:
        check()


# -- names and counts -------------------------------------------------------------------------------------------------

OTHER_OPTIONS = {"--max-restarts", "--rdzv-id", "--rdzv-conf"}
"""torchrun's"""
OTHER_FILES = ("RUN/", "HF_DIR/")
"""places of a user's"""


def codes(page: Path) -> list[str]:
    """What stands in backquotes, but for commands of Python: those are of scripts."""
    return [code for code in re.findall(r"`([^`\n]+)`", prose(page)) if not code.startswith("python ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_exist(page: Path) -> None:
    """Names of Python, files, configuration keys, commands and options that a page mentions."""
    options = {name for command in commands().values() for option in command.params for name in option.opts}
    sections = {name.partition(".")[0] for name in configuration_keys() if "." in name}
    wrong = []
    for code in codes(page):
        for path in re.findall(r"(?<![\w/.-])(?:[\w-]+/)+[\w*-]+\.(?:py|md|json|toml|csv)\b", code):
            places = [place / path for place in (ROOT, SOURCE, ROOT / "docs", ROOT / "bench")]
            if not path.startswith(OTHER_FILES) and not any(list(p.parent.glob(p.name)) for p in places):
                wrong.append(path)
        wrong += [name for name in re.findall(r"(?<![\w.])(?:ec|echelon)\.[\w.]*\w", code) if not resolves(name)]
        wrong += [name for name in re.findall(r"(?<![\w-])--[a-z][\w-]*", code) if name not in options | OTHER_OPTIONS]
        wrong += [name for name in re.findall(r"(?:^|\s)echelon (\w+)", code) if name not in commands()]
        for section, key in re.findall(r"(?<![\w./])(\w+)\.(\w+)(?![\w.(/])", code):
            if section in sections and key != "py" and f"{section}.{key}" not in configuration_keys():
                wrong.append(f"{section}.{key}")
    assert wrong == []


def resolves(name: str) -> bool:
    """Whether an attribute or a module has this name."""
    found: Any = echelon
    parts = name.split(".")[1:]
    for n, part in enumerate(parts, 1):
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = import_module(".".join(["echelon", *parts[:n]]))
            except ImportError:
                return False
    return True


WORDS = {9: "nine", 11: "eleven", 12: "twelve", 13: "thirteen", 14: "fourteen", 15: "fifteen"}


def counts() -> dict[str, tuple[str, ...]]:
    """Numbers of the code as the pages write them."""
    from echelon.faults import recorder_entry, stragglers
    from echelon.memory.checkpointing import knapsack
    from echelon.memory.compression import cost as compression_cost
    from echelon.memory.compression import saved_tensor_compression
    from echelon.moe import GATES
    from echelon.optim import cost as optimizer_cost
    from echelon.parallel.ep.cost import MAX_LOAD_FACTOR
    from echelon.planning.calibrate.constants import NATIVE_OVERRIDES, Constants
    from echelon.planning.cluster import device_bench
    from echelon.planning.cluster.cluster import parse_cluster
    from echelon.planning.model.model_sources import resolve_shape
    from echelon.planning.scenario import PlanRequest
    from echelon.planning.search import layout_families, layout_search
    from echelon.verification.verify_request import DEFAULT_LAYOUTS

    layouts, numbers = WORDS[len(DEFAULT_LAYOUTS.split(";"))], len(fields(Constants)) - 1
    large = PlanRequest(shape=resolve_shape("llama-70b"), cluster=parse_cluster("1024xh100"), batch=1024, seq_len=8192)
    searched = sum(1 for _ in layout_families.all_layouts(large))
    sizes = device_bench.MESSAGE_SIZES
    return {
        "README.md": (f"checks {layouts} common layouts",),
        "verify.md": (f"takes {layouts} common layouts",),
        "experts.md": (
            f"{WORDS[len(GATES)].capitalize()} gates, each after its paper",
            f"`MAX_LOAD_FACTOR` = {MAX_LOAD_FACTOR:g} times",
        ),
        "planning.md": (
            f"are {numbers} numbers in `planning/calibrate/constants.py`",
            f"{WORDS[len(NATIVE_OVERRIDES)]} of the {numbers} numbers are Echelon's own",
            f"cp down to {layout_families.MIN_CP_TOKENS_FEW_SEQUENCES:,} tokens per rank",
            f"{searched:,} layouts of a 70B model on 1,024 devices",
            f"{WORDS[layout_search.NUM_BUDGET_TRIALS]} are tried with a budget",
        ),
        "planning-calibration.md": (
            f"GEMMs of {len(device_bench.MATMUL_SHAPES['cuda'])} sizes",
            f"from {sizes[0] >> 10} KiB to {sizes[-1] >> 20} MiB",
        ),
        "recompute.md": (f"bytes are rounded up to 1/{knapsack.BUDGET_STEPS} of the budget",),
        "tensor-grids.md": (f"tries grids from `tp={layout_families.MIN_GRID_TP}` on",),
        "long-sequences.md": (f"fewer than {layout_families.MIN_CP_TOKENS:,} tokens",),
        "compression.md": (
            f"fewer than {saved_tensor_compression.MIN_SAMPLE_NUMEL} elements per sample",
            f"{compression_cost.MIN_SPARSE_BYTES >> 20} MiB on a GPU keep their zeros",
        ),
        "optimizers.md": (f"Parameters below {optimizer_cost.MIN_QUANTIZED_NUMEL} elements keep float32",),
        "failures.md": (
            f"the last {recorder_entry.NUM_SLOTS} operations",
            f"works {stragglers.SLOWDOWN:g} x as long as its peers of the same stage "
            f"({stragglers.SLOWDOWN_ACROSS_STAGES:g} x where it has none)",
        ),
    }


def test_counts_are_the_codes() -> None:
    pages = {page.name: " ".join(prose(page).split()) for page in reversed(PAGES)}  # the first README.md wins
    assert [(page, text) for page, texts in counts().items() for text in texts if text not in pages[page]] == []
