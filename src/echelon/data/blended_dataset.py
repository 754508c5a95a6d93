"""Several weighted sources: which source serves a sample is a pure function of the sample's index.

[Note: a mixture without a counter]
The weights become whole numbers of samples in a period. Inside the period each source is spread evenly: the r-th of
its c samples wants the place (r + 1/2) / c of the way, and the samples stand in the order of their wishes. Weights
3 : 2 give

    index        0  1  2  3  4 | 5  6  7  8  9 | ...
    source       A  B  A  B  A | A  B  A  B  A |          source and rank come from a table of one period
    its rank     0  0  1  1  2 | 3  2  4  3  5 |          rank = period number x count + rank in the table

so that after any number of samples, not only at the end of a period, k sources have had their shares to within
(k + 1) / 2 samples. The rank is the number of earlier samples of the same source: no sample of a source is skipped.
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
    """How often each source is served."""

    counts: tuple[int, ...]
    """Samples of each source in one period."""

    @classmethod
    def from_weights(cls, weights: Sequence[float]) -> "SourceBlend":
        """Exact where whole numbers with a sum of at most 65536 are in the same ratio, else rounded to 1/65536."""
        for weight in weights:
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(
                    f"a weight must be a number above 0 ({weight}); leave the source out instead of giving it 0"
                )
        # By way of the decimal text: 0.7 means seven tenths, not the double nearest to it.
        parts = [Fraction(repr(float(weight))) for weight in weights]
        shares = [part / sum(parts) for part in parts]
        period = math.lcm(*(share.denominator for share in shares))
        if period <= MAX_PERIOD:
            return cls(counts=tuple(int(share * period) for share in shares))
        # Largest remainders: the counts add up to the period, and each is off by less than one.
        counts = [int(share * MAX_PERIOD) for share in shares]
        remainders = sorted(range(len(shares)), key=lambda source: counts[source] - shares[source] * MAX_PERIOD)
        for source in remainders[: MAX_PERIOD - sum(counts)]:
            counts[source] += 1
        if 0 in counts:
            source = counts.index(0)
            raise ValueError(
                f"weight {weights[source]} is too small beside the others (share {float(shares[source]):.2g}, "
                f"the least is 1/{MAX_PERIOD}); raise it or leave the source out"
            )
        return cls(counts=tuple(counts))

    @property
    def period(self) -> int:
        return sum(self.counts)

    def source_and_index(self, index: AnyIntArray) -> tuple[IntArray, IntArray]:
        """The source that serves each global index, and how many earlier samples that source served."""
        index = validate_indices(index)
        sources, ranks = self._table
        place = index % self.period
        source = sources[place]
        return source, index // self.period * np.array(self.counts, np.int64)[source] + ranks[place]

    @cached_property
    def _table(self) -> tuple[IntArray, IntArray]:
        """See [Note: a mixture without a counter]. Equal wishes are equal doubles, and go by the source's number."""
        source = np.repeat(np.arange(len(self.counts), dtype=np.int64), self.counts)
        rank = np.concatenate([np.arange(count, dtype=np.int64) for count in self.counts])
        wish = (2 * rank + 1) / np.array(self.counts)[source]
        order = np.lexsort((source, wish))
        return source[order], rank[order]
