"""What our kernels (kernels/) keep and move of a layer of our models, counted from what they read and write.

[Note: kept]

    none   the stream before each part, q, k and v, attention's output, what the activation reads;
           and what can be made of these: the outputs of norms and of the activation
    ops    the first of these alone
    fp8    the first of these, and of what products read a transposed copy of one byte; under `ops` not that

[Note: moved]

A kernel reads its inputs once and writes its outputs once. Products in 8 bits have what they multiply read in 16 bits
and written in 8: as it lies, and transposed for the gradient of the weight. Under `ops` the transposed one of an input
is written in backward, which reads it once more.
"""

from __future__ import annotations

from dataclasses import dataclass

ROW_BYTES = 16
"""of a token beside a layer: each norm's scale and largest value, in 32 bits"""
WEIGHT_CASTS = 8
"""bytes moved per weight to have it in 8 bits: read three times in 16, for its largest value and to be written twice"""
GRADIENT_SUMS = 10
"""bytes moved per weight to add its gradient, of 16 bits, to those before it, in 32"""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Of a layer and a token: what only sequence parallelism divides, and what tensor parallelism does."""

    whole: float = 0.0
    split: float = 0.0

    def on_rank(self, sliced: float, tp: float) -> float:
        return self.whole / sliced + self.split / tp

    def __add__(self, other: Part) -> Part:
        return Part(whole=self.whole + other.whole, split=self.split + other.split)

    def __rmul__(self, times: float) -> Part:
        return Part(whole=times * self.whole, split=times * self.split)


@dataclass(frozen=True, kw_only=True)
class KernelCounts:
    """Elements per token of one layer of a model of ours."""

    kept: Part
    """backward reads them, and they cannot be made again"""
    remade: Part
    """backward reads them, and they can"""
    inputs: Part
    """that products read"""
    outputs: Part
    """that products write"""
    forward: Part
    """that operators between products read and write"""
    backward: Part
    again: Part
    """that operators read and write to make what can be made again, beside backward"""

    def bytes_kept(self, *, element_bytes: int, narrow: bool, remakes: bool) -> Part:
        """Until backward. `narrow`: products are in 8 bits; `remakes`: what can be made again is. See [Note: kept]."""
        found = element_bytes * self.kept
        if remakes:
            return found
        return found + (self.inputs if narrow else element_bytes * self.remade)

    def bytes_moved(self, *, element_bytes: int, narrow: bool, remakes: bool) -> tuple[Part, Part, Part]:
        """In forward, in backward, and to make things again. See [Note: moved]."""
        forward, backward = element_bytes * self.forward, element_bytes * self.backward
        again = element_bytes * self.again if remakes else Part()
        if narrow:
            forward += (3 if remakes else 4) * self.inputs
            backward += 4 * self.outputs
            again += (3 if remakes else 0) * self.inputs
        return forward, backward, again


def llama(*, width: int, q: int, kv: int, out: int, ffn: int, dropout: bool) -> KernelCounts:
    """`q`, `kv` and `out` are the elements of all queries, of all keys and values, and of attention's output."""
    masks = Part(whole=1.5 * width if dropout else 0)
    return KernelCounts(
        kept=Part(whole=2 * width, split=q + kv + out + 2 * ffn) + masks,
        remade=Part(whole=2 * width, split=ffn),
        inputs=Part(whole=2 * width, split=out + ffn),
        outputs=Part(whole=2 * width, split=q + kv + 2 * ffn),
        # The first norm reads the stream and writes; the second adds to the stream too, as the layer's end does.
        # Queries and keys are turned where they lie. Gate and up are read, one is written.
        forward=Part(whole=9 * width, split=2 * (q + kv / 2) + 3 * ffn) + 2 * masks,
        # Norms read two gradients and the stream, and write. Those of q, k and v become one tensor.
        backward=Part(whole=8 * width, split=2 * (q + kv) + 5 * ffn) + 2 * masks,
        again=Part(whole=4 * width, split=ffn),
    )


def gpt(*, width: int, q: int, kv: int, out: int, ffn: int, dropout: bool) -> KernelCounts:
    """Norms, activation and additions are torch's own; q, k and v are products of their own, with biases."""
    masks = Part(whole=1.5 * width if dropout else 0)
    return KernelCounts(
        kept=Part(whole=2 * width, split=q + kv + out + ffn) + masks,
        remade=Part(whole=2 * width, split=ffn),
        inputs=Part(whole=4 * width, split=out + ffn),
        outputs=Part(whole=2 * width, split=q + kv + ffn),
        forward=Part(whole=10 * width, split=2 * ffn) + 2 * masks,
        # Norms, additions where the stream forks and of the gradients from q, k and v, and sums for the biases.
        backward=Part(whole=20 * width, split=q + kv + 4 * ffn) + 2 * masks,
        again=Part(whole=4 * width, split=2 * ffn),
    )
