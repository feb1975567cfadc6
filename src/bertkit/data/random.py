"""Randomness as a pure function: the same (seed, purpose, epoch, sample, position) always draws the same number.

Philox 4x32-10, Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3. A counter-based
generator has no state, so order, masks and partners are the same for any number of workers or ranks, and after any
resume. The order of an epoch is a Feistel network over the sample numbers: no permutation is ever stored in memory.

Shapes: everything broadcasts; an argument is a number or an integer array of at most 2^32 - 1 (samples: 2^64 - 1).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertkit.arrays import Float64Array, Int64Array, Uint64Array

Counter = int | NDArray[Any]

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10
_IN_TURN = 1024
_BLOCK = 1 << 19
"""Samples that are drawn for at a time, because a draw needs memory for a dozen numbers of each."""


def philox(counter: tuple[Counter, Counter, Counter, Counter], key: tuple[int, int]) -> Uint64Array:
    """Four words of 32 random bits for every counter.

    Args:
        counter: four words of 32 bits each; arrays broadcast against one another.
        key: two words of 32 bits.

    Returns:
        The broadcast shape with a leading axis of 4; each word is in the low half of a uint64.
    """
    words = np.broadcast_arrays(*(np.asarray(word, dtype=np.uint64) & _LOW for word in counter))
    word_0, word_1, word_2, word_3 = words
    key_0, key_1 = key
    for _ in range(_ROUNDS):
        product_0 = word_0 * _MULTIPLIER_0
        product_1 = word_2 * _MULTIPLIER_1
        word_0 = (product_1 >> _HALF) ^ word_1 ^ np.uint64(key_0)
        word_1 = product_1 & _LOW
        word_2 = (product_0 >> _HALF) ^ word_3 ^ np.uint64(key_1)
        word_3 = product_0 & _LOW
        key_0 = (key_0 + _WEYL_0) & 0xFFFFFFFF
        key_1 = (key_1 + _WEYL_1) & 0xFFFFFFFF
    return np.stack([word_0, word_1, word_2, word_3])


def derived_seed(*parts: object) -> int:
    """A seed of 64 bits that depends on all parts: a seed, and what is drawn with it.

    `torch.Generator.manual_seed` takes 63 of them: shift by one.
    """
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "little")


class Draw:
    """Random draws for one seed: each purpose is an independent stream, addressed by epoch, sample and position.

    A scope separates draws with the same purposes and addresses, such as those of two stages of a run.

    Example:
        >>> draw = Draw(seed=1)
        >>> bool(draw.uniform("mask", sample=7, position=3) == draw.uniform("mask", sample=7, position=3))
        True
    """

    def __init__(self, seed: int, scope: str = "") -> None:
        self.seed = seed
        self.scope = scope

    def _key(self, purpose: str) -> tuple[int, int]:
        digest = hashlib.sha256(f"{self.seed}/{self.scope}/{purpose}".encode()).digest()
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")

    def bits(self, purpose: str, *, epoch: Counter = 0, sample: Counter = 0, position: Counter = 0) -> Uint64Array:
        """64 random bits at every address."""
        sample = np.asarray(sample, dtype=np.uint64)
        if sample.ndim == 1 and sample.size > _BLOCK and np.ndim(position) == np.ndim(epoch) == 0:
            blocks = np.split(sample, range(_BLOCK, sample.size, _BLOCK))
            return np.concatenate([self.bits(purpose, epoch=epoch, sample=own, position=position) for own in blocks])
        words = philox((position, sample & _LOW, sample >> _HALF, epoch), self._key(purpose))
        return np.asarray((words[1] << _HALF) | words[0])

    def uniform(self, purpose: str, *, epoch: Counter = 0, sample: Counter = 0, position: Counter = 0) -> Float64Array:
        """Uniform numbers in [0, 1), on a grid of 2^-53."""
        bits = self.bits(purpose, epoch=epoch, sample=sample, position=position)
        return np.asarray((bits >> np.uint64(11)) * 2.0**-53)

    def uniform_in_turn(self, purpose: str) -> Iterator[float]:
        """`uniform` of the samples 0, 1, 2, ... without end, computed a thousand at a time: a call for one number takes
        a tenth of the time for a thousand."""
        for first in count(0, _IN_TURN):
            yield from self.uniform(purpose, sample=np.arange(first, first + _IN_TURN)).tolist()

    def integers(
        self, purpose: str, bound: Counter, *, epoch: Counter = 0, sample: Counter = 0, position: Counter = 0
    ) -> Int64Array:
        """Uniform integers in [0, bound) for a bound from 1 to 2^32; the bias is below bound / 2^53."""
        uniform = self.uniform(purpose, epoch=epoch, sample=sample, position=position)
        return np.asarray((uniform * bound).astype(np.int64))

    def permuted(self, purpose: str, index: Counter, *, size: int, epoch: int = 0) -> Int64Array:
        """The image of each index under a random permutation of range(size), in constant memory.

        A balanced Feistel network of six rounds (Luby and Rackoff 1988) over the smallest even number of bits that can
        represent `size`; an image beyond `size` follows the cycle until it falls inside (Black and Rogaway 2002).
        """
        half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        mask = np.uint64((1 << half_bits) - 1)
        shift = np.uint64(half_bits)
        image = np.atleast_1d(np.asarray(index, dtype=np.uint64)).copy()
        outside = np.arange(image.size)
        while outside.size:
            left, right = image[outside] >> shift, image[outside] & mask
            for round_number in range(6):
                noise = self.bits(purpose, epoch=epoch, sample=right, position=round_number) & mask
                left, right = right, left ^ noise
            image[outside] = (left << shift) | right
            outside = outside[image[outside] >= size]
        return image.astype(np.int64).reshape(np.shape(index))

    def permuted_range(self, purpose: str, first: int, stop: int, *, size: int, epoch: int = 0) -> Int64Array:
        """`permuted` of range(first, stop), computed a thousand at a time and kept for the next call: a batch of 32
        samples takes as long as a thousand."""
        blocks = range(first // _IN_TURN, -(-stop // _IN_TURN))
        image = np.concatenate(
            [np.empty(0, np.int64), *(_block(self.seed, self.scope, purpose, block, size, epoch) for block in blocks)]
        )
        start = blocks.start * _IN_TURN
        return image[first - start : stop - start]


@lru_cache(maxsize=16)
def _block(seed: int, scope: str, purpose: str, block: int, size: int, epoch: int) -> Int64Array:
    """The images of the indices of a block; see `Draw.permuted_range`."""
    index = np.arange(block * _IN_TURN, min((block + 1) * _IN_TURN, size))
    return Draw(seed, scope).permuted(purpose, index, size=size, epoch=epoch)
