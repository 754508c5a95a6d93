"""The tables of the docs that the code knows better than a writer. `python docs/tables.py` writes them into the pages.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`. A test fails when a page and the code differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path

import activations
import adapter_states
import compressed
import gates
import goodput_table
import grids
import planner_accuracy
import saved_memory
import state_types
import techniques
import traffic
import update_rules
import verified_families

from echelon import models
from echelon.bench.measurement import Measurement
from echelon.bench.planner_comparison import read_steps as measured_steps
from echelon.bench.profile.min_bytes import min_bytes
from echelon.bench.reference_shapes import CUDA_SHAPES, REFERENCE_SHAPES
from echelon.config import schema
from echelon.config.run_config import Config
from echelon.layout import KEYS, Layout
from echelon.layout.collective import Collective
from echelon.layout.placement import ParamGroupSpec, group_params
from echelon.models.tp_splits import get_tp_split
from echelon.parallel.dp import cost as dp_cost
from echelon.parallel.dp import param_grouping
from echelon.parallel.dp import zero as shard
from echelon.parallel.tp import cost as tp_cost
from echelon.parallel.tp import tensor_parallel
from echelon.pipeline.actions import SENDS
from echelon.pipeline.lower import lower
from echelon.pipeline.schedules import FAMILIES, make_schedule, two_bw
from echelon.pipeline.simulate import simulate
from echelon.planning.priced_plan import price

DOCS = Path(__file__).parent
MARK = re.compile(r"(<!-- table: (?P<name>[\w ,=-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

MODEL, SEQ_LEN, COMPUTE, MASTER, MOMENTS = "gpt2-124m", 1024, 2, 4, 2
SIZES_OF = f"{MODEL} in bfloat16, AdamW, dp=8"
SCHEDULES: dict[str, tuple[str, str, str]] = {
    "naive": ("1 - 1/d", "1", "to see what the others improve on"),
    "gpipe": ("(d-1)/(m+d-1)", "m", "comparisons: `1f1b` is as fast and holds less"),
    "1f1b": ("(d-1)/(m+d-1)", "d-r", "the default: little memory, few transfers"),
    "interleaved": ("(d-1)/(v*m+d-1)", "(v+1)*d-2*r-1", "a smaller bubble for v times the transfers"),
    "zb-h1": ("(d-1)/(3*m+d-1)", "d", "a smaller bubble without more transfers"),
    "zb-v": ("(d-1)/(6*m+d-1)", "2*d", "the smallest bubble with the peak memory of 1F1B"),
    "dualpipe-v": ("(d-1)/(6*m+d-1)", "2*d+1", "as zb-v, with most backwards in one piece"),
    "terapipe": ("(d-1)/(s*m+d-1)", "s*m", "long sequences, few of them"),
}
"""(bubble, in flight on rank r, when to use it) with d ranks, v chunks, m microbatches (enough of them) and s slices"""
SLICES = 4
VERSIONS = {
    "pipedream": ("m - (d-1-s)", "every microbatch"),
    "pipedream-vsync": ("m - (d-1)", "every microbatch"),
    "2bw": ("m // k - 1", "every `accumulate` = k microbatches"),
}
"""(the version of the weights of microbatch m on stage s of d, at least 0; when they are updated)"""
RANKS, MICROBATCHES = 4, 8
PIPELINES = (
    "pp=4,accumulate=8",
    "pp=4,schedule=interleaved,accumulate=8",
    "pp=4,schedule=zb-h1,accumulate=8",
    "pp=4,schedule=zb-v,accumulate=8",
    "tp=2,pp=4,accumulate=8",
)
ZERO_LAYOUTS = ("dp=8", "dp=8,zero=1", "dp=8,zero=2", "dp=8,zero=3", "dp=8,shard=4")


@cache
def units(layout: Layout) -> tuple[ParamGroupSpec, ...]:
    """The flat units of the example model on a layout, from shapes alone."""
    from echelon.parallel.comm.mesh_axis import MeshAxis
    from echelon.parallel.transform_context import logical_params

    model = models.build(models.find_model(MODEL), "meta")
    entries = logical_params(model)
    names = param_grouping.choose_param_groups(model)
    if layout.tp > 1:
        axis = MeshAxis("tp", range(layout.tp), 0, None, frozenset())
        entries, _ = tensor_parallel.shard_modules(
            model, entries, get_tp_split(model), axis, sequence_parallel=bool(layout.sp)
        )
    return group_params(entries, names, layout.num_shards)


def states() -> list[tuple[str, dict[str, int]]]:
    """(layout, bytes by category) for each ZeRO stage, as the strategy's own cost function says."""
    found = []
    for text in ZERO_LAYOUTS:
        layout = Layout.parse(text)
        plan = shard.sharding_policy(layout)
        held = dp_cost.state_bytes(units(layout), plan, compute_bytes=COMPUTE, master_bytes=MASTER, moments=MOMENTS)
        found.append((text, held))
    return found


