"""The keys of a layout that a published run leaves out, as the planner chooses them: the fastest that fits.

    microbatch    powers of two that divide the sequences of a rank
    recompute     what the run's program has, from `none` to `full`; Megatron's `ops` recomputes single modules
    offload       none, or of activations, as NeMo's recipes do where the host's link is fast
    schedule      1F1B, or interleaved in the chunks that Megatron's stages divide into, the embedding and the head
                  counted as layers if the layers alone do not divide
    zero          0 or 1, where the program has both

A choice is legal if it breaks no rule that the rest of the row does not break. If nothing fits, the memory model is
wrong about the run, which ran: it is priced with the choice that needs the least.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
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
    candidates = [replace(scenario, layout=layout) for layout in _layouts(scenario, blanks, sequences)]
    if len(candidates) > 1:
        broken = scenario.violations(scenario.layout).keys()
        candidates = [one for one in candidates if one.violations(one.layout).keys() <= broken] or [scenario]
    sizes = [peak_memory(one).total for one in candidates] if len(candidates) > 1 else [0]
    limit = max(scenario.cluster.memory, min(sizes))
    fitting = [one for one, size in zip(candidates, sizes, strict=True) if size <= limit]
    best = fitting[0]
    if len(fitting) > 1:
        seconds = np.asarray(step_times(stack_work([count_work(one) for one in fitting])).total)
        best = fitting[int(np.argmin(seconds))]
    chosen: dict[str, int | str] = {key: getattr(best.layout, key) for key in CHOSEN_KEYS if key in blanks}
    return best, chosen


def _layouts(scenario: Scenario, blanks: Collection[str], sequences: int) -> Iterator[Layout]:
    layout = scenario.layout
    policies = MEGATRON_RECOMPUTE if scenario.program == "megatron" else RECOMPUTE
    options: dict[str, Sequence[int | str]] = {
        "microbatch": [size for size in MICROBATCHES if sequences % size == 0],
        "vpp": _chunks(scenario),
        "recompute": policies[policies.index(layout.recompute) :] if layout.recompute in policies else (),
        "zero": (1, 0),
        "offload": ("none", "activations"),
    }
    keys = [key for key in options if key in blanks]
    for values in product(*(options[key] for key in keys)):
        chosen = layout.replace(**dict(zip(keys, values, strict=True)))
        schedule = layout.schedule if "vpp" not in blanks else "interleaved" if chosen.vpp > 1 else "1f1b"
        yield chosen.replace(schedule=schedule, accumulate=max(1, round(sequences / chosen.microbatch)))


def _chunks(scenario: Scenario) -> list[int]:
    """Chunks of a rank that leave all of them the same number of layers, with the ends or without."""
    layers, pp = scenario.shape.num_layers, scenario.layout.pp
    for total in (layers, layers + 2):
        each, rest = divmod(total, pp)
        if not rest:
            return [vpp for vpp in range(1, MAX_CHUNKS + 1) if not each % vpp]
    return [1]
