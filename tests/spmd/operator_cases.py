"""For each operator of the table: operands to try it on, and what it computes, in NumPy.

A case draws shapes and attributes and says how a device computes its part. What a part has to know
beside its operands is in `Part`; it is None for the dense computation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

Array = np.ndarray
Draw = Callable[[st.SearchStrategy[Any]], Any]


@dataclass(frozen=True)
class Part:
    """Where a part lies, and of what.

    `starts` are of the operands', then of the results' dimensions.
    """

    operand_shapes: tuple[tuple[int, ...], ...]
    result_shapes: tuple[tuple[int, ...], ...]
    local_result_shapes: tuple[tuple[int, ...], ...]
    operand_starts: tuple[tuple[int, ...], ...]
    result_starts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Trial:
    """An operator's operands and attributes."""

    operands: list[Array]
    attributes: dict[str, Any] = field(default_factory=dict)


Compute = Callable[[list[Array], dict[str, Any], Part | None], list[Array]]


@dataclass(frozen=True)
class Case:
    """What to try an operator on, and what it computes."""

    trials: st.SearchStrategy[Trial]
    compute: Compute


SIZE = st.integers(1, 5)


def shapes(least: int = 0, most: int = 3) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(SIZE, min_size=least, max_size=most).map(tuple)


def values(draw: Draw, shape: tuple[int, ...], low: int = -6, high: int = 9) -> Array:
    """Small whole numbers, exact in every sum and product of the cases."""
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    return random.integers(low, high, shape)


def an_axis(draw: Draw, rank: int) -> int:
    return draw(st.integers(-rank, rank - 1))


def some_axes(draw: Draw, rank: int) -> Any:
    sets = st.lists(st.integers(0, max(rank - 1, 0)), unique=True, max_size=rank).map(tuple)
    single = [st.integers(-rank, rank - 1)] if rank else []
    return draw(st.one_of(st.none(), sets if rank else st.just(()), *single))


class Cases(dict[str, Case]):
    """Cases by operator."""

    def case(
        self, names: str, compute: Callable[..., Any]
    ) -> Callable[[Callable[..., Trial]], Any]:
        """Registers a function that draws a trial for these operators.

        `compute` is given the operands one by one and the attributes, and `part` when it asks
        for it.
        """
        code = getattr(compute, "__code__", None)
        wants_part = code is not None and "part" in code.co_varnames

        def run(
            operands: list[Array], attributes: dict[str, Any], part: Part | None
        ) -> list[Array]:
            extra = {"part": part} if wants_part else {}
            with np.errstate(all="ignore"):
                found = compute(*operands, **attributes, **extra)
            return [np.asarray(x) for x in (found if isinstance(found, tuple | list) else [found])]

        def register(draw_trial: Callable[..., Trial]) -> Any:
            strategy = st.composite(draw_trial)()
            for name in names.split():
                assert name not in self, name
                self[name] = Case(strategy, run)
            return draw_trial

        return register

    def drawn(
        self, names: str, draw_trial: Callable[..., Trial], **computes: Callable[..., Any]
    ) -> None:
        """Registers operators with one way of drawing: NumPy's functions unless named otherwise."""
        for name in names.split():
            compute = computes.get(name) or getattr(np, name)
            with_code = compute if hasattr(compute, "__code__") else _called(compute)
            self.case(name, with_code)(draw_trial)


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands, **attributes: function(*operands, **attributes)


CASES = Cases()
case, drawn = CASES.case, CASES.drawn

# Element by element


def _one(draw: Draw) -> Trial:
    return Trial([values(draw, draw(shapes()))])


def _one_truth(draw: Draw) -> Trial:
    return Trial([values(draw, draw(shapes()), 0, 2).astype(bool)])


def _broadcast(draw: Draw, count: int) -> list[tuple[int, ...]]:
    result = draw(shapes())
    found = []
    for _ in range(count):
        kept = result[draw(st.integers(0, len(result))) :]
        found.append(tuple(1 if draw(st.booleans()) and draw(st.booleans()) else s for s in kept))
    return found


def _two(draw: Draw) -> Trial:
    return Trial([values(draw, shape) for shape in _broadcast(draw, 2)])


def _two_counts(draw: Draw) -> Trial:
    return Trial([values(draw, shape, 0, 6) for shape in _broadcast(draw, 2)])


