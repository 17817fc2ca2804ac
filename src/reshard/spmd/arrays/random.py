"""Random numbers by key: the same for every sharding, number of ranks, runner and library.

A key is an array of two integers. The same key gives the same numbers: a program creates it, calls
`split`, and uses each of the results once. Each rank generates the numbers of its own shard, and
nothing moves. For `sp.grad` they are constants; under `sp.trace` a key may be an argument.

    key = sp.random.key(0)
    first, second = sp.random.split(key)
    w = sp.random.normal(first, (512, 2048), dtype="float32", spec=reshard.spec(mesh, "-, tp"))

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
from numbers import Real
from operator import index
from typing import Any

import numpy as np

from reshard._validation import check_int
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import SpecError, UsageError
from reshard.sharding import ShardingSpec
from reshard.spmd.arrays.creation import read_shape
from reshard.spmd.arrays.sharded_array import ShardedArray, array
from reshard.spmd.core.array_type import ArrayType, plain_spec, settled
from reshard.spmd.core.local_work import Function, LocalWork, have_plain_parts
from reshard.spmd.core.operator import ship
from reshard.spmd.core.result_types import asked, kind_of
from reshard.spmd.ops import data_types, elementwise, reductions
from reshard.spmd.ops.arguments import as_whole, explain_errors, of_arrays, portion
from reshard.spmd.ops.elementwise import add, maximum, multiply, operands, whole
from reshard.spmd.ops.indexing import take
from reshard.spmd.ops.ordering import argsort
from reshard.spmd.rules.rule_builder import Inferred, Shape, axis_of, counted, from_pattern
from reshard.spmd.shards.array_value import ArrayValue
from reshard.spmd.shards.operation_call import call
from reshard.spmd.shards.runner import in_process, runner_for

__all__ = [
    "bernoulli",
    "categorical",
    "fold_in",
    "integers",
    "key",
    "normal",
    "permutation",
    "split",
    "uniform",
]

_FLOATS = ("float64", "float32", "float16", "bfloat16")
_ANY_PLACE = np.int8(0)


def key(seed: int) -> ShardedArray:
    """Create a key from a seed, an integer from 0 to `2**64 - 1`.

    Raises UsageError for another seed.

    >>> key(7)
    <ShardedArray int64[2]>
    """
    number = as_whole(seed)
    if number is None or not 0 <= number < 1 << 64:
        raise UsageError(f"a seed of {seed!r}; a whole number from 0 to 2**64 - 1 was expected")
    return array(np.array([number, 0], np.uint64).view(np.int64), runner=runner_for())


def split(key: Any, count: int = 2) -> tuple[Any, ...]:
    """Derive several independent keys from a key.

    Split a key, and use the parts: the same key gives the same parts.

    >>> import reshard.spmd as sp
    >>> first, second = sp.random.split(sp.random.key(7))
    >>> bool(sp.all(first == second))
    False
    """
    number = check_int(count, "number of keys", minimum=1)
    keys = _draw(key, (number, 2), None, "key", "int64")
    return tuple(keys[place] for place in range(number))


def _draw(
    key: Any,
    shape: int | Sequence[int],
    spec: ShardingSpec | None,
    distribution: str,
    dtype: str,
    *before: Any,
    **options: int,
) -> Any:
    """Return numbers of a distribution, in a sharding. Raises UsageError if `key` is not a key.

    Args:
        before: the number of arrays of that shape that come before in the key's stream.
    """
    kind = key.type if isinstance(key, ArrayValue) else None
    if kind is None or kind.shape != (2,) or kind.dtype is not data_types.int64:
        raise UsageError(
            f"random numbers by {key!r}, a {type(key).__name__}; a key was expected: "
            "sp.random.key(seed)"
        )
    sizes = read_shape(shape)
    target = None if spec is None else plain_spec(spec)
    named = {"distribution": distribution, "dtype": as_dtype(dtype), **options}
    numbers = call("random_numbers", (key, _make_place(key, sizes, target), *before), None, named)
    # If parts are not intervals, the numbers are drawn whole, and then resharded.
    return numbers if target is None or numbers.type.spec is target else numbers.shard(target)


def _make_place(key: Any, shape: tuple[int, ...], spec: ShardingSpec | None) -> Any:
    """Return an array with the shape and sharding of the numbers: a single broadcast element."""
    if spec is not None and spec.partial_axes:
        raise UsageError(
            f"random numbers in `{spec}`, whose sums are pending; give a sharding without"
        )
    # In a trace, an array of which only the sharding is used is a constant.
    runner = in_process("numpy") if key.runner.is_abstract else key.runner
    like = None if key.runner.is_abstract else key._shards[0]
    element = runner.library.array(_ANY_PLACE, like=like)
    kind = ArrayType(shape, runner.library.dtype_of(element), spec)
    shards = tuple(
        runner.library.namespace.broadcast_to(element, kind.layout.local_shape(rank) or ())
        for rank in runner.ranks(None if spec is None else spec.mesh)
    )
    return type(key).of_shards(kind, shards, runner)


def random_numbers_rule(shapes: Sequence[Shape]) -> Inferred:
    """Infer numbers from a key and an array of their shape, whose elements are not read.

    A third operand, an integer, is the number of arrays of that shape that come before in the key's
    stream.

    >>> print(random_numbers_rule([(2,), (4, 8)]).rule)
    ([k], [i, j]) -> ([i, j]) {i=4, j=8, k=2} need_replication={k}
    """
    counted("random_numbers", shapes[:2], 2)
    key, _, *before = shapes
    if key != (2,):
        raise SpecError(f"a key of shape {list(key)}; one of sp.random.key(seed) was expected")
    if before not in ([], [()]):
        raise SpecError(f"random_numbers of {before}; one number was expected at most")
    return from_pattern(f"_, *i{', ' * len(before)} -> *i", shapes, adjusted="i")


def _draw_kernel(work: LocalWork) -> list[Function]:
    """Return kernels that draw the numbers of each rank's part of the second operand.

    The first operand is the key. A third operand is the number of arrays of the second operand's
    shape that come before.

    The kernels raise UsageError if that number is negative.
    """
    options = work.attributes
    kind, dtype = options["distribution"], options["dtype"]
    operand = work.operands[1]
    shape = () if operand is None else operand.shape
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
        numbers = _make_numbers(words, kind, dtype, options)
        return work.library.array(numbers.reshape(tuple(place.shape)), dtype, like=key)

    all_starts = list(starts) if shape else [()] * len(work.ranks)
    return [partial(draw, start=start) for start in all_starts]


def _draw_words(
    key: Sequence[int], runs: Sequence[tuple[int, int]], words_each: int, high: int
) -> np.ndarray[Any, Any]:
    """Return the words of the elements in intervals, concatenated."""
    output = np.empty(sum(count for _, count in runs) * words_each, np.uint64)
    stream = np.random.Philox(
        # The last word of the counter is reached only after 2**192 draws, so it separates streams.
        key=np.array(key, np.uint64),
        counter=np.array([0, 0, 0, high], np.uint64),
    )
    at, counted = 0, 0
    for first, count in runs:
        # `advance` adds to the counter, which stands for four words, and drops words that were
        # buffered.
        block, skipped = divmod(first * words_each, _WORDS_AT_ONCE)
        stream.advance(block - counted)
        # The words of a count are drawn together, so that each interval starts at a count.
        word_count = count * words_each
        counts = -(-(skipped + word_count) // _WORDS_AT_ONCE)
        words = stream.random_raw(counts * _WORDS_AT_ONCE)
        output[at : at + word_count] = words[skipped : skipped + word_count]
        at, counted = at + word_count, block + counts
    return output


_WORDS_AT_ONCE = 4
"""The number of words per count of Philox."""


def _make_numbers(
    words: np.ndarray[Any, Any], kind: str, dtype: DType, options: dict[str, Any]
) -> np.ndarray[Any, Any]:
    """Return numbers of a distribution from words of 64 bits."""
    if kind == "key":
        return np.asarray(words.view(np.int64))
    if kind == "integers":
        count = options["count"]
        within = words if count == 1 << 64 else words % np.uint64(count)
        # Computed with wraparound in 64 bits, because the sum may overflow.
        return np.asarray((within + np.uint64(options["least"] % (1 << 64))).view(np.int64))
    if kind == "uniform":
        # As many bits as the type's significand has, so that no number is rounded to 1.
        # A float64 cannot count 64 bits exactly.
        digits = _DIGITS[dtype.name]
        return np.asarray((words >> np.uint64(64 - digits)) * 2.0**-digits, dtype.numpy)
    # Normal numbers, by Box and Muller, from two uniform numbers, the first of which is above 0.
    low, turn = ((words >> np.uint64(11)) * 2.0**-53).reshape(-1, 2).T
    # The logarithm is finite, since uniform numbers are below 1.
    normals = np.sqrt(-2 * np.log1p(-low)) * np.cos(2 * math.pi * turn)
    return np.asarray(normals, dtype.numpy)


_DIGITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
_CHILDREN = 1 << 63
"""The last word of a counter in the stream of keys derived from a key, not of its numbers."""


def _find_runs(
    here: Sequence[int], start: Sequence[int], shape: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Return the intervals `(first, count)` of an array's elements, row by row, in a part."""
    if 0 in here:
        return
    # The dimensions after `last` are whole in the part: their rows are contiguous.
    last = len(shape) - 1
    while last > 0 and here[last] == shape[last]:
        last -= 1
    steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    count = math.prod(here[max(last, 0) :])
    first = sum(at * step for at, step in zip(start, steps, strict=True))
    for place in itertools.product(*map(range, here[: max(last, 0)])):
        yield first + sum(at * step for at, step in zip(place, steps, strict=False)), count


