"""Published runs as scenarios of the planner, with their measured times.

[Note: blank columns]

These rules fill blank columns from the other columns of a row, for every source.

    program             XLA on TPUs; PyTorch with ZeRO 3 or compiled; Megatron-LM with tp, pp or ep since Hopper
    layers              from the parameters, 12 x width^2 in each
    heads               width / 128, and as many key-value heads; with 64 experts or more: DeepSeek's latent
                        attention, if key-value heads are not stated
    feed-forward        4 x width without a gate, 8/3 x width with one
    vocabulary          51,200
    precision           fp16 before Ampere, bf16 since
    sequence parallel   with tp on Hopper and later, and in Megatron with flash attention; not before
    attention           fused softmax on Volta and in fp16 on Ampere; flash attention 2 on Ampere and where precision is
                        stated as PyTorch's amp; the vendor's kernel on Hopper and later
    recomputation       full where scores are written out and the model is larger than 4 devices can hold, else none
    ZeRO                1 where dp > 1 on Ampere and later, 0 on Volta
    microbatch          1
    gradients           32 bits on Hopper and later and in fp16 on Ampere; 16 bits on Volta, in bf16 on Ampere, and
                        where they are scattered every microbatch
    chunks              on Hopper and later as many as divide a rank's layers, at most 5; before, 1
    schedule            interleaved where vpp > 1, 1F1B otherwise
    devices per node    8
    imbalance           1: MoE benchmarks balance their tokens
    all-to-all          overlapped with the compute of another microbatch if a text says so, else a share of it exposed
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from echelon.input_file import InputFileError, read_text
from echelon.layout import Layout
from echelon.layout.layout import DERIVED
from echelon.layout.validation_error import ValidationError
from echelon.models.attention_config import MLAConfig
from echelon.models.model_spec import ModelSpec, MoESpec
from echelon.planning.calibrate.best_choice import best_choice
from echelon.planning.calibrate.programs import reduced_gradient_bytes
from echelon.planning.calibrate.row_texts import (
    device_kind,
    gemm_precision,
    link_bandwidth,
    named_program,
    pairs_microbatches,
)
from echelon.planning.cluster.cluster import DISK_BANDWIDTH, HOST_MEMORY, Cluster, NodeGroup
from echelon.planning.cluster.device_kinds import GIB, DeviceKind
from echelon.planning.cost.expert_traffic import choose_ep_inner
from echelon.planning.model.model_shape import ModelShape
from echelon.planning.model.transformer_shape import transformer_shape
from echelon.planning.scenario import SCORE_WRITING_KERNELS, Scenario

COUNTS_RECOMPUTE = r"(incl|count)\w*\.? (the )?recomput|factor 4"
"""what notes say of FLOPs that count recomputation"""
DEEPSEEK = MLAConfig(query_rank=1536, kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128)
SCHEDULES = {name: name for name in ("1f1b", "zb-v", "gpipe")}
SCHEDULES |= {"interleaved-1f1b": "interleaved", "zb-1p": "zb-h1", "zb-2p": "zb-v"}


MAX_CELL, MAX_LAYERS, MAX_MICROBATCHES = 1e12, 10_000, 100_000
REQUIRED_COLUMNS = ("source_id", "hidden", "seq_len", "gpu", "gpus", "tp", "pp", "global_batch")


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    source: str
    scenario: Scenario
    seconds: float
    """of a step, as measured; 0: not stated, or out of memory"""
    peak_bytes: float
    """as measured; 0: not stated"""
    out_of_memory: bool
    group: str
    """runs with the same differ only in layout and kernel"""
    assumed: Mapping[str, int | str] = field(default_factory=dict)
    """what the row leaves out: its program, its links, and keys of the layout as the best legal choice has them"""


class UnusableRowError(ValueError):
    """A row that cannot be predicted, with the reason."""


def read_runs(path: Path | str) -> list[Mapping[str, str]]:
    try:
        rows = list(csv.DictReader(io.StringIO(read_text(path), newline="")))
    except (InputFileError, csv.Error) as error:
        reason = f"{error}" if isinstance(error, InputFileError) else f"{path} cannot be read ({error})"
        raise ValueError(f"the table {reason}; give a CSV file") from error
    missing = [name for name in REQUIRED_COLUMNS if rows and name not in rows[0]]
    if missing or not rows:
        raise ValueError(f"the table lacks {', '.join(missing) or 'rows'} ({path}); docs/planning.md names its columns")
    # A row with fewer cells than the header has None for the others, and one with more has a list.
    return [{key: value for key, value in row.items() if key and value is not None} for row in rows]


def parse_run(row: Mapping[str, str]) -> PublishedRun:
    """Parse a row. Raises `UnusableRowError` with the reason if it cannot be predicted."""
    get = _RowCells(row)
    note = row.get("note", "").lower()
    if "lora" in note or "sft" in note:
        raise UnusableRowError("fine-tuning")
    if "proxy" in row.get("model_name", "").lower() or "truncated" in note:
        raise UnusableRowError("a truncated model")
    missing = [key for key in ("hidden", "seq_len", "gpus", "global_batch", "tp", "pp") if not get.number(key)]
    missing += ["layers"] if not (get.number("layers") or get.number("params_b")) else []
    if missing:
        raise UnusableRowError(f"no {missing[0]}")
    device = device_kind(row["gpu"])
    if device is None:
        raise UnusableRowError(f"a device that is not known ({row['gpu']})")
    precision = gemm_precision(row.get("precision", ""), device)
    modern = device.generation not in ("volta", "ampere")
    tp, pp, cp = get.integer("tp", 1), get.integer("pp", 1), get.integer("cp", 1)
    dp = get.integer("dp", max(1, get.integer("gpus", 1) // (tp * pp * cp)))
    program, assumed = _program(row, get, device)
    schedule = SCHEDULES.get(row.get("schedule", "").lower(), "")
    vpp = get.integer("vpp", 2 if schedule == "interleaved" else 1)
    microbatch, batch = get.integer("micro_batch", 1), get.integer("global_batch", 1)
    if max(tp, pp, cp, vpp) > MAX_LAYERS or batch // (dp * microbatch) > MAX_MICROBATCHES:
        raise UnusableRowError("more ranks or microbatches than a run has")
    attention = _attention(row, device, precision)
    has_sp = modern or (program == "megatron" and attention not in SCORE_WRITING_KERNELS)
    if program == "megatron" and attention in SCORE_WRITING_KERNELS:
        program = "megatron-2021"
    cluster, assumed_links = _cluster(row, device, get)
    shape = _shape(get, row)
    oom = row["source_id"].endswith("_oom") or note.startswith("oom")
    is_large = attention in SCORE_WRITING_KERNELS and shape.parameters * 18 > 4 * device.memory
    recompute = row.get("recompute", "") or ("full" if is_large else "none")
    zero = get.integer("zero_stage", 1 if dp > 1 and device.generation != "volta" else 0, zero=True)
    schedule = schedule or ("interleaved" if vpp > 1 else "1f1b")
    sharded = dp if zero < 3 or not (hybrid := _shards(note, dp, cluster.per_node)) else hybrid
    layout = Layout(
        dp=dp,
        shard=sharded if zero else DERIVED,
        zero=zero,
        tp=tp,
        pp=pp,
        cp=cp,
        sp=int(bool(get.integer("sequence_parallel", int(has_sp), zero=True)) and tp > 1),
        ep=(ep := get.integer("ep", 1) if shape.experts else 1),
        ep_inner=choose_ep_inner(cluster, ep, shape.top_k) if modern else 1,
        schedule=schedule,
        vpp=2 if schedule in ("zb-v", "dualpipe-v") else vpp if schedule == "interleaved" else 1,
        microbatch=microbatch,
        accumulate=max(1, round(batch / (dp * microbatch))),
        recompute=recompute if recompute in ("none", "full", "selective") else "full",
    )
    scenario = Scenario(
        shape=shape,
        cluster=cluster,
        layout=layout,
        seq_len=get.integer("seq_len", 1),
        precision=precision,
        attention_kernel=attention,
        fused_norms=_fuses_norms(row.get("kernel", ""), program),
        program=program,
        pairs_microbatches=pairs_microbatches(row),
        imbalance=1.0,
        reduce_bytes=_reduce_bytes(note, zero, precision, program, device),
    )
    scenario, chosen = best_choice(scenario, _blank_keys(row, scenario), batch // dp)
    seconds = 0.0 if oom else _seconds(get, shape, note, device.peak("bf16"))
    if not oom and not seconds:
        raise UnusableRowError("no time")
    group = ("model_name", "gpu", "gpus", "seq_len", "global_batch", "precision")
    return PublishedRun(
        source=row["source_id"].removesuffix("_oom"),
        scenario=scenario,
        seconds=seconds,
        peak_bytes=get.number("peak_mem_gib") * GIB,
        out_of_memory=oom,
        group="/".join(row.get(key, "") for key in group),
        assumed=assumed | assumed_links | chosen,
    )


def _blank_keys(row: Mapping[str, str], scenario: Scenario) -> list[str]:
    """Keys of the layout that a row leaves out and its program has a choice of."""
    layout, generation = scenario.layout, scenario.cluster.device.generation
    interleaves = (
        layout.pp > 1
        and scenario.program in ("megatron", "torch", "torch-compiled")
        and generation not in ("volta", "ampere")
    )
    choices = {
        "microbatch": not row.get("micro_batch"),
        "recompute": not row.get("recompute"),
        "vpp": interleaves and not row.get("vpp") and not row.get("schedule"),
        "offload": scenario.program == "megatron"
        and not row.get("recompute")
        and generation in ("hopper", "blackwell"),
        "zero": not row.get("zero_stage") and layout.dp > 1 and generation != "volta",
    }
    return [key for key, is_open in choices.items() if is_open]


def _reduce_bytes(note: str, zero: int, precision: str, program: str, device: DeviceKind) -> int:
    """Bytes of a gradient that is reduced."""
    if "fp32 grad" in note:
        return 4
    if zero >= 2 or device.generation == "volta":
        return 2
    if device.generation == "ampere":
        return 4 if precision == "fp16" else 2
    return reduced_gradient_bytes(program, device.generation)


def parse_runs(rows: Iterable[Mapping[str, str]]) -> tuple[list[PublishedRun], dict[str, int]]:
    """The usable runs, and counts of the others by reason."""
    runs: list[PublishedRun] = []
    skipped: dict[str, int] = {}
    for row in rows:
        try:
            runs.append(parse_run(row))
        except UnusableRowError as reason:
            skipped[str(reason)] = skipped.get(str(reason), 0) + 1
        except ValidationError as error:
            reason_text = f"{error.issues[0].key}={error.issues[0].value} {error.issues[0].message}"
            skipped[reason_text] = skipped.get(reason_text, 0) + 1
    return runs, skipped


@dataclass(frozen=True)
class _RowCells:
    row: Mapping[str, str]

    def number(self, key: str) -> float:
        """0 where it is blank."""
        try:
            value = float(self.row.get(key) or 0)
        except ValueError:
            raise UnusableRowError(f"{key} is not a number") from None
        if not 0 <= value <= MAX_CELL:
            raise UnusableRowError(f"{key} is out of range")
        return value

    def integer(self, key: str, default: int, *, zero: bool = False) -> int:
        """`zero`: 0 is a value too."""
        if not self.row.get(key):
            return default
        return int(self.number(key)) if zero else int(self.number(key)) or default


def _cluster(row: Mapping[str, str], device: DeviceKind, get: _RowCells) -> tuple[Cluster, dict[str, int | str]]:
    """The cluster of a row, and what was assumed of it."""
    devices = get.integer("gpus", 1)
    per_node = device.nvlink_domain if device.nvlink_domain > 8 else get.integer("gpus_per_node", 8)
    if stated := re.search(r"nvlink domain (\d+)", row.get("note", "").lower()):
        per_node = int(stated[1])
    per_node = min(per_node, devices)
    text = row.get("inter_node_bw", "")
    node = link_bandwidth(text, min(per_node, 8))
    outside = replace(device.inter_node, bandwidth=node / min(per_node, 8)) if node else device.inter_node
    cluster = Cluster(
        name=f"{devices}x{device.name}",
        node_groups=(NodeGroup(device=device, nodes=max(1, round(devices / per_node)), per_node=per_node),),
        intra_node=device.intra_node,
        inter_node=outside,
        host_memory=HOST_MEMORY,
        disk_bandwidth=DISK_BANDWIDTH,
    )
    unread = text and not node and devices > per_node
    return cluster, {"inter_node_bw": f"{device.inter_node.bandwidth * 8 / 1e9:g} Gb/s per device"} if unread else {}


def _program(row: Mapping[str, str], get: _RowCells, device: DeviceKind) -> tuple[str, dict[str, int | str]]:
    """The program that a row names, or that its device and layout are usual for, and what was assumed."""
    named = named_program(row)
    program = named or _usual_program(get, device)
    if program == "torch" and row.get("compile") == "1":
        program = "torch-compiled"
    return program, {} if named else {"program": program}


def _usual_program(get: _RowCells, device: DeviceKind) -> str:
    """The program that most runs of a device and layout are of.

    TPUs run XLA; what is compiled is PyTorch's, and ZeRO 3 is its FSDP; since Hopper, layers that are split otherwise
    are Megatron-LM's, or NeMo's on top of it. Before, several programs split them, and all have data parallelism alone.
    """
    if device.generation == "tpu":
        return "xla"
    if get.integer("zero_stage", 0) == 3 or get.integer("compile", 0):
        return "torch"
    is_split = max(get.integer(key, 1) for key in ("tp", "pp", "ep")) > 1
    return "megatron" if is_split and device.generation not in ("volta", "ampere") else "unknown"


def _shards(note: str, dp: int, per_node: int) -> int:
    """Ranks that share the parameters, where a note says that not all do; 0 where it does not."""
    if stated := re.search(r"fsdp=(\d+)", note):
        return int(stated[1]) if 1 < int(stated[1]) < dp and dp % int(stated[1]) == 0 else 0
    return per_node if "hsdp" in note and per_node < dp and dp % per_node == 0 else 0


def _attention(row: Mapping[str, str], device: DeviceKind, precision: str) -> str:
    stated, kernel = row.get("flash_attention", ""), row.get("kernel", "")
    if kernel == "torch":
        return "plain"
    if "v1" in kernel:
        return "flash1"
    old = device.generation == "volta" or (device.generation == "ampere" and precision == "fp16")
    if stated == "0" or (not stated and old):
        return "fused"
    # Frameworks of FSDP came with flash attention 2; Megatron and NeMo with the vendor's kernels from Hopper on.
    return "flash2" if device.generation == "ampere" or row.get("precision", "").startswith("amp") else "best"


def _fuses_norms(kernel: str, program: str) -> bool:
    """Whether a norm is one kernel: not where a source names attention kernels alone, and compiles nothing."""
    return program == "torch-compiled" or "RMS" in kernel or not kernel.startswith(("flash", "torch"))


def _shape(get: _RowCells, row: Mapping[str, str]) -> ModelShape:
    width, gated = get.integer("hidden", 1), row.get("gated_mlp") == "1"
    inside = get.number("params_b") * 1e9 - get.integer("vocab", 51200) * width
    layers = get.integer("layers", max(1, round(inside / (12 * width**2))))
    experts = get.integer("experts", 0)
    heads = get.integer("heads", max(1, width // 128))
    if layers > MAX_LAYERS or heads > width:
        raise UnusableRowError("more layers or heads than a model has")
    mla = DEEPSEEK if experts >= 64 and not row.get("kv_heads") else None
    ffn = get.integer("ffn_hidden", int(width * 8 / 3) if gated else 4 * width)
    expert_ffn, dense_layers = get.integer("expert_ffn", ffn), 3 if mla and layers > 3 else 0
    moe = MoESpec(
        experts=experts,
        top_k=get.integer("top_k", 2),
        ffn=expert_ffn,
        gated=gated,
        shared_ffn=expert_ffn if mla else 0,
        layers=tuple(layer >= dense_layers for layer in range(layers)),
    )
    spec = ModelSpec(
        name=row.get("model_name", ""),
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=get.integer("kv_heads", heads),
        head_dim=128 if experts >= 64 and mla is None else width // heads,
        ffn=ffn,
        gated_mlp=gated,
        vocab=get.integer("vocab", 51200),
        biases=not gated,
        mla=mla,
        moe=moe if experts else None,
    )
    return transformer_shape(spec)


def _seconds(get: _RowCells, shape: ModelShape, note: str, peak: float) -> float:
    """Of a step: stated, or from tokens per second, or from FLOPs, which sources count with full attention."""
    if get.number("step_time_s"):
        return get.number("step_time_s")
    tokens = get.number("global_batch") * get.number("seq_len")
    if get.number("tokens_per_s_per_gpu"):
        return tokens / (get.number("tokens_per_s_per_gpu") * get.number("gpus"))
    if get.number("tflops_per_gpu"):
        seq_len = int(get.number("seq_len"))
        attention = sum(n * layer.attention.flops(seq_len) for layer, n in shape.layers if layer.attention)
        counted = 3 * (shape.flops(seq_len) + attention) * (4 / 3 if re.search(COUNTS_RECOMPUTE, note) else 1)
        return tokens * counted / (get.number("tflops_per_gpu") * 1e12 * get.number("gpus"))
    if get.number("mfu"):
        flops = tokens * 3 * (shape.flops(int(get.number("seq_len"))))
        return flops / (get.number("mfu") * peak * get.number("gpus"))
    return 0.0