def _two_truths(draw: Draw) -> Trial:
    return Trial([values(draw, shape, 0, 2).astype(bool) for shape in _broadcast(draw, 2)])


def _three(draw: Draw) -> Trial:
    return Trial([values(draw, shape) for shape in _broadcast(draw, 3)])


def _choice(draw: Draw) -> Trial:
    condition, *others = (values(draw, shape) for shape in _broadcast(draw, 3))
    return Trial([condition > 1, *others])


_ERF = np.vectorize(math.erf, otypes=[float])

drawn(
    "abs acos acosh asin asinh atan atanh bitwise_invert cos cosh exp expm1 isfinite isinf isnan "
    "log log1p log2 log10 logical_not signbit sin sinh square tan tanh angle cbrt degrees "
    "radians exp2 sinc i0 negative real imag conj positive copy ceil floor round sign sqrt trunc "
    "erf relu rsqrt sigmoid silu gelu softplus reciprocal spacing astype zeros_like ones_like "
    "empty_like full_like identity stop_gradient",
    _one,
    identity=lambda x: x,
    stop_gradient=lambda x: x,
    erf=lambda x: _ERF(x) if x.size else x.astype(float),
    relu=lambda x: np.maximum(x, 0),
    rsqrt=lambda x: 1 / np.sqrt(x),
    sigmoid=lambda x: 1 / (1 + np.exp(-x)),
    silu=lambda x: x / (1 + np.exp(-x)),
    gelu=lambda x: x * (1 + (_ERF(x / 2**0.5) if x.size else x)) / 2,
    softplus=lambda x: np.log1p(np.exp(x)),
    reciprocal=lambda x: 1 / x,
    spacing=lambda x: np.spacing(x.astype(float)),
    astype=lambda x: x.astype(float),
    empty_like=np.zeros_like,
    full_like=lambda x: np.full_like(x, 3),
)


def _silu_gradient(g: Array, x: Array) -> Array:
    share = 1 / (1 + np.exp(-x))
    return g * share * (1 + x * (1 - share))


drawn(
    "atan2 bitwise_xor copysign equal floor_divide greater greater_equal hypot less less_equal "
    "logaddexp logaddexp2 logical_xor nextafter not_equal remainder heaviside gcd lcm fmod add "
    "subtract multiply divide maximum minimum fmax fmin bitwise_or bitwise_and silu_gradient",
    _two,
    silu_gradient=_silu_gradient,
)
drawn("bitwise_left_shift bitwise_right_shift pow ldexp float_power", _two_counts)
drawn("logical_or logical_and", _two_truths)
drawn("clip", _three)
drawn("clamp", _three, clamp=lambda low, x, high: np.clip(x, low, high))
drawn("where select", _choice, select=np.where)


# Products


@case("matmul", _called(np.matmul))
def _matmul(draw: Draw) -> Trial:
    rows, inner, columns = (draw(SIZE) for _ in range(3))
    left, right = _broadcast(draw, 2)
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return Trial([values(draw, (*left, rows, inner)), values(draw, (*right, inner, columns))])
    if kind == 1:
        return Trial([values(draw, (inner,)), values(draw, (*right, inner, columns))])
    if kind == 2:
        return Trial([values(draw, (*left, rows, inner)), values(draw, (inner,))])
    return Trial([values(draw, (inner,)), values(draw, (inner,))])


@case("vecdot", _called(np.vecdot))
def _vecdot(draw: Draw) -> Trial:
    size = draw(SIZE)
    back = draw(st.integers(-2, -1))
    pair = []
    tail = draw(shapes(-back - 1, -back - 1))
    for shape in _broadcast(draw, 2):
        pair.append(values(draw, (*shape, size, *tail)))
    return Trial(pair, {"axis": back})


@case("tensordot", _called(np.tensordot))
def _tensordot(draw: Draw) -> Trial:
    left, right, common = (draw(shapes(0, 2)) for _ in range(3))
    one, other = [*left, *common], [*right, *common]
    first = draw(st.permutations(range(len(one))))
    second = draw(st.permutations(range(len(other))))
    axes = tuple(
        tuple(order.index(lead + number) for number in range(len(common)))
        for order, lead in ((first, len(left)), (second, len(right)))
    )
    return Trial(
        [
            values(draw, tuple(one[d] for d in first)),
            values(draw, tuple(other[d] for d in second)),
        ],
        {"axes": axes},
    )


