"""Tables that count all tokens of a sequence, on ranks that have a part of it: `FullTable`.

Rotary frequencies may follow from the longest position that a forward sees (dynamic and LongRoPE scaling). Ranks of
context parallelism would each see another one, so the table is given the positions of all tokens, and the rank keeps
what it gave for its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from echelon.models.forward_parts.module_shell import shallow_copy


class FullSequences(Protocol):
    """The sequences of which this rank has a part."""

    @property
    def length(self) -> int:
        """Tokens of the current ones."""
        ...

    @property
    def local_length(self) -> int:
        """Those of this rank, with padding."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """[sequences, local tokens, ...] to [sequences, all tokens, ...]."""
        ...

    def keep(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens, of a tensor whose dimension `dim` is all tokens."""
        ...

    def run_full(self, call: Callable[..., Tensor], *args: Tensor) -> Tensor:
        """Call a function with tensors of full sequences, and return this rank's tokens."""
        ...


class FullTable(nn.Module):
    """Stands in for a table outside of the layers, which is called with positions."""

    def __init__(self, table: nn.Module, sequences: FullSequences):
        super().__init__()
        self.table, self.sequences = table, sequences

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not any(map(self._is_positions, (*args, *kwargs.values()))):
            return self.table(*args, **kwargs)
        part = shallow_copy(self.table)(*args, **kwargs)  # what it keeps of a call must be of the full one
        named = {key: self._full(value) for key, value in kwargs.items()}
        return self._keep(self.table(*map(self._full, args), **named), part)

    def _is_positions(self, x: Any) -> bool:
        is_integer = isinstance(x, Tensor) and not x.is_floating_point() and not x.is_complex()
        return is_integer and x.dim() > 1 and x.shape[-1] == self.sequences.local_length

    def _full(self, x: Any) -> Any:
        if not self._is_positions(x):
            return x
        return self.sequences.gather(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    def _keep(self, full: Any, part: Any) -> Any:
        if isinstance(full, tuple | list):
            return type(full)(map(self._keep, full, part))
        if isinstance(full, Mapping):
            return {key: self._keep(value, part[key]) for key, value in full.items()}
        if not isinstance(full, Tensor):
            return full
        differing = [dim for dim, sizes in enumerate(zip(full.shape, part.shape, strict=True)) if sizes[0] != sizes[1]]
        for dim in differing:
            full = self.sequences.keep(full, dim)
        return full