ship(
    "random_numbers",
    random_numbers_rule,
    ([(2,), (4, 8)], {}),
    family="creation",
    local=_draw_kernel,
    knows_place=have_plain_parts,
    result_types=asked,
    note="a part draws the numbers of its places: the same for every sharding",
    is_constant=True,
)


@of_arrays
def fold_in(key: Any, number: Any) -> Any:
    """Derive a key from a key and a number, for example of a layer or a step.

    Args:
        key: the key to derive from.
        number: an integer from 0 to `2**63 - 1`, or a zero-dimensional array of an integer, such as
            a step that is an argument of a program.

    Raises UsageError for another number; for an array, when its element is read.

    >>> import reshard.spmd as sp
    >>> key = sp.random.key(7)
    >>> bool(sp.all(sp.random.fold_in(key, 1) == sp.random.split(key)[1]))
    True
    """
    if not isinstance(number, ArrayValue):
        original, number = number, as_whole(number)
        if number is None or not 0 <= number < 1 << 63:
            raise UsageError(
                f"a key of number {original!r}; a whole number from 0 to 2**63 - 1 was expected"
            )
    elif number.type.shape or kind_of(number.type.dtype) not in (
        "signed integer",
        "unsigned integer",
    ):
        raise UsageError(
            f"a key of number {number.type}; a whole number was expected, or an array of one "
            "without dimensions"
        )
    # Only the words of a derived key: words before it are never drawn.
    return _draw(key, (2,), None, "key", "int64", number)


