"""Blending of weighted sources: which source provides a sample is a pure function of the sample's index.

[Note: a blend without a counter]
The weights become integer numbers of samples per period. Inside the period each source is spread evenly: the ideal
position of the r-th of its c samples is (r + 1/2) / c of the period, and samples are sorted by ideal position. Weights
3 : 2 give

    index        0  1  2  3  4 | 5  6  7  8  9 | ...
    source       A  B  A  B  A | A  B  A  B  A |          source and index come from a table of one period
    its index    0  0  1  1  2 | 3  2  4  3  5 |          index = period number x count + index in the table

so that after any number of samples, not only at the end of a period, k sources have had their shares to within
(k + 1) / 2 samples. The index counts the earlier samples of the same source: no sample of a source is skipped.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from echelon.data.sample_order import validate_indices
from echelon.data.token_file import AnyIntArray, IntArray

MAX_PERIOD = 1 << 16


@dataclass(frozen=True, kw_only=True)
class SourceBlend:
    """How many samples of each source a period contains."""

    counts: tuple[int, ...]
    """Samples of each source in one period."""

    @classmethod
    def from_weights(cls, weights: Sequence[float]) -> "SourceBlend":
        """Exact where integers with a sum of at most 65536 have the same ratio, else rounded to 1/65536."""
        for weight in weights:
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(f"a weight must be positive ({weight}); remove the source instead of giving it 0")
        # Through the decimal text: 0.7 means seven tenths, not the nearest double.
        parts = [Fraction(repr(float(weight))) for weight in weights]
        shares = [part / sum(parts) for part in parts]
        period = math.lcm(*(share.denominator for share in shares))
        if period <= MAX_PERIOD:
            return cls(counts=tuple(int(share * period) for share in shares))
        # Largest remainders: the counts sum to the period, and each is off by less than one.
        counts = [int(share * MAX_PERIOD) for share in shares]
        remainders = sorted(range(len(shares)), key=lambda source: counts[source] - shares[source] * MAX_PERIOD)
        for source in remainders[: MAX_PERIOD - sum(counts)]:
            counts[source] += 1
        if 0 in counts:
            source = counts.index(0)
            raise ValueError(
                f"weight {weights[source]} is too small relative to the others (share {float(shares[source]):.2g}, "
                f"at least 1/{MAX_PERIOD}); raise it or remove the source"
            )
        return cls(counts=tuple(counts))

    @property
    def period(self) -> int:
        return sum(self.counts)

    def source_and_index(self, index: AnyIntArray) -> tuple[IntArray, IntArray]:
        """The source of each global index, and the index of the sample in that source."""
        index = validate_indices(index)
        sources, indices = self._table
        position = index % self.period
        source = sources[position]
        return source, index // self.period * np.array(self.counts, np.int64)[source] + indices[position]

    @cached_property
    def _table(self) -> tuple[IntArray, IntArray]:
        """Sources and indices of one period. Equal ideal positions are equal doubles, ordered by source number."""
        source = np.repeat(np.arange(len(self.counts), dtype=np.int64), self.counts)
        index = np.concatenate([np.arange(count, dtype=np.int64) for count in self.counts])
        ideal = (2 * index + 1) / np.array(self.counts)[source]
        order = np.lexsort((source, ideal))
        return source[order], index[order]
