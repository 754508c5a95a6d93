"""What our kernels (kernels/) keep and move of a layer of our models, counted from what they read and write.

Which layers do what is in our_layers.py.

[Note: kept]

    none   the stream before each part, q, k and v, attention's output, what the activation reads;
           and what can be made of these: the outputs of norms and of the activation
    ops    the first of these alone
    selective   all but what attention's core makes: q and k behind norms of heads and rotations, logarithms
    fp8    the first of these, and of what products read a transposed copy of one byte; under `ops` not that

[Note: moved]

A kernel reads its inputs once and writes its outputs once. Products in 8 bits have what they multiply read in 16 bits
and written in 8: as it lies, and transposed for the gradient of the weight. Under `ops` the transposed one of an input
is written in backward, which reads it once more.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

ROW_BYTES = 16
"""of a token beside a layer: each norm's scale and largest value, in 32 bits"""
WEIGHT_CASTS = 8
"""bytes moved per weight to have it in 8 bits: read three times in 16, for its largest value and to be written twice"""
GRADIENT_SUMS = 10
"""bytes moved per weight to add its gradient, of 16 bits, to those before it, in 32"""
GRADIENT_COPIES = 4
"""bytes moved per weight of an expert to put its gradient in its place: grouped products do not write there"""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Of a layer and a token, by what divides it."""

    whole: float = 0.0
    """sequence parallelism alone"""
    split: float = 0.0
    """tensor parallelism"""
    rows: float = 0.0
    """of rows where their experts are: each goes to all of etp ranks, and to busier ones go more of them"""
    inner: float = 0.0
    """inside experts: the same, but each of etp ranks has a part"""

    def on_rank(self, sliced: float, tp: float, *, etp: int = 1, crowd: float = 1.0) -> float:
        """`crowd` are the rows of experts on a rank, to those of an even load."""
        return self.whole / sliced + (self.split + crowd * (etp * self.rows + self.inner)) / tp

    def __add__(self, other: Part) -> Part:
        return Part(
            whole=self.whole + other.whole,
            split=self.split + other.split,
            rows=self.rows + other.rows,
            inner=self.inner + other.inner,
        )

    def __rmul__(self, times: float) -> Part:
        return Part(
            whole=times * self.whole, split=times * self.split, rows=times * self.rows, inner=times * self.inner
        )


NOTHING = Part()


@dataclass(frozen=True, kw_only=True)
class KernelCounts:
    """Elements per token of one layer of a model of ours, or of a part of it."""

    kept: Part = NOTHING
    """backward reads them, and they cannot be made again"""
    kept_bytes: Part = NOTHING
    """bytes of those whose type is always the same: 32 bits of a gate, places of rows"""
    remade: Part = NOTHING
    """backward reads them, and they can be made again"""
    entered: float = 0.0
    """of both, what enters regions of tensor parallelism: under sequence parallelism it is gathered, and kept so"""
    core: Part = NOTHING
    """of those kept, what attention's core makes of what the projections gave: the rest of it is its logarithms"""
    apart: Part = NOTHING
    """attention's result where it does not lie as the product behind it reads it, which keeps a copy"""
    core_again: Part = NOTHING
    """that operators read and write to make these again, attention itself aside"""
    inputs: Part = NOTHING
    """that products read"""
    outputs: Part = NOTHING
    """that products write"""
    forward: Part = NOTHING
    """that operators between products read and write"""
    backward: Part = NOTHING
    again: Part = NOTHING
    """that operators read and write to make what can be made again, beside backward"""
    travelling: Part = NOTHING
    """that operators read and write in forward, and in backward, where rows go to experts elsewhere"""

    def __add__(self, other: KernelCounts) -> KernelCounts:
        names = (field.name for field in fields(self))
        return KernelCounts(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def bytes_gathered(self, tp: int, *, element_bytes: int, narrow: bool, remakes: bool) -> float:
        """Kept of what enters regions, beyond a rank's slice of it. A gathered tensor is not made again."""
        slices = 0.0 if remakes and self.remade.whole else 1 / tp
        return (1 if narrow else element_bytes) * self.entered * (1 - slices)

    def bytes_kept(self, *, element_bytes: int, narrow: bool, remakes: bool, selects: bool = False) -> Part:
        """Until backward. `narrow`: products are in 8 bits; `remakes`: what can be made again is; `selects`: what
        attention's core makes is. See [Note: kept]."""
        found = element_bytes * self.kept + self.kept_bytes
        found += element_bytes * (-1 * self.core if selects else self.apart)
        if remakes:
            return found
        return found + (self.inputs if narrow else element_bytes * self.remade)

    def bytes_moved(
        self, *, element_bytes: int, narrow: bool, remakes: bool, travels: bool = False
    ) -> tuple[Part, Part, Part]:
        """In forward, in backward, and to make things again. See [Note: moved]."""
        forward, backward = element_bytes * self.forward, element_bytes * self.backward
        again = element_bytes * self.again if remakes else Part()
        if travels:
            forward, backward = (part + element_bytes * self.travelling for part in (forward, backward))
        if narrow:
            forward += (3 if remakes else 4) * self.inputs
            backward += 4 * self.outputs
            again += (3 if remakes else 0) * self.inputs
        return forward, backward, again