def uniform(
    key: Any,
    shape: int | Sequence[int] = (),
    *,
    low: float = 0.0,
    high: float = 1.0,
    dtype: object = "float64",
    spec: ShardingSpec | None = None,
) -> Any:
    """Draw uniform numbers from `low` up to `high`, which is excluded except for rounding.

    >>> import reshard, reshard.spmd as sp
    >>> cut = reshard.spec(reshard.DeviceMesh.of(x=2), "x")
    >>> numbers = sp.random.uniform(sp.random.key(0), 5, spec=cut)
    >>> bool(sp.all(numbers == sp.random.uniform(sp.random.key(0), 5)))
    True
    """
    if not all(isinstance(bound, Real) for bound in (low, high)):
        raise UsageError(f"numbers from {low!r} to {high!r}; two numbers were expected")
    numbers = _draw(key, shape, spec, "uniform", _read_float(dtype))
    # Neither array operation would change a number, and both would take time.
    if (low, high) == (0, 1):
        return numbers
    return add(multiply(numbers, high - low), low)


def _read_float(dtype: object) -> str:
    """Return the name of a floating type. Raises UsageError for other types."""
    element_type = as_dtype(dtype)
    if element_type.name not in _FLOATS:
        raise UsageError(
            f"random numbers of dtype {element_type.name}; one of {', '.join(_FLOATS)} was expected"
        )
    return element_type.name


def normal(
    key: Any,
    shape: int | Sequence[int] = (),
    *,
    dtype: object = "float64",
    spec: ShardingSpec | None = None,
) -> Any:
    """Draw numbers of the standard normal distribution."""
    return _draw(key, shape, spec, "normal", _read_float(dtype))


def integers(
    key: Any,
    shape: int | Sequence[int],
    low: int,
    high: int,
    *,
    spec: ShardingSpec | None = None,
) -> Any:
    """Draw integers (`int64`) from `low` up to, but not including, `high`.

    The probabilities of `n` numbers differ by at most a relative `n / 2**64`.

    Raises UsageError if the range is empty.
    """
    with explain_errors(f"integers from {low!r} to {high!r}", "give two whole numbers"):
        least, end = index(low), index(high)
    limits = np.iinfo(np.int64)
    if least >= end or least < limits.min or end - 1 > limits.max:
        raise UsageError(
            f"integers from {low} to {high}; `low` below `high` was expected, both within int64"
        )
    return _draw(key, shape, spec, "integers", "int64", least=least, count=end - least)


