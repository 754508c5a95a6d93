"""A model whose states do not fit one GPU: what a step takes with its host beside it, and what the least would be.

    python bench/offload.py                                       13B: 40 layers of width 5120, 16 sequences of 4096
    python bench/offload.py --layers 52 --accumulate 1            larger models, gradients of one microbatch
    python bench/offload.py --model llama-8b --offload params     a named size, parameters paged too
    python bench/offload.py --device cpu --model llama-tiny --seq 32 --accumulate 2 --dtype float32       anywhere

It prints what the link reaches each way, what the host updates in a second, the floor of compute (forward and backward
of small models of the same width that are on the device, by layer); before the run, the step that follows from these
three, and what the planner says of step and memory; then what both are, the bytes that crossed, and the ratio to

    max(floor of compute, bytes that cross one way / what the link reaches that way)
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from echelon import models
from echelon.config.sections import OptimizerConfig
from echelon.layout import Layout
from echelon.memory.offload import cost as offload_cost
from echelon.memory.offload.host_transfer import DOWN, UP, HostLink
from echelon.models import model_config
from echelon.models.layers import check_loss_output
from echelon.models.model_config import ModelConfig
from echelon.optim import cost
from echelon.optim.torch_rules import build_torch_optimizer
from echelon.parallel.dp.offload_policy import available_host_bytes
from echelon.parallel.parallel_options import ParallelOptions
from echelon.planning.cluster.cluster import local_cluster
from echelon.planning.cost.memory_model import stage_memory
from echelon.planning.model.model_sources import config_shape
from echelon.planning.priced_plan import price
from echelon.planning.scenario import NUM_MOMENTS, Scenario
from echelon.training import step_comm_volume
from echelon.training.engine import Engine, Microbatch
from echelon.training.run.prediction import scenario_transient_bytes

GIB = 1 << 30
LLAMA_13B = ModelConfig(
    name="llama-13b",
    family="llama",
    layers=40,
    width=5120,
    heads=40,
    kv_heads=40,
    ffn=13824,
    vocab=32000,
    max_seq_len=4096,
)


@dataclass(frozen=True)
class Question:
    """What is asked of the machine."""

    shape: ModelConfig
    seq: int
    layout: str
    offload: str
    options: ParallelOptions
    rule: OptimizerConfig
    steps: int

    def engine(self, shape: ModelConfig, offload: str) -> Engine:
        layout = self.layout + (f",offload={offload}" if offload != "none" else "")
        engine = Engine(models.build(shape, "meta"), layout, self.rule, clip=1.0, options=self.options)
        engine.model.train()
        return engine

    def case(self, host: float | None) -> Scenario:
        """As the planner sees it."""
        return Scenario(
            shape=config_shape(self.shape),
            cluster=local_cluster(),
            layout=Layout.parse(f"{self.layout},offload={self.offload}"),
            seq_len=self.seq,
            precision={torch.bfloat16: "bf16", torch.float32: "fp32"}[self.options.compute_dtype],
            moment_bytes=cost.state_bytes_per_element(self.rule) / NUM_MOMENTS,
            host_share=host,
        )

    def batch(self) -> dict[str, torch.Tensor]:
        rows = Layout.parse(self.layout).batch
        ids = torch.randint(0, self.shape.vocab, (rows, self.seq + 1), generator=torch.Generator().manual_seed(0))
        return {"tokens": ids[:, :-1], "targets": ids[:, 1:].contiguous()}


def main() -> None:
    asked = _arguments()
    question = _question(asked)
    device = question.options.device
    found: dict[str, Any] = {"model": question.shape.name, "layers": question.shape.layers}
    found["parameters"] = sum(p.numel() for p in models.build(question.shape, "meta").parameters())
    tell("model", f"{question.shape.layers} layers, {found['parameters'] / 1e9:.2f}B parameters, {question.layout}")
    found |= link_speed(device, asked.probe)
    tell("link", f"down {found['down'] / 1e9:.1f} GB/s, up {found['up'] / 1e9:.1f}, at once {found['both'] / 1e9:.1f}")
    found["updates"] = host_updates(question, asked.probe // 16)
    words = f"{torch.get_num_threads()} threads, {available_host_bytes() / GIB:.1f} GiB available"
    tell("host", f"updates {found['updates'] / 1e9:.2f} billion parameters a second; {words}")
    found["floor_s"] = floor(question)
    tell("floor", f"{found['floor_s']:.3f} s of compute a step, from small models on the device")
    _release(device)

    begun = time.perf_counter()
    if not asked.working:  # what the planner says comes and goes
        question = replace(
            question,
            options=replace(question.options, working_bytes=scenario_transient_bytes(question.case(asked.host))),
        )
    engine = question.engine(question.shape, asked.offload)
    _describe(engine, found)
    tell("start", f"{time.perf_counter() - begun:.1f} s")
    found["predicted_s"] = predicted(found)
    found |= planned(question, found["share"])
    tell("predicted", f"{found['predicted_s']:.3f} s a step from link, host and floor")
    words = f"{found['planner_s']:.3f} s a step, {found['planner_bytes'] / GIB:.2f} GiB of the device"
    tell("planner", f"{words}, {found['working'] / GIB:.2f} of them for what comes and goes")
    found |= measured(engine, question)
    _conclude(found, device)
    if asked.json:
        print(json.dumps(found))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a named size; empty: a Llama of 13B, changed by the keys below")
    for name in ("layers", "width", "heads", "kv-heads", "ffn", "vocab"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--microbatch", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=16)
    parser.add_argument("--offload", default="optimizer")
    parser.add_argument("--states", default="float32", help="type of the moments: float32, bfloat16, int8")
    parser.add_argument("--recompute", default="full")
    parser.add_argument("--host", type=float, default=None, help="share of the states; as few as possible by default")
    parser.add_argument("--working", type=float, default=0.0, help="GiB of the device for activations")
    parser.add_argument("--disk", default="")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=3, help="measured, after one that allocates")
    parser.add_argument("--probe", type=int, default=GIB, help="bytes of a copy that is timed")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if asked.device == "cpu":
        asked.probe = min(asked.probe, 1 << 24)
    if asked.threads:
        torch.set_num_threads(asked.threads)
    return asked


def _question(asked: argparse.Namespace) -> Question:
    shape = model_config.find_model(asked.model) if asked.model else LLAMA_13B
    given = {name: getattr(asked, name) for name in ("layers", "width", "heads", "kv_heads", "ffn", "vocab")}
    shape = replace(shape, max_seq_len=max(shape.max_seq_len, asked.seq), **{k: v for k, v in given.items() if v})
    options = ParallelOptions(
        device=torch.device(asked.device),
        compute_dtype=getattr(torch, asked.dtype),
        master_dtype=torch.float32,
        host_share=asked.host,
        working_bytes=int(asked.working * GIB),
        disk_dir=asked.disk,
    )
    layout = f"dp=1,microbatch={asked.microbatch},accumulate={asked.accumulate},recompute={asked.recompute}"
    rule = OptimizerConfig(lr=1e-4, weight_decay=0.1, states=asked.states)
    return Question(shape, asked.seq, layout, asked.offload, options, rule, asked.steps)


def tell(name: str, words: str) -> None:
    print(f"{name:<10} {words}", flush=True)


# -- before the run ---------------------------------------------------------------------------------------------------


def link_speed(device: torch.device, nbytes: int, times: int = 8) -> dict[str, float]:
    """Bytes a second between locked memory and the device: each way alone, and both at once, added up."""
    link = HostLink(device)
    rooms = [link.empty_pinned(nbytes, torch.uint8) for _ in range(2)]
    there = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    ways = {"down": (True, False), "up": (False, True), "both": (True, True)}
    found = {}
    for name, (down, up) in ways.items():
        for repeat in range(times + 1):
            if repeat == 1:
                _wait(device)
                begun = time.perf_counter()
            moving = [link.copy_to_host(there[0], rooms[0], "probe")] if down else []
            moving += [link.copy_to_device(rooms[1], there[1], "probe")] if up else []
            for one in moving:
                one.synchronize()
        found[name] = times * nbytes * (down + up) / (time.perf_counter() - begun)
    return found


def host_updates(question: Question, count: int) -> float:
    """Parameters a second: torch's fused AdamW on the host, the cast that follows it, and one that goes before it where
    gradients leave early.
    """
    weights, short = torch.randn(count), torch.randn(count).bfloat16()
    weights.grad = torch.randn(count)
    optimizer = build_torch_optimizer(question.rule, {"weights": weights}, fused=True)
    early = Layout.parse(question.layout).accumulate == 1 and not offload_cost.offloads_params(question.offload)
    seconds = []
    for _ in range(4):
        begun = time.perf_counter()
        if early and question.options.compute_dtype != torch.float32:
            weights.grad.copy_(short)
            weights.grad.mul_(0.5)
        optimizer.step()
        short.copy_(weights)
        seconds.append(time.perf_counter() - begun)
    return count / min(seconds[1:])


def floor(question: Question) -> float:
    """Seconds of forward and backward a step: two small models on the device, and from them one of all the layers."""
    few = [min(question.shape.layers, layers) for layers in (2, 6)]
    times = [_compute(question, replace(question.shape, layers=layers)) for layers in few]
    if few[0] == few[1]:
        return times[0]
    each = (times[1] - times[0]) / (few[1] - few[0])
    return times[0] + each * (question.shape.layers - few[0])


def _compute(question: Question, shape: ModelConfig) -> float:
    """Seconds of compute per step: of two microbatches after a warm-up, times half the microbatches of a step."""
    engine, device = question.engine(shape, "none"), question.options.device
    microbatches = list(engine.microbatches(question.batch()))
    for number in range(3):
        if number == 1:
            _wait(device)
            begun = time.perf_counter()
        _pass(engine, microbatches[number % len(microbatches)], first=number == 0)
    _wait(device)
    seconds = (time.perf_counter() - begun) / 2 * len(microbatches)
    del engine, microbatches
    _release(device)
    return seconds


def _pass(engine: Engine, microbatch: Microbatch, *, first: bool) -> None:
    """Forward and backward, and no update."""
    engine.parallel.sharded_model.begin_microbatch(first=first, last=False)
    total, _ = check_loss_output(engine.model(**engine.prepare(microbatch)))
    total.backward()
    engine.parallel.sharded_model.end_microbatch()


def planned(question: Question, share: float) -> dict[str, float]:
    """By the planner, with the share of the states that is away: the allocator sees no reserve."""
    case = question.case(share)
    parts = stage_memory(case, 0).parts
    total = sum(size for name, size in parts.items() if name != "reserve")
    return {"planner_s": price(case).seconds, "planner_bytes": total, "working": question.options.working_bytes}


def predicted(found: dict[str, Any]) -> float:
    """Compute, or the link where that takes longer; and the host's update, less the forward that runs beside it."""
    crossing = max(found["bytes_down"] / found["down"], found["bytes_up"] / found["up"])
    update = found["updated"] / found["updates"]
    beside = found["floor_s"] / found["microbatches"] / 4 * (1 - found["share"])
    return max(found["floor_s"], crossing) + max(0.0, update - beside)