def types() -> str:
    parts = units(Layout.parse("dp=1,accumulate=2"))
    return markdown(("", "parameters", "master", "gradients", "moments", "sum"), state_types.rows(parts))


def costs(text: str) -> list[Collective]:
    """What one step of the example model issues on a layout: what `Engine.collectives` adds up."""
    layout = Layout.parse(text)
    plan, parts = shard.sharding_policy(layout), units(layout)
    found = list(
        dp_cost.collectives(parts, plan, accumulate=layout.accumulate, compute_bytes=COMPUTE, reduce_bytes=MASTER)
    )
    shape = models.find_model(MODEL)
    traffic = tp_cost.TransformerSizes(
        layers=shape.layers,
        width=shape.width,
        batch=layout.microbatch,
        seq_len=SEQ_LEN,
        dropout=shape.dropout > 0,
        element_bytes=COMPUTE,
        loss_bytes=MASTER,
    )
    return [
        *found,
        *tp_cost.collectives(traffic, layout),
        *tp_cost.partial_grad_collectives(parts, MASTER),
    ]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def layout_keys() -> str:
    rows = []
    for key in KEYS:
        rows.append((f"`{key.name}`", key.syntax.legal, key.default, key.meaning))
    return markdown(("key", "values", "default", "meaning"), rows)


def configuration_keys() -> str:
    rows = []
    for key in Config.keys():  # noqa: SIM118
        default = "" if key.default is None else f"`{schema.format_toml(key.default)}`"
        only = f" Only with `{key.condition_key}` = {' or '.join(key.only_with.values)}." if key.only_with else ""
        rows.append((f"`{key.name}`", key.legal, default, key.meaning + only))
    return markdown(("key", "values", "default", "meaning"), rows)


def state_bytes() -> str:
    kinds = ("parameters", "master", "gradients", "optimizer")  # without a pipeline there are no older versions
    rows = []
    for text, held in states():
        sizes = [f"{held[kind] / 2**20:,.0f}" for kind in kinds]
        rows.append((f"`{text}`", *sizes, f"{sum(held.values()) / 2**20:,.0f}"))
    return markdown(("layout", *kinds, "MiB per rank"), rows)


def collectives(*layouts: str) -> str:
    rows = []
    for text in layouts:
        groups: dict[tuple[str, str, str], list[Collective]] = {}
        for item in grids.costs(text, MODEL, SEQ_LEN, COMPUTE, MASTER) if "tp_kind" in text else costs(text):
            if item.count:
                groups.setdefault((item.op, item.axis, item.purpose), []).append(item)
        for (kind, axis, part), items in groups.items():
            times = sum(item.count for item in items)
            total = sum(item.count * item.bytes for item in items)
            hidden = sum(item.count * item.bytes for item in items if item.overlapped)
            share = "-" if not hidden else f"{hidden / total:.0%}"
            rows.append((f"`{text}`", kind.replace("_", "-"), axis, part, str(times), _size(total), share))
    return markdown(("layout", "collective", "axis", "of", "times", "bytes a step", "may hide"), rows)


def batch_statistics() -> str:
    shape = models.find_model("conv-tiny")
    items = list(
        dp_cost.sync_batchnorm_collectives([o for _, o in shape.convolutions], accumulate=1, element_bytes=MASTER)
    )
    times, total = sum(item.count for item in items), sum(item.count * item.bytes for item in items)
    row = (f"`{shape.name}`", "all-reduce", "dp", "batch statistics", str(times), _size(total))
    return markdown(("model", "collective", "axis", "of", "times", "bytes a step"), [row])


def schedules() -> str:
    rows = []
    for name, (bubble, held, when) in SCHEDULES.items():
        family = FAMILIES[name]
        chunks, slices = family.chunks or 2, SLICES if family.has_slices else 1
        sizes = {"slices": slices} if family.has_slices else {}
        for ranks, microbatches in ((2, 4), (3, 9), (RANKS, MICROBATCHES), (5, 20)):
            numbers = {"d": ranks, "v": chunks, "m": microbatches, "s": slices}
            assert family.bubble(ranks, chunks, microbatches, **sizes) == eval(
                bubble, {**numbers, "d": Fraction(ranks)}
            ), name
            said = tuple(eval(held, {**numbers, "r": rank}) for rank in range(ranks))
            assert family.in_flight(ranks, chunks, microbatches, **sizes) == said, name
        found = family.bubble(RANKS, chunks, MICROBATCHES, **sizes)
        most = max(family.in_flight(RANKS, chunks, MICROBATCHES, **sizes)) / (chunks * slices)
        cells = (f"`{name}`", str(family.chunks or "`vpp`"), *(f"{text.replace('*', '·')}" for text in (bubble, held)))
        rows.append((*cells, f"{float(found):.1%}", f"{most:g}", when))
    example = f"d = {RANKS}, m = {MICROBATCHES}"
    head = (
        "schedule",
        "chunks",
        "bubble",
        "in flight on rank r",
        f"bubble, {example}",
        "microbatches held",
        "use it for",
    )
    return markdown(head, rows)


