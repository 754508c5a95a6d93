"""Maps adapters of our models to the linears of Hugging Face's classes, and back.

[Note: several linears that are one there]

GPT-2's c_attn is our q, k and v. Adapters of all three are one adapter of three times the rank, block by block:

    A [3r, in] = A_q over A_k over A_v        B [3 out, 3r] = B_q, B_k and B_v on the diagonal, zero elsewhere

An adapter of c_attn that PEFT has trained has one A for all: each of ours starts with a copy of it, and its rows of B.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from echelon.models.foreign.causal_lm import ForeignCausalLM
from echelon.models.hf.param_names import TensorTransform, hf_model_type, param_mappings
from echelon.models.lora.adapter import ADAPTER, iter_adapters
from echelon.models.model_config import ModelConfig

WEIGHT = ".weight"


@dataclass(frozen=True)
class Factors:
    """An adapter of a linear."""

    a: Tensor
    """[rank, in]"""
    b: Tensor
    """[out, rank]"""


@dataclass(frozen=True)
class LinearMapping:
    """Linears of ours that together are one of a Hugging Face class."""

    hf: str
    linears: tuple[str, ...]
    """those with adapters have two factors, the others none"""
    sizes: tuple[int, ...]
    """outputs of each"""
    rows_to_hf: TensorTransform
    """from rows [out, n] of every linear to the rows of the one"""
    rows_from_hf: TensorTransform

    def to_hf(self, factors: Mapping[str, Factors]) -> Factors:
        given = [factors.get(name) for name in self.linears]
        total, start, blocks = sum(len(each.a) for each in given if each), 0, []
        dtype = next(each.a.dtype for each in given if each)
        for each, size in zip(given, self.sizes, strict=True):
            block = torch.zeros(size, total, dtype=dtype)
            if each is not None:
                block[:, start : start + len(each.a)] = each.b
                start += len(each.a)
            blocks.append(block)
        (rows,) = self.rows_to_hf(blocks)
        return Factors(torch.cat([each.a for each in given if each]), rows.contiguous())

    def from_hf(self, adapter: Factors, rank: int, adapted: Sequence[str]) -> dict[str, Factors]:
        """Our adapters of this rank; raises ValueError if the one adapter is none of that rank."""
        rows = dict(zip(self.linears, self.rows_from_hf([adapter.b]), strict=True))
        own = [name for name in self.linears if name in adapted]
        if len(adapter.a) == rank:
            return {name: Factors(adapter.a, rows[name].contiguous()) for name in own}
        if len(adapter.a) != rank * len(own):
            raise ValueError(f"{self.hf} has rank {len(adapter.a)}")
        found = {}
        for index, name in enumerate(own):
            block = slice(index * rank, (index + 1) * rank)
            rest = rows[name].clone()
            rest[:, block] = 0
            if rest.any():
                raise ValueError(f"{self.hf} has rank {len(adapter.a)}, and its parts share it")
            found[name] = Factors(adapter.a[block].contiguous(), rows[name][:, block].contiguous())
        return found


def linear_mappings(model: nn.Module) -> list[LinearMapping]:
    """The mappings of all linears with adapters."""
    adapted = {name: [len(part) for part in adapter.B] for name, adapter in iter_adapters(model)}
    config = getattr(model, "config", None)
    if isinstance(model, ForeignCausalLM) or not isinstance(config, ModelConfig):
        return [LinearMapping(name, (name,), (sum(sizes),), list, list) for name, sizes in adapted.items()]
    return list(_native_mappings(model, config, adapted))


def _native_mappings(
    model: nn.Module, config: ModelConfig, adapted: Mapping[str, Sequence[int]]
) -> Iterator[LinearMapping]:
    is_transposed = hf_model_type(config) == "gpt2"  # [in, out] there, as its weights are

    def turned(transform: TensorTransform, *, before: bool) -> TensorTransform:
        def rows(given: Sequence[Tensor]) -> Sequence[Tensor]:
            if not is_transposed:
                return transform(given)
            if before:
                return transform([tensor.T for tensor in given])
            return [tensor.T for tensor in transform(given)]

        return rows

    for mapping in param_mappings(config):
        linears = tuple(name.removesuffix(WEIGHT) for name in mapping.native)
        if not any(name in adapted for name in linears):
            continue
        (hf,) = mapping.hf
        if not hf.endswith(WEIGHT):
            continue  # biases
        sizes = tuple(int(model.get_parameter(name).shape[0]) for name in mapping.native)
        to_hf, from_hf = turned(mapping.to_hf, before=False), turned(mapping.from_hf, before=True)
        yield LinearMapping(hf.removesuffix(WEIGHT), linears, sizes, to_hf, from_hf)


def factors_of_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Factors]:
    """The adapters in a state by the names of their linears; the parts of a fused one together."""
    found = {}
    for name, adapter in iter_adapters(model):
        parts = [state[f"{name}.{ADAPTER}.B.{index}"] for index in range(len(adapter.B))]
        found[name] = Factors(state[f"{name}.{ADAPTER}.A"], torch.cat(parts))
    return found


def state_of_factors(model: nn.Module, factors: Mapping[str, Factors]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for name, adapter in iter_adapters(model):
        sizes: list[Any] = [len(part) for part in adapter.B]
        state[f"{name}.{ADAPTER}.A"] = factors[name].a
        for index, part in enumerate(factors[name].b.split(sizes)):
            state[f"{name}.{ADAPTER}.B.{index}"] = part
    return state
