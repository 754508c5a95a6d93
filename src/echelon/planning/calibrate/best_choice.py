"""The keys of a layout that a published run leaves out, as the planner chooses them: the fastest that fits.

    microbatch    powers of two that divide the sequences of a rank
    recompute     what the run's program has, from `none` to `full`; Megatron's `ops` recomputes single modules
    offload       none, or of activations, as NeMo's recipes do where the host's link is fast
    schedule      1F1B, or interleaved in the chunks that Megatron's stages divide into, the embedding and the head
                  counted as layers if the layers alone do not divide
    zero          1, which takes no more time and less memory than 0, and 0 on Volta, before there was ZeRO

A choice is legal if it breaks no rule that the rest of the row does not break. If nothing fits, the memory model is
wrong about the run, which ran: it is priced with the choice that needs the least.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from echelon.layout import Layout
from echelon.planning.cost.count_work import count_work
from echelon.planning.cost.memory_model import peak_memory
from echelon.planning.cost.step_time import step_times
from echelon.planning.cost.step_work import stack_work
from echelon.planning.scenario import Scenario

MICROBATCHES = (1, 2, 4, 8, 16, 32, 64)
RECOMPUTE = ("none", "selective", "full")
MEGATRON_RECOMPUTE = ("none", "ops", "selective", "full")
"""from the fastest to what saves the most"""
MAX_CHUNKS = 5
"""of a rank: more are rarely worth their transfers"""
CHOSEN_KEYS = ("microbatch", "recompute", "offload", "vpp", "zero")


def best_choice(scenario: Scenario, blanks: Collection[str], sequences: int) -> tuple[Scenario, dict[str, int | str]]:
    """Return the scenario with its blank keys chosen, and what was chosen. `sequences`: of a data-parallel rank."""
    fitting: list[Scenario] = []
    least: tuple[int, Scenario] | None = None
    broken: set[str] | None = None
    for shapes in _layouts(scenario, blanks, sequences):
        for layout in shapes:
            candidate = replace(scenario, layout=layout)
            if layout != scenario.layout:
                broken = set(scenario.violations(scenario.layout)) if broken is None else broken
                if not set(candidate.violations(layout)) <= broken:
                    continue
            size = peak_memory(candidate).total
            least = (size, candidate) if least is None or size < least[0] else least
            if size <= scenario.cluster.memory:
                fitting.append(candidate)
                if layout.recompute == "none" and layout.offload == "none":
                    break  # the others are slower
    best = fitting[0] if fitting else least[1] if least else scenario
    if len(fitting) > 1:
        seconds = np.asarray(step_times(stack_work([count_work(one) for one in fitting])).total)
        best = fitting[int(np.argmin(seconds))]
    chosen: dict[str, int | str] = {key: getattr(best.layout, key) for key in CHOSEN_KEYS if key in blanks}
    return best, chosen


def _layouts(scenario: Scenario, blanks: Collection[str], sequences: int) -> Iterator[list[Layout]]:
    """Yield the layouts of each microbatch and number of chunks, those that save least first."""
    layout = scenario.layout
    policies = MEGATRON_RECOMPUTE if scenario.program == "megatron" else RECOMPUTE
    sizes = [size for size in MICROBATCHES if sequences % size == 0] if "microbatch" in blanks else [layout.microbatch]
    saved = policies[policies.index(layout.recompute) :] if "recompute" in blanks else [layout.recompute]
    offloads = ("none", "activations") if "offload" in blanks else (layout.offload,)
    chunks = _chunks(scenario) if "vpp" in blanks else [layout.vpp]
    for size, vpp in product(sizes, chunks):
        schedule = layout.schedule if "vpp" not in blanks else "interleaved" if vpp > 1 else "1f1b"
        accumulate = max(1, round(sequences / size))
        shaped = layout.replace(microbatch=size, accumulate=accumulate, vpp=vpp, schedule=schedule)
        yield [shaped.replace(recompute=one, offload=other) for one, other in product(saved, offloads)]


def _chunks(scenario: Scenario) -> list[int]:
    """Chunks of a rank that leave all of them the same number of layers, with the ends or without."""
    layers, pp = scenario.shape.num_layers, scenario.layout.pp
    for total in (layers, layers + 2):
        each, rest = divmod(total, pp)
        if not rest:
            return [vpp for vpp in range(1, MAX_CHUNKS + 1) if not each % vpp]
    return [1]
