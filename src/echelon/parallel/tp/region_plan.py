"""What tensor parallelism does to one region of a foreign model, as data: `RegionPlan`, and its splitter.

A region is a module whose linears come in columns and one row, as attention and MLPs do, named as Megatron-LM names
them (tensor_parallel.py). A foreign model has no such table; derive_regions.py finds the regions and proves each plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from echelon.layout.placement import DimSplit, LogicalParam
from echelon.models.foreign.layer_stack import HIDDEN
from echelon.models.foreign.unfuse import is_transposed, output_dim
from echelon.parallel.tp.tensor_parallel import ModuleSplitter
from echelon.parallel.tp.tp_collectives import RegionBoundary, SequenceParallelBoundary


@dataclass(frozen=True, kw_only=True)
class RegionPlan:
    """How one region is split. Names are relative to the module."""

    module: str
    """path in the model"""
    columns: Mapping[str, int]
    """linears whose outputs are sharded, and into how many different parts (fewer than ranks: kv heads are shared)"""
    row: str
    """the linear whose inputs are sharded"""
    head_params: tuple[str, ...] = ()
    """parameters with a number for each head"""
    attributes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """numbers of heads and sizes that the code reads from itself: by submodule, then by attribute"""
    config: Mapping[str, int] = field(default_factory=dict)
    """those that it reads from the model's config"""
    outside: tuple[str, ...] = ()
    """parameters that the module hands out beside its output, for code after the region"""
    enters_at_columns: bool = False
    """the columns' inputs enter the region one by one: the module does more than the region"""

    def at(self, module: str) -> RegionPlan:
        """The same plan for another module of the same kind."""
        return replace(self, module=module)


class RegionSplitter(ModuleSplitter):
    """Splits regions over one mesh axis."""

    def __init__(self, model: nn.Module, params: Iterable[LogicalParam], boundary: RegionBoundary):
        super().__init__(model, params)
        self.boundary, self.axis = boundary, boundary.axis

    def split(self, plan: RegionPlan) -> None:
        root = f"{plan.module}." if plan.module else ""
        module = self.model.get_submodule(plan.module)
        inside = [name for name in self.params if name.startswith(root)]
        if plan.enters_at_columns:
            inside = [name for name in inside if name.removeprefix(root).rpartition(".")[0] in plan.columns]
            for name in plan.columns:
                self.model.get_submodule(root + name).register_forward_pre_hook(self._enter, with_kwargs=True)
        else:
            module.register_forward_pre_hook(self._enter, with_kwargs=True)
        row = root + plan.row
        for name in inside:
            owner, _, _name = name.removeprefix(root).rpartition(".")
            if owner in plan.columns:
                self._split_column(name, plan.columns[owner])
            elif name.removeprefix(root) in plan.head_params:
                self.update_param(name, splits=(DimSplit(axis="tp", dim=0, num_parts=self.axis.size),))
            elif root + owner != row and name.removeprefix(root) not in plan.outside:
                self.update_param(name, partial_grad_axes=("tp",))
        self._split_row(row)
        for name, values in plan.attributes.items():
            vars(self.model.get_submodule(root + name if name else plan.module)).update(values)
        if plan.config:
            scale_config(module, plan.config)

    def _enter(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (self.boundary.enter(args[0]), *args[1:]), kwargs
        return args, {**kwargs, HIDDEN: self.boundary.enter(kwargs[HIDDEN])}

    def _split_column(self, name: str, num_parts: int) -> None:
        module = self.model.get_submodule(name.rpartition(".")[0])
        dim = output_dim(module) if len(self.params[name].shape) > 1 else 0
        copies = self.axis.size // num_parts
        partial = (f"tp/{copies}",) if copies > 1 else ()
        split = DimSplit(axis="tp", dim=dim, num_parts=num_parts, num_copies=copies)
        self.update_param(name, splits=(split,), partial_grad_axes=partial)
        if is_transposed(module):
            vars(module)["nf"] = -(-int(self.params[name].shape[-1]) // num_parts)  # its code reads the size

    def _split_row(self, name: str) -> None:
        module: Any = self.model.get_submodule(name)
        dim = 1 - output_dim(module)
        self.update_param(f"{name}.weight", splits=(DimSplit(axis="tp", dim=dim, num_parts=self.axis.size),))
        if isinstance(self.boundary, SequenceParallelBoundary) and f"{name}.bias" in self.params:
            self.update_param(f"{name}.bias", partial_grad_axes=("tp",))
        self.replace(name, ReducedLinear(module, self.boundary))


class ReducedLinear(nn.Module):
    """A linear whose inputs are sharded: each rank's GEMM gives a partial sum, and the bias is added once."""

    def __init__(self, linear: Any, boundary: RegionBoundary):
        super().__init__()
        self.weight, self.boundary, self.is_transposed = linear.weight, boundary, is_transposed(linear)
        self.register_parameter("bias", linear.bias)
        self.lora: nn.Module | None = None
        """an adapter whose inputs are sharded too: its output is a partial sum"""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.is_transposed else self.weight.t()
        y = x @ weight
        y = self.boundary.leave(y if self.lora is None else y + self.lora(x))
        bias = self._parameters["bias"]
        return y if bias is None else y + bias


def scale_config(module: nn.Module, values: Mapping[str, int]) -> None:
    """Give the modules of a region a config of their own with other numbers of heads."""
    for child in module.modules():
        config = vars(child).get("config")
        if config is not None:
            scaled = copy(config)
            for key, value in values.items():
                setattr(scaled, key, value)
            vars(child)["config"] = scaled