# -- the run ----------------------------------------------------------------------------------------------------------


def _describe(engine: Engine, found: dict[str, Any]) -> None:
    units, away = engine.parallel.placement.param_groups, engine.parallel.offload.group_names
    found["updated"] = sum(unit.shard_numel for unit in units if unit.name in away)
    found["share"] = found["updated"] / sum(unit.shard_numel for unit in units)
    found["microbatches"] = engine.layout.accumulate
    held, moved = step_comm_volume.offloaded_bytes(engine), engine.host_transfer_bytes()
    found |= {"held_host": held["host"], "held_disk": held["disk"]}
    found |= {"bytes_down": moved["gradients"], "bytes_up": moved["parameters"]}
    words = f"{len(away)} of {len(units)} units away, {found['share']:.0%} of the states"
    tell("away", f"{words}; {held['host'] / GIB:.1f} GiB on the host, {held['disk'] / GIB:.1f} on disk")


def measured(engine: Engine, question: Question) -> dict[str, Any]:
    device, batch = question.options.device, question.batch()
    engine.step(batch)
    engine.drain()
    _wait(device)
    away = engine.parallel.offload
    link = (
        away.host.link
        if away.host is not None
        else away.activation_offload.link
        if away.activation_offload is not None
        else HostLink(device)
    )
    before, begun, seconds = link.bytes_moved.copy(), time.perf_counter(), []
    for _ in range(question.steps):
        result = engine.step(batch)
        loss = result.loss  # waits for the device, as a loop that tells each step does
        now = time.perf_counter()
        seconds.append(now - begun)
        begun = now
    engine.drain()
    moved = link.bytes_moved - before
    down, up = (sum(moved[key] for key in moved if key[0] == way) / question.steps for way in (DOWN, UP))
    tell("steps", ", ".join(f"{one:.3f}" for one in seconds) + f" s; loss {loss:.3f}")
    # What the host has left to do after a step is in the next one: the first measured step has none before it.
    step = sorted(seconds[1:] or seconds)[len(seconds[1:] or seconds) // 2]
    return {"step_s": step, "bytes_down": down, "bytes_up": up, "loss": loss, "seconds": seconds}


def _conclude(found: dict[str, Any], device: torch.device) -> None:
    crossing = max(found["bytes_down"] / found["down"], found["bytes_up"] / found["up"])
    found["link_s"] = crossing
    found["ratio"] = found["step_s"] / max(found["floor_s"], crossing)
    found["device_bytes"] = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    found["host_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    moved = f"{found['bytes_down'] / 1e9:.2f} GB down, {found['bytes_up'] / 1e9:.2f} GB up a step"
    tell("crossed", f"{moved}: {crossing:.3f} s of the link")
    tell("memory", f"{found['device_bytes'] / GIB:.2f} GiB of the device, {found['host_bytes'] / GIB:.1f} of the host")
    tell("step", f"{found['step_s']:.3f} s = {found['ratio']:.3f} x the larger of floor and link (bar: 1.25)")
    for name in ("predicted", "planner"):
        tell(name, f"step {found[f'{name}_s'] / found['step_s'] - 1:+.1%} off (bar: 25 %)")
    if found["device_bytes"]:
        tell("planner", f"memory {found['planner_bytes'] / found['device_bytes'] - 1:+.1%} off (bar: 5 %)")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


if __name__ == "__main__":
    main()