def _as_einsum(x: Array, y: Array, batching: Any, contracting: Any) -> Array:
    names = [[f"{side}{dim}" for dim in range(a.ndim)] for side, a in enumerate((x, y))]
    for pairs in (batching, contracting):
        for one, other in zip(*pairs, strict=True):
            names[1][other] = names[0][one]
    every = {name: number for number, name in enumerate(dict.fromkeys(names[0] + names[1]))}
    batch = [names[0][dim] for dim in batching[0]]
    gone = {names[0][dim] for dim in contracting[0]} | set(batch)
    rest = [name for side in names for name in side if name not in gone]
    return np.einsum(
        x,
        [every[name] for name in names[0]],
        y,
        [every[name] for name in names[1]],
        [every[name] for name in batch + rest],
    )


@case("dot_general", _as_einsum)
def _dot_general(draw: Draw) -> Trial:
    batch, common, left, right = (draw(shapes(0, 2)) for _ in range(4))
    sides = []
    axes: tuple[list[list[int]], list[list[int]]] = ([], [])
    for free in (left, right):
        sizes = [*batch, *common, *free]
        order = draw(st.permutations(range(len(sizes))))
        sides.append(values(draw, tuple(sizes[d] for d in order)))
        places = [order.index(d) for d in range(len(sizes))]
        axes[0].append(places[: len(batch)])
        axes[1].append(places[len(batch) : len(batch) + len(common)])
    return Trial(sides, {"batching": axes[0], "contracting": axes[1]})


@case("einsum", lambda *operands, subscripts: np.einsum(subscripts, *operands))
def _einsum(draw: Draw) -> Trial:
    texts = (
        "ij,jk->ik bhsd,bhtd->bhst i,j->ji ij->j ij,kj,k->ik ...i,...i ab,bc i...,i->... ij,ij-> "
        "a,a,a->a"
    )
    text = draw(st.sampled_from(texts.split()))
    sizes = {letter: draw(SIZE) for letter in "abcdhijkst"}
    extra = draw(shapes(0, 2))
    operands = []
    for own in text.partition("->")[0].split(","):
        shape: list[int] = []
        for letter in own.replace("...", "."):
            shape += extra if letter == "." else [sizes[letter]]
        operands.append(values(draw, tuple(shape)))
    return Trial(operands, {"subscripts": text})


@case("outer", _called(np.outer))
def _outer(draw: Draw) -> Trial:
    return Trial([values(draw, (draw(SIZE),)), values(draw, (draw(SIZE),))])


# Reductions


def _reduced(draw: Draw) -> Trial:
    shape = draw(shapes())
    return Trial(
        [values(draw, shape)],
        {"axis": some_axes(draw, len(shape)), "keepdims": draw(st.booleans())},
    )


def _reduced_truths(draw: Draw) -> Trial:
    found = _reduced(draw)
    return Trial([found.operands[0] > 0], found.attributes)


def _mean(x: Array, axis: Any, keepdims: bool, part: Part | None) -> Array:
    whole = x.shape if part is None else part.operand_shapes[0]
    axes = range(x.ndim) if axis is None else [axis] if isinstance(axis, int) else axis
    count = math.prod(whole[one] for one in axes)
    return np.sum(x, axis=axis, keepdims=keepdims) / count


def _log_sum(x: Array, axis: Any, keepdims: bool) -> Array:
    return np.log(np.sum(np.exp(x), axis=axis, keepdims=keepdims))


drawn(
    "sum prod max min var std mean count_nonzero logsumexp",
    _reduced,
    mean=_mean,
    logsumexp=_log_sum,
)
drawn("any all", _reduced_truths)


@case(
    "vector_norm", lambda x, axis, keepdims: np.linalg.vector_norm(x, axis=axis, keepdims=keepdims)
)
def _vector_norm(draw: Draw) -> Trial:
    found = _reduced(draw)
    # NumPy's norm of no axes is not defined.
    axis = found.attributes["axis"]
    return Trial(found.operands, {**found.attributes, "axis": None if axis == () else axis})


def _at_axis(draw: Draw) -> Trial:
    shape = draw(shapes(1))
    return Trial(
        [values(draw, shape)],
        {"axis": an_axis(draw, len(shape)), "keepdims": draw(st.booleans())},
    )


drawn("argmax argmin", _at_axis)
