"""Random numbers that each rank generates for its own shard, the same for every sharding.

Element `i` of an array, counted row by row, is made of words `w i` to `w i + w - 1` of the stream
of a key, `w` words an element. The generator finds any word without those before it (its counter
is the word's place), so a rank draws the rows that it has and no others. The words are NumPy's
Philox, in both libraries, on every device.

Source: Salmon, Moraes, Dror and Shaw, Parallel Random Numbers: As Easy as 1, 2, 3, 2011.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from reshard.dtypes import DType
from reshard.errors import UsageError
from reshard.spmd.core.local_work import Function, LocalWork

_WORDS_AT_ONCE = 4
"""The words that one count of Philox makes."""
_CHILDREN = 1 << 63
"""In a counter's last word: the stream of the keys that are made of a key, not of its numbers."""
_DIGITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}


def random_numbers(work: LocalWork) -> list[Function]:
    """Numbers at the places that a rank has of the second operand, by the key, the first.

    A third operand says how many arrays of the second one's shape come before.

    Raises UsageError where that is less than none.
    """
    options = work.attributes
    kind, dtype = options["distribution"], options["dtype"]
    like = work.operands[1]
    shape = () if like is None else like.shape
    starts = zip(*(work.starts_here(1, axis) for axis in range(len(shape))), strict=True)

    def draw(key: Any, place: Any, *before: Any, start: tuple[int, ...]) -> Any:
        skipped = math.prod(shape) * sum(map(int, before))
        if skipped < 0:
            raise UsageError(
                f"random numbers of part {int(before[0])} of a key; a whole number of 0 or more "
                "was expected"
            )
        words = _draw_words(
            [int(word) % (1 << 64) for word in work.library.numpy(key)],
            [
                (first + skipped, count)
                for first, count in _find_runs(tuple(place.shape), start, shape)
            ],
            words_each=2 if kind == "normal" else 1,
            high=_CHILDREN if kind == "key" else 0,
        )
        made = _make_numbers(words, kind, dtype, options)
        return work.library.array(made.reshape(tuple(place.shape)), dtype, beside=key)

    every = list(starts) if shape else [()] * len(work.ranks)
    return [partial(draw, start=start) for start in every]


def _find_runs(
    here: Sequence[int], start: Sequence[int], shape: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """The stretches `(first, count)` of an array's elements, row by row, that a part has."""
    if 0 in here:
        return
    # The dimensions behind `last` are whole in the part: their rows follow one another.
    last = len(shape) - 1
    while last > 0 and here[last] == shape[last]:
        last -= 1
    steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    count = math.prod(here[max(last, 0) :])
    first = sum(at * step for at, step in zip(start, steps, strict=True))
    for place in itertools.product(*map(range, here[: max(last, 0)])):
        yield first + sum(at * step for at, step in zip(place, steps, strict=False)), count


def _draw_words(
    key: Sequence[int], runs: Sequence[tuple[int, int]], words_each: int, high: int
) -> np.ndarray[Any, Any]:
    """The words of the elements in some stretches, which follow each other."""
    made = np.empty(sum(count for _, count in runs) * words_each, np.uint64)
    stream = np.random.Philox(
        key=np.array(key, np.uint64), counter=np.array([0, 0, 0, high], np.uint64)
    )
    at, counted = 0, 0
    for first, count in runs:
        block, skipped = divmod(first * words_each, _WORDS_AT_ONCE)
        stream.advance(block - counted)
        # Words of one count are drawn all together, so that the next stretch begins at a count.
        wanted = count * words_each
        counts = -(-(skipped + wanted) // _WORDS_AT_ONCE)
        words = stream.random_raw(counts * _WORDS_AT_ONCE)
        made[at : at + wanted] = words[skipped : skipped + wanted]
        at, counted = at + wanted, block + counts
    return made


def _make_numbers(
    words: np.ndarray[Any, Any], kind: str, dtype: DType, options: dict[str, Any]
) -> np.ndarray[Any, Any]:
    """Numbers of a distribution from words of 64 bits."""
    if kind == "key":
        return np.asarray(words.view(np.int64))
    if kind == "integers":
        count = options["count"]
        within = words if count == 1 << 64 else words % np.uint64(count)
        # Wrapping around in 64 bits, as the sum may pass the middle.
        return np.asarray((within + np.uint64(options["least"] % (1 << 64))).view(np.int64))
    if kind == "uniform":
        # As many bits as the type has digits, so that none is rounded to 1.
        digits = _DIGITS[dtype.name]
        return np.asarray((words >> np.uint64(64 - digits)) * 2.0**-digits, dtype.numpy)
    # Normal ones, by Box and Muller, from two uniform ones: the first is above 0.
    low, turn = ((words >> np.uint64(11)) * 2.0**-53).reshape(-1, 2).T
    found = np.sqrt(-2 * np.log1p(-low)) * np.cos(2 * math.pi * turn)
    return np.asarray(found, dtype.numpy)
