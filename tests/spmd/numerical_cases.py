"""Cases of windows, networks, linear algebra, Fourier transforms and creation."""

from __future__ import annotations

import itertools
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

# Windows


def _windows(x: Array, window: Any, strides: Any, padding: Any, fill: Any, dilation: Any) -> Array:
    """The windows over the last dimensions: `[..., *places, *window]`."""
    count = len(window)
    lead = x.ndim - count
    x = np.pad(x, [(0, 0)] * lead + list(padding), constant_values=fill)
    reach = [g * (w - 1) + 1 for g, w in zip(dilation, window, strict=True)]
    view = np.lib.stride_tricks.sliding_window_view(x, reach, axis=tuple(range(lead, x.ndim)))
    places = tuple(slice(None, None, step) for step in strides)
    inside = tuple(slice(None, None, gap) for gap in dilation)
    return view[(slice(None),) * lead + places + inside]


def _window(draw: Draw, sizes: tuple[int, ...]) -> dict[str, Any]:
    padding = [(draw(st.integers(0, 1)), draw(st.integers(0, 1))) for _ in sizes]
    room = [s + a + b for s, (a, b) in zip(sizes, padding, strict=True)]
    window = [draw(st.integers(1, most)) for most in room]
    dilation = [
        draw(st.integers(1, 2)) if 2 * (w - 1) + 1 <= most else 1
        for w, most in zip(window, room, strict=True)
    ]
    strides = [draw(st.integers(1, 2)) for _ in sizes]
    return {"window": window, "padding": padding, "dilation": dilation, "strides": strides}


def _pooled(how: str) -> Any:
    def compute(x: Array, window: Any, strides: Any, padding: Any, dilation: Any) -> Array:
        # A maximum pads with what is below every value of the cases.
        fill = -(10**6) if how == "max" else 0
        found = _windows(x, window, strides, padding, fill, dilation)
        return getattr(found, how)(axis=tuple(range(x.ndim, found.ndim)))

    return compute


def _pooling(draw: Draw) -> Trial:
    shape = draw(shapes(1, 4))
    count = draw(st.integers(1, min(2, len(shape))))
    return Trial([values(draw, shape)], _window(draw, shape[len(shape) - count :]))


drawn(
    "max_pool avg_pool sum_pool",
    _pooling,
    max_pool=_pooled("max"),
    avg_pool=_pooled("mean"),
    sum_pool=_pooled("sum"),
)


