"""`verify --as-configured`: what a layout may be off by, in the precision, kernels and compression of the run.

[Note: a tolerance that is derived]

In low precision no two programs agree bit for bit. How far apart they may be is derived, not chosen, from three runs
of the same steps:

    T   the truth: one device, float64
    R   the reference: one device, the configured precision, plain torch operators (low_precision_reference.py)
    E   the engine: the layout, the configured precision, kernels, compression and offload

R is off from T by what the precision costs. E may be off from T by `FACTOR` times as much, tensor by tensor and step
by step:

    |E - T| / |T|  <=  FACTOR max(error of R for this tensor, typical error of R for its kind, roundoff of the dtype)

Typical is the median over the tensors of a step. So neither a tensor with a small error of R by coincidence decides,
nor one where the method itself is far off (int8 moments of an embedding, of which most tokens have no gradient). A norm
may be off by as much as the gradients that it is the norm of. Weights and their averages are compared as updates: |T|
is the distance that the step moved them, so that a wrong update is not hidden by the weight that it changes. The
roundoff of the dtype counts for the other kinds: losses, norms, gradients and buffers. A gradient below the roundoff of
the norm of all of them counts as zero. Where rounding is random or in blocks, R runs three times and its largest errors
count; of weights that are rounded stochastically, at least the rounding of one element. Decisions amplify rounding: of
n tokens, roundoff n, or one, may be too near to a tie for the gate of an MoE layer, and go to another expert; its
gradients are off by 2 sqrt(roundoff).

E and R take each step from T's weights, and update them with T's gradients ([Note: equal gradients] in compare.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from safetensors import safe_open

from echelon.models.model_config import ModelConfig
from echelon.training.engine_options import DTYPES
from echelon.verification.compare import Difference, TruthRecord
from echelon.verification.low_precision_reference import LowPrecisionTraining
from echelon.verification.verify_case import VerifyCase

FACTOR = 3.0
UPDATES = ("parameter", "average")
"""the kinds that are compared as updates"""
Quantity = tuple[int, str, str]
"""(step, kind, name)"""


def reference_errors(
    case: VerifyCase, num_sequences: int, accumulate: int, truth: Path, draw: int = 0
) -> list[Difference]:
    """Run the reference, and return its errors."""
    if case.config.device == "cuda":
        torch.cuda.set_device(0)
    with safe_open(truth, framework="pt") as file:
        record = LowPrecisionTraining(case, file, accumulate=accumulate, draw=draw).run(num_sequences, accumulate)
        errors = []
        for key in (key for key in record if not key.startswith("-1")):
            step, kind, *name = key.split("/", 2)
            expected = TruthRecord(file, case, int(step))
            error = expected.difference(kind, "".join(name), record[key])
            if kind == "parameter" and case.config.precision.master == "none":
                one_element = torch.finfo(torch.bfloat16).eps * float(expected.tensor(kind, *name).abs().max())
                error = replace(error, relative=max(error.relative, one_element / expected.size(kind, *name)))
            errors.append(error)
        return errors


def num_draws(case: VerifyCase) -> int:
    """Return how often the reference runs: several times where it rounds at random, or in blocks."""
    return 3 if case.config.precision.master == "none" or case.optimizer.states != "float32" else 1


class DerivedTolerance:
    """What each quantity may be off by: see the note."""

    def __init__(self, case: VerifyCase, errors: Iterable[Difference], *, num_tokens: int):
        self._errors: dict[Quantity, float] = {}
        for error in errors:
            key = (error.step, error.kind, error.name)
            self._errors[key] = max(error.relative, self._errors.get(key, 0.0))
        by_kind: dict[tuple[int, str], list[float]] = {}
        for (step, kind, _), relative in self._errors.items():
            by_kind.setdefault((step, kind), []).append(relative)
            if kind == "gradient":
                by_kind.setdefault((step, "norm"), []).append(relative)
        self._typical = {key: median(values) for key, values in by_kind.items()}
        self._roundoff = torch.finfo(DTYPES[case.config.dtype]).eps
        is_moe = isinstance(case.model, ModelConfig) and case.model.moe is not None
        routed = 2 * math.sqrt(max(self._roundoff, 1 / num_tokens)) if is_moe else 0.0
        self._by_decision = dict.fromkeys(("gradient", "norm"), routed)

    def __call__(self, difference: Difference) -> float:
        step, kind, name = difference.step, difference.kind, difference.name
        roundoff = 0.0 if kind in UPDATES else self._roundoff
        rounding = FACTOR * max(self._errors[step, kind, name], self._typical[step, kind], roundoff)
        return max(rounding, self._by_decision.get(kind, 0.0))
