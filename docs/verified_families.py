"""The tables of families of transformers: which layouts `verify` passed for each, unchanged.

`python docs/verified_families.py` verifies every family on every layout, and writes foreign-families.json, in minutes;
with `others` those of tests/other_families.py, and writes other-families.json; names verify these alone.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS, OTHERS = HERE / "foreign-families.json", HERE / "other-families.json"
LAYOUTS = (
    *("dp=2", "dp=2,zero=3", "tp=2,sp=0", "tp=2", "pp=2,accumulate=2", "dp=2,tp=2,pp=2,zero=1"),
    *("cp=2", "dp=2,ep=2"),
)

REFUSALS = ("use cp=1", "has no experts", "one by one, but")


def columns() -> tuple[list[str], list[list[str]]]:
    """Headings, and for each family the largest error of each layout and the modules that tp leaves whole."""
    return _table(RESULTS)


def other_columns() -> tuple[list[str], list[list[str]]]:
    """The same of the other families."""
    return _table(OTHERS)


def _table(path: Path) -> tuple[list[str], list[list[str]]]:
    results = json.loads(path.read_text(encoding="utf-8"))
    rows = [
        [f"`{name}`", *(found["layouts"][layout] for layout in LAYOUTS), ", ".join(found["whole"]) or "nothing"]
        for name, found in results.items()
    ]
    return ["family", *(f"`{layout}`" for layout in LAYOUTS), "whole under tp"], rows


def measure(names: list[str]) -> None:
    """Verify families, and write what was found as they come."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    from foreign_families import FAMILIES, write_family
    from other_families import other_families, write_other_family

    from echelon.launch.rank_pool import RankPool

    listed = [name for name in FAMILIES if not names or name in names]
    others = [name for name in other_families() if names == ["others"] or name in names]
    failures = []
    with RankPool() as pool, tempfile.TemporaryDirectory() as folder:
        for path, chosen, write in ((RESULTS, listed, write_family), (OTHERS, others, write_other_family)):
            results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            for name in chosen:
                model = f"hf:{write(name, Path(folder) / name)}"
                results[name], failed = _verify(model, pool)
                failures += [f"{name} fails on {failure}" for failure in failed]
                path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
                print(name, *results[name]["layouts"].values(), flush=True)
    if failures:
        raise SystemExit("\n".join(failures))


def _verify(model: str, pool: Any) -> tuple[dict[str, Any], list[str]]:
    from echelon.layout import Layout
    from echelon.models.foreign.causal_lm import build_causal_lm
    from echelon.models.foreign.hf_source import read_hf_source
    from echelon.parallel.tp.derive_regions import derive_split
    from echelon.verification.verifier import Verifier
    from echelon.verification.verify_case import VerifyCase

    verifier, passed, failed = Verifier(pool, VerifyCase(model=model, steps=3, seq_len=17)), {}, []
    for layout in LAYOUTS:
        verdict = verifier.verify_layout(Layout.parse(layout))
        is_refused = any(words in verdict.trouble for words in REFUSALS)
        failed += [] if verdict.passed or is_refused else [f"{layout}: {verdict}"]
        passed[layout] = f"{verdict.max_error:.0e}" if verdict.passed else "-" if is_refused else "fails"
    split = derive_split(build_causal_lm(read_hf_source(model)), 2)
    whole = sorted({part.rpartition(".")[2] for part in (*split.whole, *split.expert_layers)})
    return {"layouts": passed, "whole": whole}, failed


if __name__ == "__main__":
    measure(sys.argv[1:])
