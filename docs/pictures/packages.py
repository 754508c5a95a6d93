"""Drawing of the packages, in layers: each imports only packages below it. The layers come from the source."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from svg import BLUE, FAINT, GREEN, ORANGE, VIOLET, Canvas

SOURCE = Path(__file__).parents[2] / "src" / "echelon"
CAPTIONS = {
    "layout": "Layout, Mesh, Placement",
    "rng": "counter-based RNG",
    "compat": "private torch names",
    "config": "keys and rules of a run",
    "kernels": "Triton beside plain torch",
    "models": "one-device models",
    "moe": "gates, experts",
    "data": "token files, sample order",
    "precision": "fp8, keep_fp32, loss scale",
    "memory": "checkpointing, offload",
    "parallel": "apply; dp tp cp ep",
    "optim": "sharded optimizers",
    "pipeline": "schedules, runtime",
    "training": "Engine, loop, wrap",
    "checkpoint": "save, load, reshard",
    "faults": "recorder, diagnosis",
    "launch": "starting ranks",
    "planning": "cost model, search",
    "verification": "verify",
    "bench": "step times, peers",
    "draw": "SVG writer",
    "report": "pictures of a run",
    "cli": "one module per command",
}
COLOURS = {"layout": VIOLET, "planning": GREEN, "training": ORANGE, "cli": FAINT}
WIDE, HIGH, GAP = 144, 44, 8


@cache
def imports() -> dict[str, set[str]]:
    """The packages of echelon that each package imports."""
    names = {
        path.stem for path in SOURCE.iterdir() if (path / "__init__.py").exists() or path.stem in ("rng", "compat")
    }
    found: dict[str, set[str]] = {name: set() for name in names}
    for path in SOURCE.rglob("*.py"):
        package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if package not in names:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("echelon"):
                parts = (node.module or "").split(".")
                found[package] |= {*(parts[1:2] or [alias.name for alias in node.names])} & names - {package}
    return found


@cache
def layer(package: str) -> int:
    return 1 + max((layer(other) for other in imports()[package]), default=-1)


def packages() -> str:
    layers: dict[int, list[str]] = {}
    for package in sorted(imports()):
        layers.setdefault(layer(package), []).append(package)
    height = 84 + len(layers) * (HIGH + 20)
    c = Canvas(height, "The packages: each imports only packages in rows below its own")
    for level, names in layers.items():
        y = height - 24 - HIGH - level * (HIGH + 20)
        left = 400 - (len(names) * (WIDE + GAP) - GAP) / 2
        for place, name in enumerate(names):
            x = left + place * (WIDE + GAP)
            c.box(x, y, WIDE, HIGH, colour=COLOURS.get(name, BLUE))
            c.text(x + WIDE / 2, y + 18, name, anchor="middle", weight="bold", mono=True)
            c.text(x + WIDE / 2, y + 34, CAPTIONS[name], size=10, anchor="middle", colour=FAINT)
    return c.finish()