def versions() -> str:
    rows = []
    for name, (rule, when) in VERSIONS.items():
        long = 6 * RANKS
        of = (
            two_bw.build(RANKS, 1, long, microbatches_per_update=RANKS)
            if name == "2bw"
            else make_schedule(name, RANKS, long)
        )
        for stage, actions in enumerate(of.rank_actions):
            numbers = {"d": RANKS, "s": stage, "k": RANKS}
            used = {action.index: action.version for action in actions if action.kind == "F"}
            assert all(version == max(0, eval(rule, {**numbers, "m": m})) for m, version in used.items()), name
        held = " ".join(map(str, simulate(of).weight_versions))
        rows.append((f"`{name}`", rule, held, when))
    head = ("schedule", "version for microbatch m", f"versions held by {RANKS} stages", "update")
    return markdown(head, rows)


def pipeline_transfers() -> str:
    rows, shape = [], models.find_model(MODEL)
    for text in PIPELINES:
        layout = Layout.parse(text)
        schedule = lower(make_schedule(layout.schedule, layout.pp, layout.accumulate, chunks=layout.vpp))
        sends = [sum(action.kind in SENDS for action in actions) for actions in schedule.rank_actions]
        positions = -(-SEQ_LEN // layout.tp) if layout.sp else SEQ_LEN
        size = layout.microbatch * positions * shape.width * COMPUTE
        cells = (" ".join(map(str, sends)), _size(size), _size(max(sends) * size))
        rows.append((f"`{text}`", *cells))
    return markdown(("layout", "sends of each pp rank", "bytes each", "most bytes sent by a rank"), rows)


def _size(count: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count} B"


def bench_shapes() -> str:
    rows = []
    for name in CUDA_SHAPES:
        shape, model = REFERENCE_SHAPES[name], REFERENCE_SHAPES[name].model
        sizes = (model.width, model.layers, model.heads, model.kv_heads, model.ffn, f"{model.vocab:,}")
        flops = f"{model.flops_per_token(shape.seq_len) / 1e9:.2f}"
        rows.append((f"`{name}`", *map(str, sizes), f"{shape.seq_len:,} x {shape.batch}", flops))
    return markdown(
        ("shape", "width", "layers", "heads", "kv heads", "ffn", "vocabulary", "tokens", "GFLOP per token"), rows
    )


def bench_measured() -> str:
    """What `echelon bench` and the same steps beside it found on one H200."""
    found = json.loads((DOCS.parent / "bench" / "measured" / "h200.json").read_text(encoding="utf-8"))
    rows = []
    for row in found["rows"]:
        ours = row["who"] == "echelon"
        rows.append(
            (
                f"`{row['shape']}`",
                f"{row['seq']:,} x {row['batch']}",
                row["precision"],
                f"**{row['who']}**" if ours else row["who"],
                row["recompute"],
                row["states"],
                f"{row['step_s'] * 1e3:,.0f} ms",
                f"{row['mfu']:.1%}",
                f"{row['peak_bytes'] / 2**30:.1f}",
                f"{row['first_step_s']:.0f} s" if row["first_step_s"] else "",
                f"{row['ratio']:.3f}" if row["ratio"] else "",
            )
        )
    head = (
        "shape",
        "tokens",
        "matmuls",
        "program",
        "recompute",
        "states",
        "step",
        "MFU",
        "GiB",
        "first step",
        "ratio",
    )
    return markdown(head, rows)


def own_steps(*names: str) -> str:
    """What the planner says of the steps of ours that were measured."""
    rows = []
    for step in (step for name in names for step in measured_steps(DOCS.parent / "bench" / "measured" / name)):
        plan = price(step.scenario)
        held = plan.memory.total - plan.memory.parts["reserve"]
        rows.append(
            (
                plan.scenario.shape.name,
                f"{plan.scenario.seq_len:,} x {plan.layout.batch}",
                step.precision,
                plan.layout.recompute,
                step.states,
                f"{step.seconds:.3f} s",
                f"{plan.seconds:.3f} s",
                f"{step.peak_bytes / 2**30:.1f} GiB",
                f"{held / 2**30:.1f} GiB",
            )
        )
    times, peaks = ("measured", "predicted"), ("peak, measured", "predicted")
    return markdown(("model", "tokens", "products", "recompute", "states", *times, *peaks), rows)


def fewest_bytes() -> str:
    """By part of a step, in GB, largest first."""
    found = {name: min_bytes(_request(name)) for name in CUDA_SHAPES}
    parts = sorted(found["1b"], key=lambda part: -sum(one[part] for one in found.values()))
    rows = [(part, *(f"{found[name][part] / 1e9:.1f}" for name in CUDA_SHAPES)) for part in parts if found["1b"][part]]
    rows.append(("together", *(f"{sum(found[name].values()) / 1e9:.1f}" for name in CUDA_SHAPES)))
    return markdown(("GB of a step, in bf16", *(f"`{name}`" for name in CUDA_SHAPES)), rows)


def context_kinds() -> str:
    head = ("layout", "collectives of a layer", "overlapped", "sent, a token and layer", "buffers")
    return markdown(head, traffic.kinds())


def context_reasons() -> str:
    return "".join(f"- {line}\n" for line in traffic.reasons())


def _request(name: str) -> Measurement:
    shape = REFERENCE_SHAPES[name]
    return Measurement(
        who="echelon", shape=name, size=shape.size, seq_len=shape.seq_len, batch=shape.batch, precision="bf16"
    )


TABLES: dict[str, Callable[[], str]] = {
    "types": types,
    "bench shapes": bench_shapes,
    "fewest bytes": fewest_bytes,
    "bench measured": bench_measured,
    "own steps": lambda: own_steps("h200.json", "h200-mixtures.json"),
    "small steps": lambda: own_steps("h200-small.json"),
    "accuracy in a sentence": planner_accuracy.sentence,
    "accuracy": lambda: markdown(*planner_accuracy.columns()),
    "own constants": lambda: markdown(*planner_accuracy.own_constants()),
    "columns of a table of runs": planner_accuracy.table_columns,
    "goodput": goodput_table.printed,
    "foreign families": lambda: markdown(*verified_families.columns()),
    "other families": lambda: markdown(*verified_families.other_columns()),
    "memory stack": lambda: markdown(*saved_memory.measured(saved_memory.STACKED)),
    "memory alone": lambda: markdown(*saved_memory.measured(saved_memory.ALONE)),
    "savings": lambda: markdown(*techniques.saved()),
    "layout keys": layout_keys,
    "configuration keys": configuration_keys,
    "state bytes": state_bytes,
    "adapter states": lambda: markdown(*adapter_states.held()),
    "batch statistics": batch_statistics,
    "recomputed": lambda: markdown(*activations.recomputed(MODEL, SEQ_LEN)),
    "kept over layers": lambda: markdown(*activations.kept_over_layers()),
    "offloaded": lambda: markdown(("layout", "bytes over the link", "bytes of disk"), traffic.offloaded()),
    "schedules": schedules,
    "versions of weights": versions,
    "transfers of pipelines": pipeline_transfers,
    "collectives of data parallelism": lambda: collectives("dp=4", "dp=4,accumulate=4"),
    "collectives of zero": lambda: collectives(*ZERO_LAYOUTS),
    "collectives of accumulation": lambda: collectives(*(f"dp=8,zero={zero},accumulate=4" for zero in (1, 2, 3))),
    "collectives of tensor parallelism": lambda: collectives("tp=2,sp=0", "tp=4,sp=0"),
    "collectives of sequence parallelism": lambda: collectives("tp=4,sp=0", "tp=4"),
    "kinds of context parallelism": context_kinds,
    "reasons for a kind": context_reasons,
    "optimizers": lambda: markdown(*update_rules.optimizers()),
    "gates": lambda: markdown(*gates.gates()),
    "mixtures": lambda: markdown(*gates.mixtures()),
    "names of experts": lambda: markdown(*gates.their_names()),
    "experts beside a dense model": lambda: markdown(*gates.compared()),
    "collectives of grids": lambda: collectives(*grids.LAYOUTS),
    "compression": lambda: markdown(*compressed.measured()),
    "collectives of recompute": lambda: collectives("tp=4", "tp=4,recompute=full", "tp=4,recompute=every:3"),
}


def written(text: str) -> str:
    """A page with every table as the code has it now."""
    return MARK.sub(lambda found: found[1] + TABLES[found["name"]]() + found[3], text)


def main() -> None:
    for page in (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        if (new := written(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"wrote the tables of {page.name}")


if __name__ == "__main__":
    main()