def _convolved(
    x: Array,
    kernel: Array,
    *,
    strides: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    batch_groups: int,
) -> Array:
    windows = _windows(x, kernel.shape[2:], strides, padding, 0, dilation)
    # Of a part of the groups there are as many as its channels make.
    groups = min(groups, x.shape[1] // kernel.shape[1]) if groups > 1 else 1
    per_group = kernel.shape[0] // (groups * batch_groups)
    batch = x.shape[0] // batch_groups
    rows = []
    for b, g in itertools.product(range(batch_groups), range(groups)):
        place = (b * groups + g) * per_group
        weights = kernel[place : place + per_group]
        width = kernel.shape[1]
        patch = windows[b * batch : (b + 1) * batch, g * width : (g + 1) * width]
        space = x.ndim - 2
        summed = np.tensordot(
            patch,
            weights,
            axes=([1, *range(2 + space, 2 + 2 * space)], list(range(1, 2 + space))),
        )
        rows.append(np.moveaxis(summed, -1, 1))
    return np.concatenate(rows, axis=1)


def _one_convolution(*operands: Array, part: Part | None, **attributes: Any) -> Array:
    attributes = {"groups": 1, "batch_groups": 1, **attributes}
    if part is not None and attributes["batch_groups"] > 1:
        # As many groups of the batch as this part has: its results per group stay as they are.
        attributes["batch_groups"] = operands[0].shape[0] // max(part.local_result_shapes[0][0], 1)
    return _convolved(*operands, **attributes)


@case("convolution", _one_convolution)
def _convolution(draw: Draw) -> Trial:
    space = draw(shapes(0, 2))
    found = _window(draw, space)
    window = found.pop("window")
    groups = draw(st.integers(1, 3))
    batch_groups = draw(st.integers(1, 3)) if groups == 1 else 1
    channels, own, batch = (draw(st.integers(1, 3)) for _ in range(3))
    outputs = own * groups * batch_groups
    operands = [
        values(draw, (batch * batch_groups, channels * groups, *space)),
        values(draw, (outputs, channels, *window)),
    ]
    return Trial(operands, {**found, "groups": groups, "batch_groups": batch_groups})


def _added_back(
    parts: Array, sizes: Any, window: Any, strides: Any, padding: Any, dilation: Any
) -> Array:
    """What windows `[..., *places, *window]` have, added where each is of the space."""
    count = len(window)
    if not count:
        return parts
    lead = parts.shape[: parts.ndim - 2 * count]
    space = [size + sum(pair) for size, pair in zip(sizes, padding, strict=True)]
    places = np.arange(math.prod(space)).reshape(space)
    where = _windows(places, window, strides, [(0, 0)] * count, 0, dilation).ravel()
    found = np.zeros((*lead, math.prod(space)), parts.dtype)
    np.add.at(found, (..., where), parts.reshape(*lead, -1))
    inside = tuple(slice(a, a + n) for n, (a, _) in zip(sizes, padding, strict=True))
    return found.reshape(*lead, *space)[(..., *inside)]


def _by_groups(groups: int, first: Array, second: Array, axes: Any, split: Any) -> list[Array]:
    parts = [np.split(one, groups, axis) for one, axis in zip((first, second), split, strict=True)]
    return [np.tensordot(one, other, axes=axes) for one, other in zip(*parts, strict=True)]


def _input_back(
    g: Array, kernel: Array, *, part: Part | None, sizes: Any, groups: int, **options: Any
) -> Array:
    if part is not None and groups > 1:
        groups = part.local_result_shapes[0][1] // kernel.shape[1]
    space = g.ndim - 2
    rows = _by_groups(groups, g, kernel, ([1], [0]), (1, 0))
    parts = np.concatenate([np.moveaxis(one, 1 + space, 1) for one in rows], axis=1)
    return _added_back(parts, sizes, kernel.shape[2:], **options)


def _kernel_back(
    x: Array, g: Array, *, part: Part | None, window: Any, groups: int, **options: Any
) -> Array:
    if part is not None and groups > 1:
        groups = x.shape[1] // part.local_result_shapes[0][1]
    windows = _windows(x, window, options["strides"], options["padding"], 0, options["dilation"])
    summed = [0, *range(2, g.ndim)]
    return np.concatenate(_by_groups(groups, g, windows, (summed, summed), (1, 1)))


def _convolution_and_cotangent(draw: Draw) -> tuple[Array, Array, Array, dict[str, Any]]:
    trial = _convolution(draw)
    x, kernel = trial.operands
    options = {**trial.attributes}
    batch_groups = options.pop("batch_groups")
    kernel = kernel[: len(kernel) // batch_groups]
    made = _convolved(x, kernel, **options, batch_groups=1)
    return x, kernel, values(draw, made.shape), options


@case("convolution_input_gradient", _input_back)
def _convolution_input_gradient(draw: Draw) -> Trial:
    x, kernel, g, options = _convolution_and_cotangent(draw)
    return Trial([g, kernel], {**options, "sizes": x.shape[2:]})


@case("convolution_kernel_gradient", _kernel_back)
def _convolution_kernel_gradient(draw: Draw) -> Trial:
    x, kernel, g, options = _convolution_and_cotangent(draw)
    return Trial([x, g], {**options, "window": kernel.shape[2:]})


def _max_back(
    g: Array, greatest: Array, x: Array, window: Any, strides: Any, padding: Any
) -> Array:
    ones = (1,) * len(window)
    found = _windows(x, window, strides, padding, -(10**6), ones)
    flat = found.reshape(*g.shape, -1) == greatest[..., None]
    first = flat & (np.cumsum(flat, axis=-1) == 1)
    parts = (first * g[..., None]).reshape(found.shape)
    return _added_back(parts, x.shape[x.ndim - len(window) :], window, strides, padding, ones)


def _mean_back(
    g: Array, *, part: Part | None, sizes: Any, window: Any, strides: Any, padding: Any
) -> Array:
    count = len(window)
    if part is not None:
        sizes = part.local_result_shapes[0][g.ndim - count :]
    share = g.reshape(*g.shape, *(1,) * count) / math.prod(window)
    parts = np.broadcast_to(share, (*g.shape, *window))
    return _added_back(parts, sizes, window, strides, padding, (1,) * count)


def _pool_and_cotangent(draw: Draw) -> tuple[Array, Array, Array, dict[str, Any]]:
    trial = _pooling(draw)
    (x,) = trial.operands
    options = {**trial.attributes, "dilation": [1] * len(trial.attributes["window"])}
    greatest = _pooled("max")(x, **options)
    del options["dilation"]
    return x, greatest, values(draw, greatest.shape), options


@case("max_pool_gradient", _called(_max_back))
def _max_pool_gradient(draw: Draw) -> Trial:
    x, greatest, g, options = _pool_and_cotangent(draw)
    return Trial([g, greatest, x], options)


@case("avg_pool_gradient", _mean_back)
def _avg_pool_gradient(draw: Draw) -> Trial:
    x, _, g, options = _pool_and_cotangent(draw)
    sizes = x.shape[x.ndim - len(options["window"]) :]
    return Trial([g], {**options, "sizes": sizes})


def _running(draw: Draw) -> Trial:
    shape = draw(shapes(1))
    attributes = {"axis": an_axis(draw, len(shape)), "include_initial": draw(st.booleans())}
    return Trial([values(draw, shape, -2, 3)], attributes)


def _extreme(function: Any) -> Any:
    def compute(x: Array, axis: int, include_initial: bool) -> Array:
        if include_initial:
            x = np.insert(x, 0, 0, axis=axis)
        return function.accumulate(x, axis=axis)

    return compute


drawn(
    "cumulative_sum cumulative_prod cumulative_max cumulative_min",
    _running,
    cumulative_max=_extreme(np.maximum),
    cumulative_min=_extreme(np.minimum),
)


# Networks


def _shares(x: Array, axis: Any) -> Array:
    powers = np.exp(x - np.max(x, axis=axis, keepdims=True))
    return powers / np.sum(powers, axis=axis, keepdims=True)


def _softmax(draw: Draw) -> Trial:
    shape = draw(shapes(1))
    return Trial([values(draw, shape)], {"axis": an_axis(draw, len(shape))})


drawn(
    "softmax log_softmax",
    _softmax,
    softmax=_shares,
    log_softmax=lambda x, axis: np.log(_shares(x, axis)),
)


def _normed(centred: bool) -> Any:
    def compute(x: Array, *others: Array, dims: int) -> Array:
        axes = tuple(range(x.ndim - dims, x.ndim))
        y = x - x.mean(axis=axes, keepdims=True) if centred else x
        y = y / np.sqrt((y * y).mean(axis=axes, keepdims=True) + 1e-5)
        y = y * others[0] if others else y
        return y + others[1] if len(others) > 1 else y

    return compute


def _norm(draw: Draw) -> Trial:
    shape = draw(shapes(1))
    dims = draw(st.integers(1, len(shape)))
    others = [values(draw, shape[len(shape) - dims :]) for _ in range(draw(st.integers(0, 2)))]
    return Trial([values(draw, shape), *others], {"dims": dims})


drawn("layer_norm rms_norm", _norm, layer_norm=_normed(True), rms_norm=_normed(False))


def _norm_back(name: str) -> Any:
    def compute(g: Array, x: Array, *weights: Array, dims: int, part: Part | None) -> list[Array]:
        axes = tuple(range(x.ndim - dims, x.ndim))
        apart = x - x.mean(axis=axes, keepdims=True) if name == "layer_norm" else x
        scale = 1 / np.sqrt((apart * apart).mean(axis=axes, keepdims=True) + 1e-5)
        n, h = apart * scale, g * weights[0] if weights else g
        slope = (h - n * (h * n).mean(axis=axes, keepdims=True)) * scale
        if name == "layer_norm":
            slope = slope - slope.mean(axis=axes, keepdims=True)
        lead = tuple(range(x.ndim - dims))
        return [slope, *[(g * n).sum(axis=lead) for _ in weights]]

    return compute


def _norm_gradient(draw: Draw) -> Trial:
    trial = _norm(draw)
    x, *others = trial.operands
    return Trial([values(draw, x.shape), x, *others[:1]], trial.attributes)


for _name in ("layer_norm", "rms_norm"):
    case(f"{_name}_gradient", _norm_back(_name))(_norm_gradient)


def _batch_normed(x: Array, *vectors: Array, axis: int) -> Array:
    shape = tuple(-1 if dim == axis % x.ndim else 1 for dim in range(x.ndim))
    scale, offset, mean, variance = (one.reshape(shape) for one in vectors)
    return (x - mean) / np.sqrt(variance**2 + 1) * scale + offset


@case("batch_norm", _batch_normed)
def _batch_norm(draw: Draw) -> Trial:
    shape = draw(shapes(1))
    axis = an_axis(draw, len(shape))
    vectors = [values(draw, (shape[axis],)) for _ in range(4)]
    return Trial([values(draw, shape), *vectors], {"axis": axis})


def _losses(logits: Array, labels: Array, axis: int) -> Array:
    chosen = np.take_along_axis(np.log(_shares(logits, axis)), np.expand_dims(labels, axis), axis)
    return -np.squeeze(chosen, axis)


@case("cross_entropy", _losses)
def _cross_entropy(draw: Draw) -> Trial:
    shape = draw(shapes(1))
    axis = an_axis(draw, len(shape))
    place = axis % len(shape)
    labels = values(draw, shape[:place] + shape[place + 1 :], 0, shape[place])
    return Trial([values(draw, shape), labels], {"axis": axis})


def _attended(
    queries: Array,
    keys: Array,
    vals: Array,
    mask: Array | None = None,
    is_causal: bool = False,
    part: Part | None = None,
) -> Array:
    each = queries.shape[-3] // keys.shape[-3]
    keys, vals = (np.repeat(x, each, axis=-3) for x in (keys, vals))
    scores = queries @ np.swapaxes(keys, -1, -2) / 8
    if mask is not None:
        scores = scores + mask
    if is_causal:
        start = 0 if part is None else part.operand_starts[0][-2]
        rows = np.arange(start, start + queries.shape[-2])[:, None]
        scores = np.where(np.arange(keys.shape[-2]) <= rows, scores, -np.inf)
    return _shares(scores, -1) @ vals


def _attend(*operands: Array, is_causal: bool, part: Part | None) -> Array:
    mask = operands[3] if len(operands) == 4 else None
    return _attended(operands[0], operands[1], operands[2], mask, is_causal, part)


@case("attention", _attend)
def _attention(draw: Draw) -> Trial:
    lead = draw(shapes(0, 1))
    groups, each, queries, keys, width, out = (draw(st.integers(1, 3)) for _ in range(6))
    operands = [
        values(draw, (*lead, groups * each, queries, width)),
        values(draw, (*lead, groups, keys, width)),
        values(draw, (*lead, groups, keys, out)),
    ]
    if draw(st.booleans()):
        scores = (*lead, groups * each, queries, keys)
        kept = scores[draw(st.integers(0, len(scores))) :]
        mask = tuple(draw(st.sampled_from([size, 1])) for size in kept)
        operands.append(values(draw, mask))
    return Trial(operands, {"is_causal": draw(st.booleans())})


def _seen_scores(
    queries: Array, keys: Array, is_causal: bool, window: int | None, part: Part | None
) -> Array:
    scores = queries @ np.swapaxes(np.repeat(keys, _each(queries, keys), axis=-3), -1, -2) / 8
    first, other = (0, 0) if part is None else [part.operand_starts[n][-2] for n in (0, 1)]
    before = first - other + np.subtract.outer(*map(np.arange, scores.shape[-2:]))
    seen = np.abs(before) < (np.inf if window is None else window)
    return np.where(seen & (before >= 0) if is_causal else seen, scores, -np.inf)


def _each(queries: Array, keys: Array) -> int:
    return queries.shape[-3] // max(keys.shape[-3], 1)


def _heads_drawn(draw: Draw, count: int) -> Trial:
    lead = draw(shapes(0, 1))
    groups, each, queries, keys, width, out = (draw(st.integers(1, 3)) for _ in range(6))
    rows = (*lead, groups * each, queries)
    sizes = [(*rows, width), (*lead, groups, keys, width), (*lead, groups, keys, out)]
    sizes += [rows, rows, (*rows, out)]
    options = {
        "is_causal": draw(st.booleans()),
        "window": draw(st.one_of(st.none(), st.integers(1, 3))),
    }
    return Trial([values(draw, size) for size in sizes[:count]], options)


def _back(q: Array, k: Array, v: Array, g: Array, part: Part | None, **options: Any) -> list[Array]:
    weights = np.exp(_seen_scores(q, k, part=part, **options))
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / np.where(total == 0, 1, total)
    agreed = g @ np.swapaxes(np.repeat(v, _each(q, k), axis=-3), -1, -2)
    slopes = weights * (agreed - (weights * agreed).sum(axis=-1, keepdims=True)) / 8
    return _cotangents(q, k, v, g, weights, slopes)


def _cotangents(
    q: Array, k: Array, v: Array, g: Array, weights: Array, slopes: Array
) -> list[Array]:
    made = [slopes @ np.repeat(k, _each(q, k), axis=-3)]
    for found, rows, like in ((slopes, q, k), (weights, g, v)):
        every = np.swapaxes(found, -1, -2) @ rows
        grouped = every.reshape((*k.shape[:-2], _each(q, k), *like.shape[-2:]))
        made.append(grouped.sum(axis=-3))
    return made


@case("attention_gradient", _back)
def _attention_gradient(draw: Draw) -> Trial:
    trial = _heads_drawn(draw, 6)
    return Trial([*trial.operands[:3], trial.operands[5]], trial.attributes)


def _turning_scores(
    q: Array, k: Array, turn: int, query_parts: Any, key_parts: Any, **options: Any
) -> Array:
    scores = _seen_scores(q, k, part=None, **options)
    seen = np.zeros(scores.shape[-2:], dtype=bool)
    for number, own in enumerate(query_parts):
        seen[slice(*own), slice(*key_parts[(number + turn) % len(key_parts)])] = True
    return np.where(seen, scores, -np.inf)


def _turn(q: Array, k: Array, v: Array, part: Part | None, **options: Any) -> list[Array]:
    weights = np.exp(_turning_scores(q, k, **options))
    total = weights.sum(axis=-1)
    with np.errstate(divide="ignore"):
        logs = np.log(total)
    shares = weights / np.where(total == 0, 1, total)[..., None]
    return [shares @ np.repeat(v, _each(q, k), axis=-3), logs]


def _turn_back(*operands: Array, part: Part | None, **options: Any) -> list[Array]:
    q, k, v, sums, shift, g = operands
    weights = np.exp(_turning_scores(q, k, **options) - sums[..., None])
    agreed = g @ np.swapaxes(np.repeat(v, _each(q, k), axis=-3), -1, -2)
    return _cotangents(q, k, v, g, weights, weights * (agreed + shift[..., None]) / 8)


def _turns_drawn(draw: Draw, count: int) -> Trial:
    trial = _heads_drawn(draw, count)
    parts = []
    for operand in trial.operands[:2]:
        size = operand.shape[-2]
        middle = draw(st.integers(0, size))
        parts.append(((0, middle), (middle, size)))
    more = {"turn": draw(st.integers(0, 1)), "query_parts": parts[0], "key_parts": parts[1]}
    return Trial(trial.operands, {**trial.attributes, **more})


@case("attention_turn", _turn)
def _attention_turn(draw: Draw) -> Trial:
    return _turns_drawn(draw, 3)


@case("attention_turn_gradient", _turn_back)
def _attention_turn_gradient(draw: Draw) -> Trial:
    return _turns_drawn(draw, 6)


# Linear algebra


def _batch(draw: Draw) -> Trial:
    return Trial([values(draw, draw(shapes(2))).astype(float)])


def _square(draw: Draw) -> Trial:
    lead, size = draw(shapes(0, 1)), draw(SIZE)
    return Trial([values(draw, (*lead, size, size)) + 20 * np.eye(size)])


def _positive(draw: Draw) -> Trial:
    (x,) = _square(draw).operands
    return Trial([x @ np.swapaxes(x, -1, -2)])


def _in_linalg(names: str, draw_trial: Any) -> None:
    drawn(names, draw_trial, **{n: _called(getattr(np.linalg, n)) for n in names.split()})


_in_linalg("inv det slogdet eig eigvals", _square)
_in_linalg("cholesky eigh eigvalsh", _positive)
_in_linalg("svdvals matrix_norm matrix_rank pinv trace diagonal", _batch)


@case("svd", lambda x, full_matrices: tuple(np.linalg.svd(x, full_matrices=full_matrices)))
def _svd(draw: Draw) -> Trial:
    return Trial(_batch(draw).operands, {"full_matrices": draw(st.booleans())})


@case("qr", lambda x, mode: tuple(np.linalg.qr(x, mode=mode)))
def _qr(draw: Draw) -> Trial:
    return Trial(_batch(draw).operands, {"mode": draw(st.sampled_from(["reduced", "complete"]))})


@case("matrix_power", lambda x, n: np.linalg.matrix_power(x, n))
def _power(draw: Draw) -> Trial:
    return Trial(_square(draw).operands, {"n": draw(st.integers(0, 3))})


@case("solve", _called(np.linalg.solve))
def _solve(draw: Draw) -> Trial:
    left, right = _broadcast(draw, 2)
    size = draw(SIZE)
    matrices = values(draw, (*left, size, size)) + 40 * np.eye(size)
    if draw(st.booleans()):
        return Trial([matrices, values(draw, (size,))])
    return Trial([matrices, values(draw, (*right, size, draw(SIZE)))])


def _triangle_solved(a: Array, b: Array, left_side: bool) -> Array:
    if left_side:
        return np.linalg.solve(np.tril(a), b)
    turned = np.linalg.solve(np.swapaxes(np.tril(a), -1, -2), np.swapaxes(b, -1, -2))
    return np.swapaxes(turned, -1, -2)


@case("triangular_solve", _triangle_solved)
def _triangular_solve(draw: Draw) -> Trial:
    lead, size, columns = draw(shapes(0, 1)), draw(SIZE), draw(SIZE)
    left_side = draw(st.booleans())
    right = (*lead, size, columns) if left_side else (*lead, columns, size)
    matrices = values(draw, (*lead, size, size)) + 40 * np.eye(size)
    return Trial([matrices, values(draw, right)], {"left_side": left_side})


@case("cross", _called(np.linalg.cross))
def _cross(draw: Draw) -> Trial:
    left, right = ((*shape, 3) for shape in _broadcast(draw, 2))
    return Trial([values(draw, left), values(draw, right)], {"axis": -1})


# Fourier transforms


def _in_fft(names: str, draw_trial: Any) -> None:
    for name in names.split():
        function = getattr(np.fft, name)
        word = "axes" if name.endswith("n") else "axis"
        length = "s" if name.endswith("n") else "n"
        drawn(
            name,
            draw_trial,
            **{name: lambda x, axis, n, f=function, w=word, k=length: f(x, **{w: axis, k: n})},
        )


def _wave(draw: Draw) -> Trial:
    shape = draw(shapes(1))
    # One element of a result of real numbers has no waves.
    shape = tuple(size + 1 for size in shape)
    length = draw(st.one_of(st.none(), st.integers(2, 6)))
    return Trial([values(draw, shape)], {"axis": an_axis(draw, len(shape)), "n": length})


def _waves(draw: Draw) -> Trial:
    shape = tuple(size + 1 for size in draw(shapes(1)))
    axes = some_axes(draw, len(shape)) or None
    axes = (axes,) if isinstance(axes, int) else axes
    lengths = None
    if axes is not None and draw(st.booleans()):
        lengths = tuple(draw(st.integers(2, 5)) for _ in axes)
    return Trial([values(draw, shape)], {"axis": axes, "n": lengths})


_in_fft("fft ifft rfft irfft hfft ihfft", _wave)
_in_fft("fftn ifftn rfftn irfftn", _waves)


def _shift(draw: Draw) -> Trial:
    shape = draw(shapes(1))
    return Trial([values(draw, shape)], {"axes": some_axes(draw, len(shape))})


drawn(
    "fftshift ifftshift",
    _shift,
    fftshift=_called(np.fft.fftshift),
    ifftshift=_called(np.fft.ifftshift),
)


# Creation


def _shaped(draw: Draw) -> Trial:
    return Trial([], {"shape": draw(shapes())})


def _constant(value: int) -> Any:
    def compute(shape: Any, part: Part | None) -> Array:
        return np.full(shape if part is None else part.local_result_shapes[0], value)

    return compute


drawn(
    "zeros ones empty full",
    _shaped,
    **{name: _constant(value) for name, value in (("zeros", 0), ("ones", 1), ("empty", 0))},
    full=_constant(3),
)


def _places(part: Part | None, shape: Any, result: int = 0) -> list[Array]:
    """The indices of the elements of a part of a result, per dimension."""
    starts = (0,) * len(shape) if part is None else part.result_starts[result]
    sizes = shape if part is None else part.local_result_shapes[result]
    return [i + start for i, start in zip(np.indices(tuple(sizes)), starts, strict=True)]


def _range(start: float, stop: float, step: float, part: Part | None) -> Array:
    shape = (max(math.ceil((stop - start) / step), 0),)
    return start + step * _places(part, shape)[0]


@case("arange", _range)
def _arange(draw: Draw) -> Trial:
    start, stop = draw(st.integers(-4, 4)), draw(st.integers(-4, 9))
    return Trial([], {"start": start, "stop": stop, "step": draw(st.sampled_from([1, 2, -1]))})


@case("linspace", lambda num, part: _places(part, (num,))[0] / max(num - 1, 1))
def _linspace(draw: Draw) -> Trial:
    return Trial([], {"num": draw(SIZE)})


def _ones(n_rows: int, n_cols: int | None, k: int, part: Part | None) -> Array:
    rows, columns = _places(part, (n_rows, n_rows if n_cols is None else n_cols))
    return (columns == rows + k).astype(int)


@case("eye", _ones)
def _eye(draw: Draw) -> Trial:
    columns = draw(st.one_of(st.none(), SIZE))
    return Trial([], {"n_rows": draw(SIZE), "n_cols": columns, "k": draw(st.integers(-2, 2))})


@case("iota", lambda shape, axis, part: _places(part, shape)[axis])
def _iota(draw: Draw) -> Trial:
    shape = draw(shapes(1))
    return Trial([], {"shape": shape, "axis": draw(st.integers(0, len(shape) - 1))})


def _frequencies(halves: bool) -> Any:
    def compute(n: int, part: Part | None) -> Array:
        place = _places(part, (n // 2 + 1 if halves else n,))[0]
        return place / n if halves else np.where(place < (n + 1) // 2, place, place - n) / n

    return compute


def _length(draw: Draw) -> Trial:
    return Trial([], {"n": draw(SIZE)})


drawn("fftfreq rfftfreq", _length, fftfreq=_frequencies(False), rfftfreq=_frequencies(True))


def _bits(state: Array, shape: Any, part: Part | None) -> list[Array]:
    place = sum((i * 31**d for d, i in enumerate(_places(part, shape, 1))), start=np.zeros((), int))
    mixed = (place * 2654435761 + state[0]) % 2**16
    return [state + 1, mixed ^ state[1]]


@case("random_bits", _bits)
def _random_bits(draw: Draw) -> Trial:
    return Trial([values(draw, (2,), 0, 99)], {"shape": draw(shapes())})


def _numbers(key: Array, like: Array, part: Part | None) -> Array:
    place = sum((i * 31**d for d, i in enumerate(_places(part, like.shape))), np.zeros((), int))
    return (place * 2654435761 + key[0]) % 2**16 ^ key[1]


@case("random_numbers", _numbers)
def _random_numbers(draw: Draw) -> Trial:
    return Trial([values(draw, (2,), 0, 99), values(draw, draw(shapes()), 0, 99)], {})
