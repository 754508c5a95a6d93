"""What the free texts of a published run mean: its device, its links, its program, its precision."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from echelon.planning.cluster.device_kinds import DEVICE_KINDS, GIB, DeviceKind

_SEPARATOR = r"[\s_-]*"
_SUFFIX = r"(?![a-z])|(?=gb|sxm|pcie|hbm|nvl|gcd)"
"""what may follow a device's name without a separator"""
STATED_MEMORY = 0.05
"""share by which a memory that a name states must differ from the kind's to count: sources round"""


def device_kind(gpu: str) -> DeviceKind | None:
    """The kind whose name stands in a text as a word of its own, with the watts and memory that the text states."""
    text = gpu.lower()
    if stated := re.search(r"-(\d+)w\b", text):
        kind = device_kind(text.replace(stated[0], ""))
        return replace(kind, watts=float(stated[1])) if kind is not None else None
    named = [kind for kind in DEVICE_KINDS if kind != "cpu" and re.search(_name_pattern(kind), text)]
    if not named and re.search(rf"(?<![a-z0-9])a[18]00({_SUFFIX})", text):
        named = ["a100-40" if re.search(r"(?<!\d)40", text) else "a100-80"]
    if not named:
        return None
    kind = DEVICE_KINDS[max(named, key=len)]
    stated_gib = re.search(r"(?<!\d)(\d+)\s*gi?b", text)
    if stated_gib and abs(int(stated_gib[1]) * GIB / kind.memory - 1) > STATED_MEMORY:
        return replace(kind, memory=int(stated_gib[1]) * GIB)
    return kind


def _name_pattern(kind: str) -> str:
    parts = re.findall(r"[a-z]+|\d+", kind)
    end = r"(?!\d)" if parts[-1].isdigit() else ""
    return rf"(?<![a-z0-9]){_SEPARATOR.join(parts)}{end}({_SUFFIX})"


_BANDWIDTH = re.compile(
    r"(?:(?P<count>\d+)\s*(?:[x×*]|(?i:nics?|adapters?|hcas?|links?|ports?)\b(?:\s*(?:of|at|with|,|:))?)\s*)?"
    r"(?P<size>\d+(?:\.\d+)?)\s*(?P<scale>[GTgt])"
    r"(?P<unit>[Bb]ytes?|B|bits?|b[eE]?|igabits?|[eE])?(?:/s(?:ec)?\b|ps\b|/second|\b)",
)
_PER_DEVICE = r"(?:\bper|/|\beach|\bevery|\ba)\s*(?:gpu|gcd|chip|accelerator|card|device|npu|tpu)\b"
_ADAPTERS = {"edr": 100, "hdr": 200, "ndr": 400, "xdr": 800}
"""Gb/s of an InfiniBand adapter by its generation"""


def link_bandwidth(text: str, per_node: int) -> float:
    """Bytes per second of a node's links to others; 0 if the text does not say.

    It may be stated of a device or of a node, in bits or bytes. A count of adapters is that of a node, whatever
    follows: "8x400 Gb/s, one per GPU".
    """
    lower = text.lower()
    if found := _BANDWIDTH.search(text):
        unit = found["unit"] or ""
        in_bytes = unit.startswith(("B", "byte"))
        size = float(found["size"]) * (1e12 if found["scale"] in "Tt" else 1e9) / (1 if in_bytes else 8)
        if found["count"]:
            return size * int(found["count"])
        return size * per_node if re.search(_PER_DEVICE, lower) else size
    if counted := re.search(r"(\d+)\s*(?:x|×)?\s*(edr|hdr|ndr|xdr)\b", lower):
        return int(counted[1]) * _ADAPTERS[counted[2]] * 1e9 / 8
    if counted := re.search(r"(?:(\d+)\s*(?:x|×)?\s*)?omni-?path", lower):
        return int(counted[1] or 1) * 12.5e9
    return 0.0


PROGRAM_WORDS = (
    ("torch", r"\bauto ?model\b"),
    ("xla", r"\bmaxtext\b|\bjax(toolbox)?\b|\bxla\b|\bpax(ml)?\b|\blevanter\b|\beasylm\b"),
    ("deepspeed", r"deepspeed|neox\b|\bbigscience\b"),
    ("megatron", r"\bmegatron\b(?! (formula|convention|paper))|\bnemo\b|\bmindspeed\b|\bmegascale\b|\bmodellink\b"),
    (
        "torch",
        r"\btorchtitan\b|\bfsdp2?\b(?!=)|\bhsdp\b|\bnanotron\b|\bddp\b|nanogpt\b|\blightning\b|\blitgpt\b|\baccelerate\b",
    ),
    ("megatron", r"\bdgxc\b|\bdgx[ -]cloud\b"),  # recipes of NeMo, but for those that name another
)
"""names of programs, and of projects that train with one alone, as sources write them; the first line that matches
counts"""


def named_program(row: Mapping[str, str]) -> str:
    """The program that a row states or whose name its texts have; empty if none."""
    if row.get("program"):
        return row["program"]
    text = " ".join(row.get(key, "") for key in ("source_id", "source", "note")).lower().replace("_", " ")
    return next((program for program, words in PROGRAM_WORDS if re.search(words, text)), "")


_PAIRED = (
    r"(?<!no )(?<!without )\b(?:dualpipe|1f1b-overlap(?!-)|(?:ep|moe|a2a|ep-a2a|moe-a2a)-overlap|overlap-moe-expert)"
)
"""how sources write that all-to-alls are overlapped with the compute of another microbatch; their words, joined"""


def pairs_microbatches(row: Mapping[str, str]) -> bool:
    """Whether a row says that all-to-alls of experts are overlapped with the compute of another microbatch."""
    text = " ".join(row.get(key, "") for key in ("schedule", "kernel", "note")).lower()
    return bool(re.search(_PAIRED, re.sub(r"(?<=[a-z0-9])[ _](?=overlap|a2a|moe|expert)", "-", text)))


def gemm_precision(text: str, device: DeviceKind) -> str:
    """The dtype of the GEMMs, from what a source writes: bf16+float8 rowwise, FP8-MX, NVFP4, amp_bf16."""
    lower = text.lower().replace("float", "fp")
    if "rowwise" in lower:  # torch's GEMMs with a scale for each row gained nothing over bf16
        return "bf16"
    found = next((name for name in ("fp4", "fp8", "bf16", "fp16") if name in lower), "")
    return found or ("fp16" if device.generation == "volta" else "bf16")
