"""What does one rank compute of an operation?

Most operators are run on each rank's parts as they are: the library's function of that name, with
the operator's attributes. The others are here: those that are told a shape (each rank its own),
those whose part may be empty, and those with other names or arguments in the library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from typing import Any

import numpy as np

from reshard.dtypes import DType
from reshard.errors import ArrayIndexError, UsageError
from reshard.layout import Layout
from reshard.sharding import ShardingSpec
from reshard.spmd.shards import window_functions
from reshard.spmd.shards.array_type import ArrayType
from reshard.spmd.shards.library import Library

Function = Callable[..., Any]


@dataclass(frozen=True)
class LocalWork:
    """An operation for which every rank here needs its function.

    Args:
        name: of the operator.
        attributes: of the operator, its options among them.
        operands: types with the shardings that the operator runs with; None for a number.
        result_specs, result_shapes: of the results; empty where only the outcome tells.
        ranks: that are here.
        library: that computes.
        options: names of attributes that the operator's rule does not ask for.
    """

    name: str
    attributes: dict[str, Any]
    operands: tuple[ArrayType | None, ...]
    result_specs: tuple[ShardingSpec, ...]
    result_shapes: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]
    library: Library
    options: tuple[str, ...] = ()

    @cached_property
    def result_layouts(self) -> tuple[Layout, ...]:
        """Where the results' elements are."""
        return tuple(
            spec.layout(shape)
            for spec, shape in zip(self.result_specs, self.result_shapes, strict=True)
        )

    def result_shapes_here(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """The first result's shape on each rank; `shape` where it is not sharded."""
        if not self.result_specs:
            return [tuple(shape)] * len(self.ranks)
        layout = self.result_layouts[0]
        return [layout.local_shape(rank) or () for rank in self.ranks]

    def starts_here(self, operand: int, axis: int) -> list[int]:
        """Where each rank's part of an operand begins along an axis, 0 for an empty part."""
        one = self.operands[operand]
        if one is None or one.spec is None:
            return [0] * len(self.ranks)
        boxes = [one.layout.boxes(rank) for rank in self.ranks]
        return [box[0].start[axis] if box else 0 for box in boxes]

    def is_cut(self, operand: int, axis: int) -> bool:
        """Whether ranks have different parts of an operand's axis."""
        one = self.operands[operand]
        return one is not None and one.spec is not None and bool(one.spec.dim_specs[axis].levels)

    def operand_shapes_here(self, number: int = 0) -> list[tuple[int, ...]]:
        """An operand's shape on each rank."""
        one = self.operands[number]
        if one is None:
            return [()] * len(self.ranks)
        if one.spec is None:
            return [one.shape] * len(self.ranks)
        return [one.layout.local_shape(rank) or () for rank in self.ranks]


def local_functions(work: LocalWork) -> list[Function]:
    """The function that each rank here applies to its parts.

    Raises UsageError for an operator that the library has not.
    """
    made = _MAKERS.get(work.name, _as_it_is)(work)
    return made if isinstance(made, list) else [made] * len(work.ranks)


def _found(work: LocalWork, place: Any, name: str) -> Function:
    function: Function | None = getattr(place, name, None)
    if function is None:
        raise UsageError(f"operator {work.name!r} is none of {work.library.name}'s")
    return function


def _own(work: LocalWork) -> dict[str, Any]:
    """The attributes, with element types as the library calls them."""
    return {
        name: work.library.own_dtype(value) if isinstance(value, DType) else value
        for name, value in work.attributes.items()
    }


def _as_it_is(work: LocalWork) -> Function:
    function = _found(work, work.library.namespace, work.name)
    attributes = _own(work)
    return partial(function, **attributes) if attributes else function


def _of_linalg(work: LocalWork) -> Function:
    function = _found(work, work.library.namespace.linalg, work.name)
    return partial(function, **_own(work)) if work.attributes else function


def _of_fft(work: LocalWork) -> Function:
    names = {"axis": "axes", "n": "s"} if work.name.endswith("fftn") else {}
    options = {names.get(name, name): value for name, value in work.attributes.items()}
    function = partial(_found(work, work.library.namespace.fft, work.name), **options)
    if work.library.name == "numpy":
        return function
    by_numpy = partial(getattr(np.fft, work.name), **options)

    def transformed(x: Any) -> Any:
        # PyTorch refuses a part without elements.
        if 0 in x.shape:
            return work.library.array(by_numpy(work.library.numpy(x)), beside=x)
        return function(x)

    return transformed


def _told_shape(work: LocalWork) -> list[Function]:
    function = _found(work, work.library.namespace, work.name)
    return [
        lambda x, shape=shape: function(x, shape)
        for shape in work.result_shapes_here(work.attributes["shape"])
    ]


def _joined(work: LocalWork) -> Function:
    function = _found(work, work.library.namespace, work.name)
    axis = work.attributes["axis"]
    return lambda *parts: function(parts, axis=axis)


def _greatest(work: LocalWork) -> list[Function]:
    """A part without elements gives what any number replaces."""
    function = partial(_found(work, work.library.namespace, work.name), **_own(work))
    functions: list[Function] = []
    for shape, result in zip(work.operand_shapes_here(), work.result_shapes_here(()), strict=True):
        is_empty = bool(work.result_specs) and 0 in shape
        functions.append(partial(_identity, work, result) if is_empty else function)
    return functions


def _identity(work: LocalWork, shape: tuple[int, ...], x: Any) -> Any:
    """Least for `max`, greatest for `min`."""
    name = work.library.dtype_of(x).name
    sign = -1.0 if work.name == "max" else 1.0
    if name == "bool":
        value: Any = work.name == "min"
    elif "int" in name:
        value = np.iinfo(name).min if work.name == "max" else np.iinfo(name).max
    else:
        value = sign * np.inf
    return work.library.filled(shape, value, x)


def _cast(work: LocalWork) -> Function:
    own = work.library.own_dtype(work.attributes["dtype"])
    if work.library.name == "numpy":
        return lambda x: x.astype(own)
    return lambda x: x.to(own)


def _imaginary(work: LocalWork) -> Function:
    space, (operand,) = work.library.namespace, work.operands
    is_complex = operand is not None and operand.dtype.name.startswith("complex")
    # PyTorch has none for real numbers, whose imaginary part is 0.
    function: Function = space.imag if is_complex else space.zeros_like
    return function


def _clipped(work: LocalWork) -> Function:
    clip = work.library.namespace.clip
    if work.attributes["bounds"] == ("max",):
        return lambda x, most: clip(x, None, most)
    if work.attributes["bounds"] == ("min",):
        return lambda x, least: clip(x, least, None)
    return lambda x, least, most: clip(x, least, most)


def _sliced(work: LocalWork) -> Function:
    attributes = work.attributes
    (operand,) = work.operands
    shape = () if operand is None else operand.shape
    # A dimension that is taken whole may be cut: each rank takes all of its own part.
    windows = tuple(
        slice(None) if (start, stop, step) == (0, size, 1) else slice(start, stop, step)
        for start, stop, step, size in zip(
            attributes["starts"], attributes["limits"], attributes["strides"], shape, strict=True
        )
    )
    return lambda x: x[windows]


def _sorted(work: LocalWork) -> Function:
    space, axis = work.library.namespace, work.attributes["axis"]
    if work.name == "sort":
        if not work.attributes["descending"]:
            return lambda x: space.sort(x, axis=axis)
        return lambda x: space.flip(space.sort(x, axis=axis), axis=axis)
    if not work.attributes["descending"]:
        return lambda x: space.argsort(x, axis=axis, stable=True)

    def falling(x: Any) -> Any:
        # Equal elements keep their order: turned round, sorted, and turned round again.
        places = space.argsort(space.flip(x, axis=axis), axis=axis, stable=True)
        return x.shape[axis] - 1 - space.flip(places, axis=axis)

    return falling


def index_out_of_range(index: int, size: int) -> ArrayIndexError:
    """What to raise for an index that a dimension has not."""
    expected = f"give one of {-size} to {size - 1}" if size else "it has no elements"
    return ArrayIndexError(f"index {index} of a dimension of size {size}; {expected}")


def _checked_index(work: LocalWork) -> Function:
    space, size = work.library.namespace, work.attributes["size"]
    (operand,) = work.operands
    # Where numbers have no sign, what looks like -1 as an int64 is far out of range.
    is_signed = operand is not None and not operand.dtype.name.startswith("uint")
    least = -size if is_signed else 0

    def counted(indices: Any) -> Any:
        # Narrow ones could not be counted from the start without wrapping around.
        found = space.asarray(indices, dtype=space.int64)
        if 0 in found.shape:
            return found
        for index in (int(space.min(found)), int(space.max(found))):
            if not least <= index < size:
                raise index_out_of_range(index, size)
        return space.where(found < 0, found + size, found)

    return counted


def _taken(work: LocalWork) -> Function | list[Function]:
    take, axis = work.library.namespace.take, work.attributes["axis"]

    def whole(x: Any, indices: Any) -> Any:
        found = take(x, indices.reshape(-1), axis=axis)
        return found.reshape(x.shape[:axis] + indices.shape + x.shape[axis + 1 :])

    return _of_own_rows(work, whole, axis)


def _taken_along(work: LocalWork) -> Function | list[Function]:
    take, axis = work.library.namespace.take_along_axis, work.attributes["axis"]
    return _of_own_rows(work, lambda x, indices: take(x, indices, axis=axis), axis, is_along=True)


def _of_own_rows(
    work: LocalWork, whole: Function, axis: int, is_along: bool = False
) -> Function | list[Function]:
    """Of indices of a table's axis that is cut, each rank finds its own; zero for the others.

    They are counted from the start and in range, by `checked_index`.
    """
    if not work.is_cut(0, axis):
        return whole
    library = work.library
    space = library.namespace

    def here(x: Any, indices: Any, start: int) -> Any:
        size = x.shape[axis]
        own = (indices >= start) & (indices < start + size)
        if not size:
            shape = indices.shape if is_along else None
            rest = x.shape[:axis] + indices.shape + x.shape[axis + 1 :]
            return library.filled(rest if shape is None else shape, 0, x)
        found = whole(x, space.where(own, indices - start, 0 * indices))
        if not is_along:
            own = own.reshape((1,) * axis + own.shape + (1,) * (x.ndim - axis - 1))
        return space.where(own, found, library.filled((), 0, x))

    starts = work.starts_here(0, axis)
    return [lambda x, indices, start=start: here(x, indices, start) for start in starts]


def _diagonal(work: LocalWork) -> Function:
    return partial(work.library.namespace.linalg.diagonal, offset=work.attributes["offset"])


def _windowed(work: LocalWork) -> Function:
    given, library = work.attributes, work.library
    if work.name == "convolution":
        return window_functions.convolution(
            library, given["strides"], given["padding"], given["dilation"]
        )
    return window_functions.pooling(
        library, work.name, given["window"], given["strides"], given["padding"]
    )


def _shape(work: LocalWork, number: int) -> tuple[int, ...]:
    one = work.operands[number]
    return () if one is None else one.shape


def _at_numbers(work: LocalWork) -> Function:
    whole = _shape(work, 0)
    if work.name == "dynamic_slice":
        return window_functions.dynamic_slice(work.attributes["sizes"], whole)
    return window_functions.dynamic_update_slice(work.library, _shape(work, 1), whole)


def _scattered(work: LocalWork) -> Function:
    return window_functions.scatter(work.library, work.attributes["axis"], work.attributes["mode"])


def _running(work: LocalWork) -> Function:
    options = dict(work.attributes)
    parts, axis = options.pop("parts", None), options["axis"]
    scan = partial(_found(work, work.library.namespace, work.name), **options)
    if parts is None or work.is_cut(0, axis):
        # A part that is cut off is all of one that begins anew.
        return scan
    ends = np.cumsum(parts).tolist()
    windows = [
        (slice(None),) * axis + (slice(end - size, end),)
        for end, size in zip(ends, parts, strict=True)
    ]
    concat = work.library.namespace.concat
    return lambda x: concat([scan(x[window]) for window in windows], axis=axis)


def _largest(work: LocalWork) -> Function:
    return window_functions.top_k(work.library, work.attributes["k"], work.attributes["axis"])


def _padded(work: LocalWork) -> Function:
    pairs, value = work.attributes["pad_width"], work.attributes["constant_values"]
    return lambda x: window_functions.padded(work.library, x, pairs, value)


def _einsum(work: LocalWork) -> Function:
    name, text = work.library.name, work.attributes["subscripts"]
    einsum = np.einsum if name == "numpy" else import_module("torch").einsum
    return lambda *arrays: einsum(text, *arrays)


def is_plain(spec: ShardingSpec) -> bool:
    """Whether every part of a dimension is one stretch of it."""
    return all(level.rule.is_default for dim in spec.dim_specs for level in dim.levels)


def stretches(spec: ShardingSpec, axis: int, size: int) -> tuple[int, ...]:
    """The lengths of the parts of a dimension that have elements, in order."""
    cut = spec.dim_specs[axis]
    lengths = cut.table(spec.mesh, size).local_lengths if cut.levels else [size]
    return tuple(int(length) for length in lengths if length)


def knows_where_it_lies(
    name: str,
    specs: Sequence[ShardingSpec],
    shapes: Sequence[tuple[int, ...]],
    attributes: Mapping[str, Any],
) -> bool:
    """Whether a rank's function minds where its part lies, along every factor that asks for it."""
    if not all(map(is_plain, specs)):
        return False
    if attributes.get("parts") is not None:
        axis = attributes["axis"]
        return stretches(specs[0], axis, shapes[0][axis]) == tuple(attributes["parts"])
    return name in ("take", "take_along_axis")


_LINALG = "cholesky det eigh eigvalsh inv qr slogdet solve svd svdvals"
_FFT = "fft ifft rfft irfft hfft ihfft fftn ifftn rfftn irfftn"

_DIVIDE_WHOLE_NUMBERS = frozenset({"floor_divide", "remainder"})


def fails_by_elements(work: LocalWork) -> bool:
    """Whether one rank's elements alone may make an operation fail, so that others must be told.

    An index is out of range, a matrix singular, a whole number divided by 0.
    """
    if not any(one is not None and one.is_cut for one in work.operands):
        # Every rank has the same elements.
        return False
    if work.name in _DIVIDE_WHOLE_NUMBERS:
        return all(one is None or "int" in one.dtype.name for one in work.operands)
    return work.name == "checked_index" or work.name in _LINALG.split()


_MAKERS: dict[str, Callable[[LocalWork], Function | list[Function]]] = {
    **dict.fromkeys(_LINALG.split(), _of_linalg),
    **dict.fromkeys(_FFT.split(), _of_fft),
    "argsort": _sorted,
    "astype": _cast,
    "broadcast_to": _told_shape,
    "checked_index": _checked_index,
    "clip": _clipped,
    "concat": _joined,
    "avg_pool": _windowed,
    "convolution": _windowed,
    "cumulative_prod": _running,
    "cumulative_sum": _running,
    "diagonal": _diagonal,
    "dynamic_slice": _at_numbers,
    "dynamic_update_slice": _at_numbers,
    "einsum": _einsum,
    "imag": _imaginary,
    "max": _greatest,
    "max_pool": _windowed,
    "min": _greatest,
    "pad": _padded,
    "reshape": _told_shape,
    "scatter": _scattered,
    "slice": _sliced,
    "sort": _sorted,
    "take": _taken,
    "take_along_axis": _taken_along,
    "top_k": _largest,
}
