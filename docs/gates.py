"""Tables of gates and MoE models for docs/experts.md and the pictures."""

from __future__ import annotations

import inspect
import json
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from echelon.models import model_config
from echelon.models.hf.param_names import hf_model_type, param_mappings
from echelon.models.model_config import ModelConfig
from echelon.moe import GATES, build_gate, gate_class

Table = tuple[Sequence[str], Iterable[Sequence[str]]]
"""head and rows"""

MEASURED = Path(__file__).parent / "pictures" / "experts.json"
"""what bench/experts.py wrote"""

DESCRIPTIONS: dict[str, tuple[str, str, str]] = {
    "noisy-top-k": (
        "Shazeer and others 2017",
        "the k best logits, with learned noise in training; weights: their softmax",
        "{w_importance}·CV(weights)² + {w_load}·CV(selection probabilities)², over experts",
    ),
    "hierarchical": (
        "the same, appendix B",
        "a noisy gate over groups, and one in each group that is chosen",
        "as noisy-top-k, over all pairs: {w_importance} and {w_load}",
    ),
    "gshard": (
        "GShard, Lepikhin and others 2020",
        "the two best of a softmax; the second with a probability of twice its weight",
        "{balance}/E · sum of f·P, of first choices",
    ),
    "switch": (
        "Switch, Fedus and others 2021",
        "the best of a softmax; the router's input jitters in training",
        "{balance}·E · sum of f·P",
    ),
    "expert-choice": (
        "Zhou and others 2022",
        "every expert takes the T·k/E tokens that suit it best",
        "none: loads are even",
    ),
    "expert-choice-capped": (
        "the same, section 3.3",
        "as expert-choice, and a token has {cap} experts at most, or one more by rounding",
        "none: loads are even",
    ),
    "mixtral": (
        "Mixtral, Jiang and others 2024",
        "the k best of a softmax; weights divided by their sum",
        "{balance}·E · sum of f·P",
    ),
    "qwen": (
        "Qwen2-MoE 2024, Qwen3 2025",
        "the k best of a softmax; weights as they are, or divided (`normalise`)",
        "{balance}·E · sum of f·P",
    ),
    "loss-free": (
        "Wang and others 2024",
        "the k best of sigmoid + bias; weights: the sigmoids",
        "none: after a step the bias of an expert goes up or down by {speed}",
    ),
    "deepseek-v2": (
        "DeepSeek-V2, 2024",
        "the k best of a softmax in the {group_limit} best of {num_groups} groups of experts",
        "{balance_experts} of experts, {balance_devices} of groups, {balance_communication} of tokens sent to groups",
    ),
    "deepseek-v3": (
        "DeepSeek-V3, 2024",
        "the k best of sigmoid + bias in the {group_limit} best of {num_groups} groups; weights: sigmoids, divided",
        "as loss-free, {speed}; and {balance}·E/k · sum of f·P, of the sigmoids without bias",
    ),
}
"""(after whom, the rule, its balance loss), with its options' defaults in braces"""
EXPERTS = 16
K = {"gshard": 2, "switch": 1, "hierarchical": 4}
FREE = {"gshard": 'with `order="tokens"`'}
"""how a gate that leaks can be had without"""


def gates() -> Table:
    return ("`gate`", "after", "rule", "balance loss", "leaks", "an expert takes"), _gates()


def _gates() -> Iterator[tuple[str, ...]]:
    assert DESCRIPTIONS.keys() == GATES.keys()
    for name, (paper, rule, loss) in DESCRIPTIONS.items():
        known = {
            key: given.default
            for key, given in inspect.signature(gate_class(name)).parameters.items()
            if given.kind is given.KEYWORD_ONLY
        }
        gate = build_gate(name, 8, EXPERTS, K.get(name, 2))
        leaks = "no"
        if gate.leaks_future:
            leaks = f"**yes**; not {FREE[name]}" if name in FREE else "**yes**"
        yield f"`{name}`", paper, rule.format(**known), loss.format(**known), leaks, _room(name, known)


