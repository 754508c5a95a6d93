"""Makes the pictures of the docs. No number in them is written by hand: the code and real runs give them.

`python docs/pictures/make.py` makes all drawings, in seconds. Names after it make some pictures (`train verify`), `all`
makes all of them; a picture of a terminal takes as long as its command.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import adapters  # noqa: E402
import attempts  # noqa: E402
import compression  # noqa: E402
import context  # noqa: E402
import curves  # noqa: E402
import foreign  # noqa: E402
import kept  # noqa: E402
import memory  # noqa: E402
import mixtures  # noqa: E402
import offload  # noqa: E402
import packages  # noqa: E402
import pipelines  # noqa: E402
import precision  # noqa: E402
import saves  # noqa: E402
import shardings  # noqa: E402
import spikes  # noqa: E402
import splits  # noqa: E402
import steps  # noqa: E402
import terminal  # noqa: E402
import traffic_lines  # noqa: E402

from echelon.bench.profile.breakdown import from_json  # noqa: E402
from echelon.bench.profile.breakdown_svg import as_svg  # noqa: E402


def _profile(path: Path) -> str:
    return as_svg(from_json(path.read_text(encoding="utf-8")))


DRAWN: dict[str, Callable[[], str]] = {
    "packages": packages.packages,
    "mesh": splits.mesh,
    "foreign-parts": foreign.parts,
    "lora-split": adapters.split,
    "flat-units": splits.flat_units,
    "zero-stages": splits.zero_stages,
    "sharding-states": shardings.states,
    "tensor-region": splits.tensor_region,
    "tensor-grids": splits.tensor_grids,
    "tensor-bytes": traffic_lines.tensor_bytes,
    "context-zigzag": context.zigzag,
    "context-kinds": context.kinds,
    "context-bytes": traffic_lines.context_bytes,
    "experts-travel": mixtures.travel,
    "experts-fold": mixtures.fold,
    "experts-curves": mixtures.curves,
    "sequence-slices": splits.sequence_slices,
    "backward-timeline": steps.backward_timeline,
    "recompute": steps.recompute,
    "recompute-layers": kept.kept_over_layers,
    "compression": compression.kept,
    "offload-places": offload.places,
    "offload-timeline": offload.timeline,
    "compression-losses": lambda: compression.losses(HERE / "losses-compression.json"),
    "elastic": lambda: attempts.attempts(HERE / "elastic.json"),
    "precision": precision.types,
    "memory-stack": memory.stacked,
    "checkpoints": saves.beside,
    "goodput": saves.how_often,
    "loss-contract": steps.loss_contract,
    "same-mask": steps.same_mask,
    "pipeline-cut": pipelines.cut_model,
    "pipeline-schedules": pipelines.compared,
    "pipeline-1f1b": lambda: pipelines.one("1f1b"),
    "pipeline-zb-v": lambda: pipelines.one("zb-v", microbatches=5, ranks=3),
    "pipeline-terapipe": lambda: pipelines.one("terapipe", microbatches=2, slices=4),
    "pipeline-pipedream": lambda: pipelines.one("pipedream"),
    "weight-versions": pipelines.versions,
    "loss-spike": spikes.losses,
    "losses-fp8": lambda: curves.losses(HERE / "losses-fp8.json"),
}
# A profile that was measured on a GPU lies here as a file of numbers, and is drawn anew from it anywhere.
DRAWN |= {path.stem: partial(_profile, path) for path in sorted(HERE.glob("profile-*.json"))}
REAL = {
    "train": "echelon train --procs 2",
    "plan": "echelon plan llama-8b --cluster 8xh100 --batch 64 --seq-len 8192",
    "verify": "echelon verify",
    "verify-failure": 'echelon verify --layouts "dp=2; dp=2,tp=2" --leave-out tp:reduce_scatter',
    "faults": "echelon train --procs 6 --set layout=tp=4 --set batch=10 --set stepps=100 --set clip=-1",
}


def make(name: str) -> str:
    if name in DRAWN:
        return DRAWN[name]()
    with tempfile.TemporaryDirectory() as folder:
        return terminal.picture(REAL[name], Path(folder))


def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in (*DRAWN, *REAL, "all")]
    if unknown:
        sys.exit(f"no picture of this name ({', '.join(unknown)}); use {', '.join((*DRAWN, *REAL))} or all")
    wanted = [*DRAWN, *REAL] if "all" in names else names or [*DRAWN]
    for name in wanted:
        lines = [line.rstrip() for line in make(name).splitlines()]
        (HERE / f"{name}.svg").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"docs/pictures/{name}.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
