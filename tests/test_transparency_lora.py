"""LoRA adapters on a frozen model: every layout equals one device, for our models and for classes of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from foreign_families import write_family

from echelon.config.sections import LoRAConfig
from echelon.launch.rank_pool import RankPool
from echelon.layout import Layout
from echelon.models.model_config import find_model
from echelon.verification.verifier import TOLERANCE, Verifier
from echelon.verification.verify_case import FLOAT64, VerifyCase

ADAPTERS = LoRAConfig(rank=2, alpha=4.0, dropout=0.1, train=("*norm*", "*ln_1*", "*layernorm*"))


def verify(model: str, layout: str, pool: RankPool, folder: Path, *, lora: LoRAConfig, leave_out: str = "") -> bool:
    config = replace(FLOAT64, lora=lora)
    if model.startswith("hf:"):
        spec = f"hf:{write_family(model.removeprefix('hf:'), folder)}"
        case = VerifyCase(model=spec, steps=2, seq_len=17, config=config)
    else:
        case = VerifyCase(model=replace(find_model(model), dropout=0.1), reduce=True, steps=2, config=config)
    verdict = Verifier(pool, case, leave_out).verify_layout(Layout.parse(layout))
    assert not verdict.trouble, verdict.trouble
    assert verdict.passed == (verdict.max_error <= TOLERANCE), verdict
    return verdict.passed