def _room(name: str, options: dict[str, Any]) -> str:
    if name.startswith("expert-choice"):
        return "exactly full"
    if "capacity_factor" not in options:
        return "all"
    factor = options["capacity_factor"]
    return "all, or `capacity_factor`" if factor is None else f"{factor:g} x its share"


def mixtures() -> Table:
    """Every named size with experts."""
    head = ("model", "layers with experts", "experts", "hidden size", "gate", "parameters", "active", "`model_type`")
    return head, _mixtures()


def _mixtures() -> Iterator[tuple[str, ...]]:
    for name, shape in model_config.SIZES.items():
        moe = shape.moe
        if moe is None:
            continue
        shared = f" + {moe.shared_ffn:,} shared" if moe.shared_ffn else ""
        active = shape.parameters - shape.idle_parameters
        yield (
            f"`{name}`",
            f"{shape.num_moe_layers} of {shape.layers}",
            f"{moe.k:g} of {moe.experts}",
            f"{moe.ffn:,}{shared}",
            f"`{moe.gate}`",
            _count(shape.parameters),
            _count(active),
            _their_type(shape),
        )


def _their_type(shape: ModelConfig) -> str:
    try:
        return f"`{hf_model_type(shape)}`"
    except ValueError:
        return "-"


def _count(parameters: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= unit:
            return f"{parameters / unit:.{1 if parameters < 100 * unit else 0}f}{name}"
    return str(parameters)


def their_names() -> Table:
    """Our names of the parameters of an MoE layer, and transformers'."""
    return ("ours", "Mixtral", "Qwen3-MoE", "DeepSeek-V3"), _their_names()


def _their_names() -> Iterator[tuple[str, ...]]:
    found: dict[str, dict[str, str]] = {}
    known = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")
    for name in known:
        shape = model_config.find_model(name)
        assert shape.moe is not None
        layer = shape.moe.dense_layers
        small = replace(shape, moe=replace(shape.moe, experts=1, k=1))
        for pair in param_mappings(small):
            for ours in pair.native:
                if ours.startswith(f"blocks.{layer}.mlp."):
                    cut = (re.sub(r"experts\.0\.", "experts.I.", theirs) for theirs in pair.hf)
                    texts = [f"`{theirs.removeprefix(f'model.layers.{layer}.')}`" for theirs in cut]
                    key = ours.removeprefix(f"blocks.{layer}.mlp.")
                    found.setdefault(f"`{key}`", {})[name] = ", ".join(texts)
    for ours, theirs in found.items():
        yield ours, *(theirs.get(name, "-") for name in known)


def measured() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return found


def compared() -> Table:
    """What bench/experts.py found: one model a row, means over seeds."""
    sizes = ("model", "feed-forward", "active", "of them router", "parameters")
    return (*sizes, "held out", "minus dense, by seed", "entropy", "max/mean", "dead"), _compared()


def _compared() -> Iterator[tuple[str, ...]]:
    found = measured()
    dense = {run["seed"]: run["held_out"] for run in found["runs"] if run["model"] == "dense"}
    for name, facts in found["models"].items():
        runs = [run for run in found["runs"] if run["model"] == name]
        if not runs:
            continue
        less = [f"{run['held_out'] - dense[run['seed']]:+.3f}" for run in runs if run["seed"] in dense]
        made = f"{facts['k']} of {facts['experts']} of {facts['ffn']}" if "gate" in facts else f"{facts['ffn']}"
        made += f" + {facts['shared']} shared" if facts.get("shared") else ""
        cells = [name, made, f"{facts['active']:,}", f"{facts['router']:,}", f"{facts['total']:,}"]
        cells += [f"{statistics.mean(run['held_out'] for run in runs):.3f}", "" if name == "dense" else " ".join(less)]
        if "gate" in facts:
            entropy = statistics.mean(statistics.mean(run["entropy_of_layers"]) for run in runs)
            cells += [f"{entropy:.3f}"]
            cells += [f"{statistics.mean(run[key][-1] for run in runs):.2f}" for key in ("most", "dead")]
        else:
            cells += ["", "", ""]
        yield tuple(cells)
