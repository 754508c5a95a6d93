"""What a module declares that training can do with it: how tp splits it, whether cp, pp and ep can divide it.

These are the checks of the transforms (parallel/apply.py) on a module that is not divided yet, so that a plan is
runnable only where they pass.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from echelon.layout import Layout
from echelon.models.tp_splits import get_tp_split
from echelon.parallel.tp.tensor_parallel import match_roles

if TYPE_CHECKING:
    from torch import nn


def model_support(module: nn.Module) -> dict[str, Any]:
    """Return the fields of the module's `ModelShape` that say what its layouts can be."""
    from echelon.moe.moe_layer import MoELayer
    from echelon.rng import unsupported_dropouts

    return {
        **_tp_support(module),
        "supports_cp": _supports_cp(module),
        "supports_pp": hasattr(module, "pipeline_model"),
        "supports_ep": any(isinstance(child, MoELayer) for child in module.modules()),
        "trainable": not unsupported_dropouts(module),
    }


def _tp_support(module: nn.Module) -> dict[str, Any]:
    """What its table says of tensor parallelism."""
    from echelon.parallel.tp_grid.grid_parallel import find_grid_problems

    try:
        roles = match_roles(module, get_tp_split(module))
    except ValueError:  # none, or one that does not fit the module
        roles = {}
    if not roles:
        return {"supports_tp": False, "supports_sp": False, "supports_grids": False}
    rows: set[int] = set()
    units: set[int] = set()
    for name, role in roles.items():
        gemm: Any = module.get_submodule(name)
        parent: Any = module.get_submodule(name.rpartition(".")[0])
        if role == "row":
            rows.add(gemm.in_features)
        elif role in ("column", "column/heads"):
            units.add(gemm.out_features // (parent.head_dim if role == "column/heads" else 1))
    return {
        "supports_tp": True,
        "supports_sp": "vocabulary" in roles.values(),
        "supports_grids": not any(find_grid_problems(module, roles, Layout(tp=4, tp_kind="2d"))),
        "tp_row_inputs": tuple(sorted(rows)),
        "tp_column_units": tuple(sorted(units)),
    }


def _supports_cp(module: nn.Module) -> bool:
    """Whether the module has a `CoreAttention` and takes `positions`, as context parallelism requires."""
    from echelon.models.attention import CoreAttention

    parameters = inspect.signature(module.forward).parameters.values()
    takes_positions = any(p.name == "positions" or p.kind is p.VAR_KEYWORD for p in parameters)
    return takes_positions and any(isinstance(child, CoreAttention) for child in module.modules())
