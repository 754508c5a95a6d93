"""The order of samples as a pure function: (seed, global index) -> (epoch, sample), in O(1) and without state.

[Note: a shuffle without a list]
A shuffled list of n numbers costs n numbers of memory and, on resume, the time to rebuild it. Instead the sample at a
position is computed. A Feistel network is a permutation of 2^b numbers whatever its round function is, since each
round only XORs one half of the bits with a function of the other half, and XORing again undoes it:

        high        low                1. b = the bits that n - 1 needs, at least 6.
         |           |                 2. Split the b bits into a high and a low part.
        XOR <- F0 ---+                 3. Alternately XOR one part with a keyed hash of the other, eight times.
         |           |                 4. If the result is not below n, put it in again (cycle walking). The walk
         +--- F1 -> XOR                   follows a cycle that started below n, so it comes back below n, and what
         |           |                    is left is a permutation of range(n). For n > 32 it takes fewer than two tries
        ...  8 rounds ...                 on average.

The key is a hash of (seed, stream, epoch), so every epoch and every source has its own order. A resumed run must see
the original order, so these numbers may never change: tests/data/test_sample_order.py pins them.
"""

import numpy as np
import numpy.typing as npt

from echelon.data.token_file import AnyIntArray, IntArray

_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_Words = npt.NDArray[np.uint64]


def epoch_and_sample(index: AnyIntArray, *, num_samples: int, seed: int, stream: int = 0) -> tuple[IntArray, IntArray]:
    """The epoch and the sample that each global index stands for. Each epoch visits every sample once."""
    index = validate_indices(index)
    if num_samples < 1:
        raise ValueError(f"an order needs at least one sample (num_samples {num_samples}); give a longer token file")
    epoch = index // num_samples
    # One word per index and not one key: a batch may span the end of an epoch.
    key = _absorb(_absorb(_absorb(np.zeros(1, np.uint64), seed), stream), epoch.astype(np.uint64))
    return epoch, feistel_permute(index % num_samples, num_samples, key)


def sample_indices_of_step(step: int, batch: int) -> range:
    """The global sample indices of one step; `batch` counts sequences over all ranks."""
    return range(step * batch, (step + 1) * batch)


def rank_indices(indices: range, rank: int, num_ranks: int) -> range:
    """The block of a batch that one data-parallel rank reads. The blocks of all ranks in order are the batch."""
    if not 0 <= rank < num_ranks or len(indices) % num_ranks:
        raise ValueError(
            f"a batch must divide over its data-parallel ranks (batch {len(indices)}, rank {rank} of {num_ranks}); "
            "change batch or dp"
        )
    size = len(indices) // num_ranks
    return indices[rank * size : (rank + 1) * size]


def feistel_permute(index: IntArray, num: int, key: _Words) -> IntArray:
    """The keyed permutation of range(num), at the given positions. See [Note: a shuffle without a list]."""
    # At least 6: with one or two bits per half, some orders of a tiny set would be much likelier than others.
    bits = max(6, (num - 1).bit_length())
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    result = index.astype(np.uint64)
    key = np.broadcast_to(key, result.shape)
    walking = np.arange(result.size)
    while walking.size:
        keys = key[walking]
        high, low = result[walking] >> low_bits, result[walking] & low_mask
        for round_ in range(0, _ROUNDS, 2):
            high ^= _hash(low + keys, round_) & high_mask
            low ^= _hash(high + keys, round_ + 1) & low_mask
        result[walking] = (high << low_bits) | low
        walking = walking[result[walking] >= num]
    return result.astype(np.int64)


def validate_indices(index: AnyIntArray) -> IntArray:
    """Convert sample indices to a one-dimensional int64 array without negative values."""
    index = np.asarray(index)
    if index.ndim != 1 or (index.size and (index.dtype.kind not in "iu" or int(index.min()) < 0)):
        raise ValueError(
            f"sample indices must be one dimension of integers from 0 ({index.dtype}, shape {index.shape}); "
            "pass the indices of one batch"
        )
    return index.astype(np.int64)


def _absorb(key: _Words, value: "int | _Words") -> _Words:
    word = np.uint64(value & _MASK) if isinstance(value, int) else value
    return _hash(key ^ _hash(np.atleast_1d(word), 1), 2)


def _hash(word: _Words, salt: int) -> _Words:
    """splitmix64: each input bit changes each output bit with probability one half."""
    word = word + np.uint64((salt + 1) * _GOLDEN & _MASK)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
