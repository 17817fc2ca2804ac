"""Cases of the operators that move elements, index, order, or see neighbours."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

from spmd.operator_cases import (
    SIZE,
    Array,
    Cases,
    Draw,
    Part,
    Trial,
    _broadcast,
    _called,
    an_axis,
    shapes,
    some_axes,
    values,
)

CASES = Cases()
case, drawn = CASES.case, CASES.drawn

# Movement


@case("permute_dims", _called(np.permute_dims))
def _permute(draw: Draw) -> Trial:
    shape = draw(shapes())
    return Trial([values(draw, shape)], {"axes": tuple(draw(st.permutations(range(len(shape)))))})


def _matrices(draw: Draw) -> Trial:
    return Trial([values(draw, draw(shapes(2, 4)))])


drawn("matrix_transpose", _matrices)


@case("moveaxis", _called(np.moveaxis))
def _moveaxis(draw: Draw) -> Trial:
    shape = draw(shapes(1, 4))
    count = draw(st.integers(0, len(shape)))
    order = [tuple(draw(st.permutations(range(len(shape)))))[:count] for _ in range(2)]
    return Trial([values(draw, shape)], {"source": order[0], "destination": order[1]})


def factored(draw: Draw, size: int, most: int = 4) -> tuple[int, ...]:
    """A shape of so many elements."""
    found: list[int] = []
    while size > 1 and len(found) < most - 1:
        part = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
        found.append(part)
        size //= part
    if size > 1 or not found:
        found.append(size)
    return tuple(draw(st.permutations(found)))


def _local_shape(x: Array, shape: Any, part: Part | None) -> tuple[int, ...]:
    return tuple(shape) if part is None else part.local_result_shapes[0]


@case("reshape", lambda x, shape, part: np.reshape(x, _local_shape(x, shape, part)))
def _reshape(draw: Draw) -> Trial:
    size = draw(st.sampled_from([1, 2, 4, 6, 8, 12, 16, 24, 36, 48, 60, 0]))
    if size == 0:
        rest = draw(shapes(1, 2))
        given = draw(st.permutations([0, *rest]))
        wanted = draw(st.permutations([0, *draw(st.sampled_from([rest, (3,), (2, 7)]))]))
        return Trial([np.zeros(tuple(given), int)], {"shape": tuple(wanted)})
    wanted = list(factored(draw, size))
    if draw(st.booleans()):
        wanted[draw(st.integers(0, len(wanted) - 1))] = -1
    return Trial([values(draw, factored(draw, size))], {"shape": tuple(wanted)})


@case("flatten", lambda x: np.reshape(x, -1))
def _flatten(draw: Draw) -> Trial:
    return Trial([values(draw, draw(shapes()))])


@case("expand_dims", _called(np.expand_dims))
def _expand(draw: Draw) -> Trial:
    shape = draw(shapes())
    return Trial([values(draw, shape)], {"axis": an_axis(draw, len(shape) + 1)})


@case("squeeze", _called(np.squeeze))
def _squeeze(draw: Draw) -> Trial:
    shape = draw(shapes())
    ones = tuple(dim for dim, size in enumerate(shape) if size == 1)
    return Trial([values(draw, shape)], {"axis": draw(st.sampled_from([ones, ones[:1]]))})


@case("broadcast_to", lambda x, shape, part: np.broadcast_to(x, _local_shape(x, shape, part)))
def _broadcast_to(draw: Draw) -> Trial:
    shape = draw(shapes())
    lead = draw(shapes(0, 1))
    tail = tuple(draw(SIZE) if size == 1 else size for size in shape)
    return Trial([values(draw, shape)], {"shape": lead + tail})


def _arrays_to(*operands: Array, part: Part | None) -> tuple[Array, ...]:
    if part is None:
        return tuple(np.broadcast_arrays(*operands))
    wanted = part.local_result_shapes[0]
    return tuple(np.broadcast_to(x, wanted) for x in operands)


@case("broadcast_arrays", _arrays_to)
def _broadcast_all(draw: Draw) -> Trial:
    return Trial([values(draw, shape) for shape in _broadcast(draw, draw(st.integers(1, 3)))])


# Arrangement


@case("concat", lambda *operands, axis: np.concat(operands, axis=axis))
def _concat(draw: Draw) -> Trial:
    shape = draw(shapes(1))
    axis = draw(st.one_of(st.none(), st.integers(-len(shape), len(shape) - 1)))
    operands = []
    for _ in range(draw(st.integers(1, 3))):
        own = list(shape)
        own[axis or 0] = draw(SIZE)
        operands.append(values(draw, tuple(own)))
    return Trial(operands, {"axis": axis})


@case("stack", lambda *operands, axis: np.stack(operands, axis=axis))
def _stack(draw: Draw) -> Trial:
    shape = draw(shapes())
    count = draw(st.integers(1, 3))
    return Trial(
        [values(draw, shape) for _ in range(count)], {"axis": an_axis(draw, len(shape) + 1)}
    )


def _on_axis(draw: Draw) -> Trial:
    shape = draw(shapes(1))
    return Trial([values(draw, shape)], {"axis": an_axis(draw, len(shape))})


drawn("unstack", _on_axis)


@case("split", _called(np.split))
def _split(draw: Draw) -> Trial:
    shape = draw(shapes(1))
    axis = an_axis(draw, len(shape))
    size = shape[axis]
    pieces = draw(
        st.one_of(
            st.sampled_from([d for d in range(1, size + 1) if size % d == 0]),
            st.lists(st.integers(0, size + 1), max_size=3).map(sorted),
        )
    )
    return Trial([values(draw, shape)], {"indices_or_sections": pieces, "axis": axis})


def _flipped(draw: Draw) -> Trial:
    shape = draw(shapes())
    return Trial([values(draw, shape)], {"axis": some_axes(draw, len(shape))})


drawn("flip", _flipped)


@case("roll", _called(np.roll))
def _roll(draw: Draw) -> Trial:
    shape = draw(shapes(1))
    axis = draw(st.one_of(st.none(), st.integers(-len(shape), len(shape) - 1)))
    return Trial([values(draw, shape)], {"shift": draw(st.integers(-3, 3)), "axis": axis})


def _padded(
    x: Array, pad_width: Any, mode: str = "constant", constant_values: int = 0, interior: Any = None
) -> Array:
    for dim, inner in enumerate(interior or ()):
        wide = list(x.shape)
        wide[dim] += inner * max(wide[dim] - 1, 0)
        spread = np.full(wide, constant_values, x.dtype)
        spread[(slice(None),) * dim + (slice(None, None, inner + 1),)] = x
        x = spread
    if mode == "edge":
        return np.pad(x, pad_width, mode=mode) if pad_width else x
    return np.pad(x, pad_width, constant_values=constant_values) if pad_width else x


@case("pad", _padded)
def _pad(draw: Draw) -> Trial:
    shape = draw(shapes())
    widths = [(draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in shape]
    how: dict[str, Any] = draw(
        st.sampled_from([{}, {"constant_values": 1}, {"mode": "edge"}, {"interior": True}])
    )
    if "interior" in how:
        how = {"interior": tuple(draw(st.integers(0, 1)) for _ in shape)}
    return Trial([values(draw, shape)], {"pad_width": widths, **how})


def _sliced(x: Array, starts: Any, limits: Any, strides: Any) -> Array:
    # Of a part, a dimension that is taken whole has fewer elements than the limit.
    return x[tuple(map(slice, starts, limits, strides))]


@case("slice", _sliced)
def _slice(draw: Draw) -> Trial:
    shape = draw(shapes())
    starts, limits, strides = [], [], []
    for size in shape:
        start = draw(st.sampled_from([0, draw(st.integers(0, size))]))
        limit = draw(st.sampled_from([size, draw(st.integers(start, size))]))
        starts.append(start)
        limits.append(limit)
        strides.append(draw(st.integers(1, 2)))
    return Trial([values(draw, shape)], {"starts": starts, "limits": limits, "strides": strides})


def _tiled(x: Array, repetitions: Any, part: Part | None) -> Array:
    if part is None:
        return np.tile(x, repetitions)
    wanted = part.local_result_shapes[0]
    sizes = (1,) * (len(wanted) - x.ndim) + x.shape
    return np.tile(x, tuple(a // b for a, b in zip(wanted, sizes, strict=True)))


@case("tile", _tiled)
def _tile(draw: Draw) -> Trial:
    shape = draw(shapes())
    times = draw(st.lists(st.integers(1, 4), max_size=3).map(tuple))
    return Trial([values(draw, shape)], {"repetitions": times})


def _repeated(x: Array, repeats: Any, axis: Any, part: Part | None) -> Array:
    if part is None or len(repeats) > 1:
        return np.repeat(x, repeats, axis)
    total = part.local_result_shapes[0][0 if axis is None else axis]
    size = x.size if axis is None else x.shape[axis]
    return np.repeat(x, total // size, axis)


@case("repeat", _repeated)
def _repeat(draw: Draw) -> Trial:
    shape = draw(shapes())
    choices = st.integers(-len(shape), len(shape) - 1) if shape else st.none()
    axis = draw(st.one_of(st.none(), choices))
    size = math.prod(shape) if axis is None else shape[axis]
    count = draw(st.sampled_from([1, size]))
    repeats = [draw(st.integers(1, 4)) for _ in range(count)]
    return Trial([values(draw, shape)], {"repeats": repeats, "axis": axis})


@case("meshgrid", _called(np.meshgrid))
def _meshgrid(draw: Draw) -> Trial:
    count = draw(st.integers(1, 3))
    return Trial(
        [values(draw, (draw(SIZE),)) for _ in range(count)],
        {"indexing": draw(st.sampled_from(["xy", "ij"]))},
    )


def _triangle(lower: bool) -> Any:
    def compute(x: Array, k: int, part: Part | None) -> Array:
        rows, columns = (0, 0) if part is None else part.operand_starts[0][-2:]
        return (np.tril if lower else np.triu)(x, k + rows - columns)

    return compute


def _triangular(draw: Draw) -> Trial:
    return Trial([values(draw, draw(shapes(2, 3)))], {"k": draw(st.integers(-3, 3))})


drawn("tril triu", _triangular, tril=_triangle(True), triu=_triangle(False))


def _differences(x: Array, *ends: Array, axis: int, n: int) -> Array:
    return np.diff(np.concat([*ends[:1], x, *ends[1:]], axis=axis), n=n, axis=axis)


@case("diff", _differences)
def _diff(draw: Draw) -> Trial:
    shape = draw(shapes(1))
    axis = an_axis(draw, len(shape))
    operands = [values(draw, shape)]
    for _ in range(draw(st.integers(0, 2))):
        own = list(shape)
        own[axis] = draw(st.integers(1, 2))
        operands.append(values(draw, tuple(own)))
    return Trial(operands, {"axis": axis, "n": draw(st.integers(0, 2))})


# Indexing


def _rows_here(x: Array, indices: Array, axis: int, part: Part | None, along: bool) -> Array:
    start = 0 if part is None else part.operand_starts[0][axis]
    here = (indices >= start) & (indices < start + x.shape[axis])
    local = np.where(here, indices - start, 0)
    if along:
        return np.where(here, np.take_along_axis(x, local, axis), 0)
    found = np.take(x, local, axis)
    lead = axis % x.ndim
    shape = (1,) * lead + indices.shape + (1,) * (x.ndim - 1 - lead)
    return np.where(here.reshape(shape), found, 0)


@case("take", lambda x, i, axis, part: _rows_here(x, i, axis, part, False))
def _take(draw: Draw) -> Trial:
    shape = draw(shapes(1))
    axis = an_axis(draw, len(shape))
    indices = values(draw, draw(shapes(0, 2)), 0, shape[axis])
    return Trial([values(draw, shape), indices], {"axis": axis})


@case("embedding", lambda x, i, part: _rows_here(x, i, 0, part, False))
def _embedding(draw: Draw) -> Trial:
    shape = draw(shapes(2, 2))
    return Trial([values(draw, shape), values(draw, draw(shapes(0, 2)), 0, shape[0])])


def _along(x: Array, indices: Array, axis: int, part: Part | None) -> Array:
    wide = tuple(
        s if d == axis % x.ndim else max(s, o)
        for d, (s, o) in enumerate(zip(x.shape, indices.shape, strict=True))
    )
    index_shape = tuple(
        o if d == axis % x.ndim else s
        for d, (s, o) in enumerate(zip(wide, indices.shape, strict=True))
    )
    x = np.broadcast_to(x, wide)
    return _rows_here(x, np.broadcast_to(indices, index_shape), axis, part, True)


@case("take_along_axis", _along)
def _take_along(draw: Draw) -> Trial:
    shape = draw(shapes(1))
    axis = an_axis(draw, len(shape)) % len(shape)
    own = [draw(st.sampled_from([s, s, 1])) for s in shape]
    other = [draw(st.sampled_from([s, s, 1])) for s in shape]
    own[axis] = shape[axis]
    other[axis] = draw(SIZE)
    return Trial(
        [values(draw, tuple(own)), values(draw, tuple(other), 0, shape[axis])], {"axis": axis}
    )


def _scattered(
    x: Array, indices: Array, updates: Array, axis: int, mode: str, part: Part | None
) -> Array:
    start = 0 if part is None else part.operand_starts[0][axis]
    found = np.moveaxis(x, axis, 0).copy()
    lead = axis % x.ndim
    rows = updates.reshape((*x.shape[:lead], indices.size, *x.shape[lead + 1 :]))
    rows = np.moveaxis(rows, lead, 0)
    for index, row in zip(indices.ravel(), rows, strict=True):
        if start <= index < start + len(found):
            found[index - start] = found[index - start] + row if mode == "add" else row
    return np.moveaxis(found, 0, axis)


@case("scatter", _scattered)
def _scatter(draw: Draw) -> Trial:
    shape = draw(shapes(1))
    axis = an_axis(draw, len(shape))
    lead = axis % len(shape)
    indices = values(draw, draw(shapes(0, 2)), 0, shape[axis])
    updates = values(draw, shape[:lead] + indices.shape + shape[lead + 1 :])
    mode = draw(st.sampled_from(["set", "add"]))
    return Trial([values(draw, shape), indices, updates], {"axis": axis, "mode": mode})


def _rectangle(x: Array, *starts: Array, sizes: Any, part: Part | None) -> Array:
    local = sizes if part is None else part.local_result_shapes[0]
    return x[tuple(slice(int(a), int(a) + b) for a, b in zip(starts, local, strict=True))]


@case("dynamic_slice", _rectangle)
def _dynamic_slice(draw: Draw) -> Trial:
    shape = draw(shapes())
    sizes = tuple(draw(st.sampled_from([s, draw(st.integers(1, s))])) for s in shape)
    starts = [
        np.asarray(draw(st.integers(0, size - some)))
        for size, some in zip(shape, sizes, strict=True)
    ]
    return Trial([values(draw, shape), *starts], {"sizes": sizes})


def _updated(x: Array, update: Array, *starts: Array, part: Part | None) -> Array:
    found = np.array(x)
    whole = x.shape if part is None else part.operand_shapes[0]
    sizes = update.shape if part is None else part.operand_shapes[1]
    here = (0,) * x.ndim if part is None else part.operand_starts[0]
    to, of = [], []
    for dim, start in enumerate(starts):
        if sizes[dim] == whole[dim]:
            to.append(slice(None))
            of.append(slice(None))
            continue
        first = int(start) - here[dim]
        low, high = max(first, 0), min(first + update.shape[dim], x.shape[dim])
        to.append(slice(low, max(high, low)))
        of.append(slice(low - first, max(high, low) - first))
    found[tuple(to)] = update[tuple(of)]
    return found


@case("dynamic_update_slice", _updated)
def _dynamic_update(draw: Draw) -> Trial:
    found = _dynamic_slice(draw)
    return Trial([found.operands[0], values(draw, found.attributes["sizes"]), *found.operands[1:]])


def _classes(x: Array, num_classes: int, axis: int, part: Part | None) -> Array:
    place = axis % (x.ndim + 1)
    start = 0 if part is None else part.result_starts[0][place]
    count = num_classes if part is None else part.local_result_shapes[0][place]
    shape = tuple(-1 if dim == place else 1 for dim in range(x.ndim + 1))
    return (np.arange(start, start + count).reshape(shape) == np.expand_dims(x, place)).astype(int)


@case("checked_index", lambda x, size: np.where(x < 0, x + size, x))
def _checked_index(draw: Draw) -> Trial:
    size = draw(st.integers(6, 12))
    return Trial([values(draw, draw(shapes()), -size, size)], {"size": size})


@case("one_hot", _classes)
def _one_hot(draw: Draw) -> Trial:
    shape = draw(shapes(0, 2))
    count = draw(SIZE)
    attributes = {"num_classes": count, "axis": an_axis(draw, len(shape) + 1)}
    return Trial([values(draw, shape, 0, count)], attributes)


@case("searchsorted", _called(np.searchsorted))
def _searchsorted(draw: Draw) -> Trial:
    return Trial(
        [np.sort(values(draw, (draw(SIZE),))), values(draw, draw(shapes()))],
        {"side": draw(st.sampled_from(["left", "right"]))},
    )


@case("isin", _called(np.isin))
def _isin(draw: Draw) -> Trial:
    return Trial([values(draw, draw(shapes())), values(draw, draw(shapes()))])


# Order


def _sorted_like(x: Array, *others: Array, axis: int) -> list[Array]:
    order = np.argsort(x, axis=axis, stable=True)
    return [np.take_along_axis(one, order, axis) for one in (x, *others)]


@case("sort", _sorted_like)
def _sort(draw: Draw) -> Trial:
    shape = draw(shapes(1))
    count = draw(st.integers(1, 2))
    return Trial([values(draw, shape) for _ in range(count)], {"axis": an_axis(draw, len(shape))})


drawn("argsort", _on_axis, argsort=lambda x, axis: np.argsort(x, axis=axis, stable=True))


def _largest(x: Array, k: int, axis: int) -> list[Array]:
    order = np.take(np.argsort(-x, axis=axis, stable=True), range(k), axis)
    return [np.take_along_axis(x, order, axis), order]


@case("top_k", _largest)
def _top_k(draw: Draw) -> Trial:
    shape = draw(shapes(1))
    axis = an_axis(draw, len(shape))
    return Trial([values(draw, shape)], {"k": draw(st.integers(1, shape[axis])), "axis": axis})