@of_arrays
def bernoulli(
    key: Any,
    p: Any = 0.5,
    shape: int | Sequence[int] | None = None,
    *,
    spec: ShardingSpec | None = None,
) -> Any:
    """Draw booleans that are true with probability `p`, a number or an array.

    The result has the shape and the sharding of an array `p`, unless it is given one, which `p`
    broadcasts to.
    """
    if isinstance(p, ArrayValue):
        shape = p.type.shape if shape is None else shape
        spec = settled(p.type).spec if spec is None and read_shape(shape) == p.type.shape else spec
        if not _broadcasts(p.type.shape, read_shape(shape)):
            raise UsageError(
                f"probabilities of shape {list(p.type.shape)} for numbers of shape "
                f"{list(read_shape(shape))}; give a shape that they broadcast to"
            )
    else:
        portion("a probability of ", p)
    drawn = _draw(key, () if shape is None else shape, spec, "uniform", "float64")
    return elementwise.less(drawn, p)


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Return whether an array of a shape consists of repetitions of an array of another shape."""
    sizes = zip(shape[::-1], target[::-1], strict=False)
    return len(shape) <= len(target) and all(size in (1, other) for size, other in sizes)


@of_arrays
def categorical(key: Any, logits: Any, *, axis: int = -1) -> Any:
    """Draw indices along an axis, with the probabilities of `softmax`.

    The axis may be sharded: ranks exchange the maximum of each shard and its index, not the logits.

    Invalid elements do not raise an error, because programs do not read elements: if any logit is
    NaN, the last class is drawn, and if all are `-inf`, the first. Check with
    `sp.any(sp.isnan(logits))`.

    Raises UsageError for an axis that does not exist, or without classes.

    >>> import reshard.spmd as sp
    >>> logits = sp.array([[0.0, 50.0, 0.0], [float("nan"), 50.0, 0.0]])
    >>> sp.random.categorical(sp.random.key(0), logits).to_dense().tolist()
    [1, 2]
    """
    place = axis_of(logits.ndim, axis)
    size = logits.shape[place]
    if not size:
        raise UsageError(f"categorical of logits of shape {list(logits.shape)}; give one class")
    logits, key = operands(logits, key)
    drawn = _draw(key, logits.shape, settled(logits.type).spec, "uniform", "float64")
    # By Gumbel: each class has the maximum of logits plus noise with its probability. The noise of
    # a 0 would be infinite.
    noise = -elementwise.log(-elementwise.log(maximum(drawn, 2.0**-54)))
    noisy = add(data_types.astype(logits, data_types.float64), noise)
    most = reductions.max(noisy, axis=place, keepdims=True)
    # The first position of the maximum; the last class without a maximum (NaN).
    shape = [size if dim == place else 1 for dim in range(logits.ndim)]
    places = whole(noisy, np.arange(size).reshape(shape))
    indices = elementwise.where(elementwise.equal(noisy, most), places, size - 1)
    return reductions.min(indices, axis=place)


@of_arrays
def permutation(key: Any, x: Any, *, axis: int = 0) -> Any:
    """Permute the integers from 0 to `x - 1`, or slices along an axis, randomly."""
    is_array = isinstance(x, ArrayValue)
    place = axis_of(x.ndim, axis) if is_array else 0
    size = x.shape[place] if is_array else check_int(x, "length of a permutation")
    limits = np.iinfo(np.int64)
    words = _draw(
        key, (size,), None, "integers", "int64", least=int(limits.min), count=(1 << 64) - 1
    )
    order = argsort(words)
    return take(x, order, axis=place) if is_array else order


@of_arrays
def dropout(x: Any, key: Any, rate: Any = 0.5, /) -> Any:
    """Set elements to zero with probability `rate`, and divide the others by `1 - rate`.

    The choice does not depend on the sharding. The gradient is zero at the same positions.

    Raises UsageError for a rate that is not from 0 to 1.

    >>> import reshard.spmd as sp
    >>> sp.dropout(sp.ones(6), sp.random.key(0), 0.5).to_dense().tolist()
    [0.0, 0.0, 0.0, 2.0, 2.0, 0.0]
    """
    rate = portion("dropout at a rate of ", rate)
    if kind_of(x.dtype) != "real floating":
        raise UsageError(f"dropout of {x.type}; an array of real floating numbers was expected")
    x, key = operands(x, key)
    if rate == 0:
        return x
    drawn = _draw(key, x.shape, settled(x.type).spec, "uniform", "float32")
    scaled = multiply(x, 1 / (1 - rate)) if rate < 1 else x
    return elementwise.where(elementwise.greater_equal(drawn, rate), scaled, 0.0)
