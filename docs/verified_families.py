"""The table of families of transformers: which layouts `verify` passed for each, unchanged.

`python docs/verified_families.py` verifies every family on every layout, and writes foreign-families.json, in minutes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "foreign-families.json"
LAYOUTS = (
    *("dp=2", "dp=2,zero=3", "tp=2,sp=0", "tp=2", "pp=2,accumulate=2", "dp=2,tp=2,pp=2,zero=1"),
    *("cp=2", "dp=2,ep=2"),
)

REFUSALS = ("use cp=1", "has no experts to divide")


def columns() -> tuple[list[str], list[list[str]]]:
    """Headings, and for each family the largest error of each layout and the modules that tp leaves whole."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = [
        [f"`{name}`", *(found["layouts"][layout] for layout in LAYOUTS), ", ".join(found["whole"]) or "nothing"]
        for name, found in results.items()
    ]
    return ["family", *(f"`{layout}`" for layout in LAYOUTS), "whole under tp"], rows


def measure() -> None:
    sys.path.insert(0, str(HERE.parent / "tests"))
    from foreign_families import FAMILIES, write_family

    from echelon.launch.rank_pool import RankPool
    from echelon.layout import Layout
    from echelon.models.foreign.causal_lm import build_causal_lm
    from echelon.models.foreign.hf_source import read_hf_source
    from echelon.parallel.tp.derive_regions import derive_split
    from echelon.verification.verifier import Verifier
    from echelon.verification.verify_case import VerifyCase

    results: dict[str, dict[str, object]] = {}
    with RankPool() as pool, tempfile.TemporaryDirectory() as folder:
        for name in FAMILIES:
            model = f"hf:{write_family(name, Path(folder) / name)}"
            passed = {}
            for layout in LAYOUTS:
                verdict = Verifier(pool, VerifyCase(model=model, steps=3, seq_len=17)).verify_layout(
                    Layout.parse(layout)
                )
                is_refused = any(words in verdict.trouble for words in REFUSALS)
                if not verdict.passed and not is_refused:
                    raise SystemExit(f"{name} fails on {layout}: {verdict}")
                passed[layout] = "-" if is_refused else f"{verdict.max_error:.0e}"
                print(name, layout, passed[layout], flush=True)
            split = derive_split(build_causal_lm(read_hf_source(model)), 2)
            whole = sorted({part.rpartition(".")[2] for part in (*split.whole, *split.expert_layers)})
            results[name] = {"layouts": passed, "whole": whole}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    measure()
