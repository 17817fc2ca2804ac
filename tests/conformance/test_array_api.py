"""Every function of the array API standard 2024.12, on random shardings, against NumPy.

NumPy's main namespace follows the standard, so it says what is right: values, shapes and element
types. Each function is called on all element types that the standard gives it, on arrays of 0 to
3 dimensions, sizes of 0 and 1 among them, sharded at random over a mesh of 2x3. The standard's own
suite is run by `make array-api`; what else that tests is in `test_array_api_details` and
`test_array_api_indices`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh
from reshard.sharding import ShardingSpec

MESH = DeviceMesh.of(x=2, y=3)

BOOL = ["bool"]
INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
REAL_FLOATS = ["float32", "float64"]
COMPLEX = ["complex64", "complex128"]
FLOATS = [*REAL_FLOATS, *COMPLEX]
REAL = [*INTEGERS, *REAL_FLOATS]
NUMERIC = [*REAL, *COMPLEX]
ALL = [*BOOL, *NUMERIC]

# What the standard has and the package has not, each with its reason.
LEFT_OUT = {
    "__setitem__": "arrays never change; sp.where, sp.scatter and dynamic_update_slice make new",
    "__dlpack__ of a device": "shards are where the runner has them; export is to the CPU",
    "to_device of another device": "shards are kept by ranks, not moved between devices",
    "empty": "elements that mean nothing are zeros, which is allowed; no values to compare",
    "empty_like": "as empty",
}

UNARY_TYPES = [
    ("abs negative positive sign square", NUMERIC),
    ("ceil floor trunc", REAL),
    ("round", NUMERIC),
    ("acos acosh asin asinh atan atanh cos cosh exp expm1", FLOATS),
    ("log log1p log2 log10 sin sinh sqrt tan tanh reciprocal", FLOATS),
    ("isfinite isinf isnan conj real", NUMERIC),
    ("imag", COMPLEX),
    ("signbit", REAL_FLOATS),
    ("bitwise_invert", [*BOOL, *INTEGERS]),
    ("logical_not", BOOL),
]
BINARY_TYPES = [
    ("add multiply subtract", NUMERIC),
    ("equal not_equal", ALL),
    ("greater greater_equal less less_equal maximum minimum", REAL),
    ("divide", FLOATS),
    ("floor_divide remainder", REAL),
    ("pow", [*REAL_FLOATS, *COMPLEX, "uint8", "uint32"]),
    ("atan2 copysign hypot logaddexp nextafter", REAL_FLOATS),
    ("bitwise_and bitwise_or bitwise_xor", [*BOOL, *INTEGERS]),
    ("bitwise_left_shift bitwise_right_shift", INTEGERS),
    ("logical_and logical_or logical_xor", BOOL),
]
UNARY = {name: types for names, types in UNARY_TYPES for name in names.split()}
BINARY = {name: types for names, types in BINARY_TYPES for name in names.split()}
SHAPES: list[tuple[int, ...]] = [(), (1,), (5,), (7, 5), (0, 3), (4, 1, 3)]


def array(random: np.random.Generator, shape: Iterable[int], dtype: str) -> np.ndarray:
    shape = tuple(shape)
    if dtype == "bool":
        return random.integers(0, 2, size=shape).astype(bool)
    if "int" in dtype:
        return random.integers(0, 7, size=shape).astype(dtype)
    made = random.uniform(-3, 3, size=shape)
    if dtype.startswith("complex"):
        made = made + 1j * random.uniform(-3, 3, size=shape)
    return np.asarray(made).astype(dtype)


def any_spec(random: np.random.Generator, ndim: int) -> ShardingSpec:
    cut: list[list[str]] = [[] for _ in range(ndim + 1)]
    for axis in random.permutation(["x", "y"]).tolist():
        cut[int(random.integers(ndim + 1))].append(axis)
    return ShardingSpec(MESH, cut[:ndim])


def in_shards(random: np.random.Generator, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return sp.array(value, any_spec(random, value.ndim))
    if isinstance(value, list):
        return [in_shards(random, one) for one in value]
    return value


def dense(value: Any) -> list[np.ndarray]:
    if isinstance(value, tuple | list):
        return [one for each in value for one in dense(each)]
    return [np.asarray(value)]


def check(function: Callable[..., Any], *values: Any, turns: int = 3) -> None:
    """The function of both namespaces on the same values, those of ours in shards."""
    random = np.random.default_rng(len(str(values)))
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        expected = dense(function(np, *values))
        for _ in range(turns):
            given = [in_shards(random, one) for one in values]
            found = dense(function(sp, *given))
            for one, other in zip(found, expected, strict=True):
                assert one.shape == other.shape
                assert one.dtype == other.dtype
                wide = one.dtype in (np.float64, np.complex128)
                tolerance = 1e-10 if wide else 2e-4
                np.testing.assert_allclose(one, other, tolerance, tolerance)


@pytest.mark.parametrize("name", UNARY)
def test_elementwise_functions_of_one_array(name: str) -> None:
    random = np.random.default_rng(1)
    for dtype in UNARY[name]:
        for shape in SHAPES:
            x = array(random, shape, dtype)
            check(lambda xp, x: getattr(xp, name)(x), x, turns=2)


@pytest.mark.parametrize("name", BINARY)
def test_elementwise_functions_of_two_arrays(name: str) -> None:
    random = np.random.default_rng(2)
    both = [((7, 5), (7, 5)), ((), (4,)), ((4, 1), (3,)), ((0, 3), (1, 3)), ((5,), ())]
    for dtype in BINARY[name]:
        for shapes in both:
            x, y = (array(random, shape, dtype) for shape in shapes)
            y = np.abs(y) if name == "pow" and dtype not in COMPLEX else y
            check(lambda xp, x, y: getattr(xp, name)(x, y), x, y, turns=2)


def test_operators_of_python() -> None:
    random = np.random.default_rng(3)
    x, y = (array(random, (7, 5), "float64") for _ in range(2))
    for function in (
        lambda xp, x, y: [x + y, x - y, x * y, x / y, x // y, x % y, abs(x) ** y, -x, +x, abs(x)],
        lambda xp, x, y: [x < y, x <= y, x > y, x >= y, x == y, x != y, x @ y.T, 2 - x, 1 / x],
        lambda xp, x, y: [x[1:, ::2], x[-1], x[..., 0], x[None], x[2, 3], x[x > 0], x[::-2]],
    ):
        check(function, x, y)
    i, j = (array(random, (7, 5), "int32") for _ in range(2))
    check(lambda xp, i, j: [i & j, i | j, i ^ j, i << j, i >> j, ~i, 7 - i, 3 & i], i, j)


def test_numbers_of_arrays_without_dimensions() -> None:
    x = sp.array(np.float64(2.5), ShardingSpec(MESH, []))
    i = sp.array(np.int64(3))
    assert float(x) == 2.5 and int(i) == 3 and complex(x) == 2.5 and bool(i)
    assert list(range(9))[i] == 3
    with pytest.raises(TypeError, match="no number"):
        float(sp.ones(3))
    with pytest.raises(TypeError, match="no whole number"):
        list(range(9))[x]


along = [None, 0, 1, -1]
REDUCTIONS: dict[str, tuple[list[str], list[Any]]] = {
    "sum": (NUMERIC, [*along, (0, 1)]),
    "prod": (NUMERIC, [*along, (0, 1)]),
    "max": (REAL, [*along, (0, 1)]),
    "min": (REAL, [*along, (0, 1)]),
    "mean": (REAL_FLOATS, [*along, (0, 1)]),
    "std": (REAL_FLOATS, [*along, (0, 1)]),
    "var": (REAL_FLOATS, [*along, (0, 1)]),
    "all": (ALL, [*along, (0, 1)]),
    "any": (ALL, [*along, (0, 1)]),
    "count_nonzero": (ALL, [*along, (0, 1)]),
    "argmax": (REAL, along),
    "argmin": (REAL, along),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str) -> None:
    random = np.random.default_rng(4)
    dtypes, axes = REDUCTIONS[name]
    for dtype in dtypes:
        for shape in ((7, 5), (1, 4), (3, 2, 5)):
            x = array(random, shape, dtype)
            for axis in axes:
                for keepdims in (False, True):
                    check(
                        lambda xp, x: getattr(xp, name)(x, axis=axis, keepdims=keepdims),  # noqa: B023
                        x,
                        turns=1,
                    )


def calls() -> dict[str, list[tuple[Callable[..., Any], list[Any]]]]:
    """How the other functions are called, and on what."""
    random = np.random.default_rng(5)
    x = array(random, (7, 5), "float64")
    y = array(random, (7, 5), "float64")
    i = array(random, (7, 5), "int64")
    b = array(random, (7, 5), "bool")
    v = array(random, (6,), "float64")
    c = array(random, (7, 4), "complex128")
    square = array(random, (2, 4, 4), "float64")
    s = array(random, (3, 4, 2), "float64")
    hermitian = square + np.matrix_transpose(square)
    definite = square @ np.matrix_transpose(square) + 4 * np.eye(4)
    la: dict[str, list[tuple[Callable[..., Any], list[Any]]]] = {
        "cholesky": [(lambda xp, x: xp.linalg.cholesky(x), [definite])],
        "cross": [(lambda xp, x, y: xp.linalg.cross(x, y), [x[:, :3], y[:, :3]])],
        "det": [(lambda xp, x: xp.linalg.det(x), [square])],
        "diagonal": [(lambda xp, x: xp.linalg.diagonal(x, offset=1), [x])],
        "eigh": [(lambda xp, x: xp.linalg.eigh(x)[0], [hermitian])],
        "eigvalsh": [(lambda xp, x: xp.linalg.eigvalsh(x), [hermitian])],
        "inv": [(lambda xp, x: xp.linalg.inv(x), [square])],
        "linalg.matmul": [(lambda xp, x, y: xp.linalg.matmul(x, y.T), [x, y])],
        "matrix_norm": [
            (lambda xp, x, order=order: xp.linalg.matrix_norm(x, ord=order), [x])
            for order in ("fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf)
        ],
        "matrix_power": [
            (lambda xp, x, n=n: xp.linalg.matrix_power(x, n), [square]) for n in (-1, 0, 1, 3, 6)
        ],
        "matrix_rank": [(lambda xp, x: xp.linalg.matrix_rank(x), [square])],
        "linalg.matrix_transpose": [(lambda xp, x: xp.linalg.matrix_transpose(x), [s])],
        "outer": [(lambda xp, x, y: xp.linalg.outer(x, y), [v, x[:, 0]])],
        "pinv": [(lambda xp, x: xp.linalg.pinv(x), [s]), (lambda xp, x: xp.linalg.pinv(x), [c])],
        "qr": [
            (lambda xp, x, m=m: abs(xp.linalg.qr(x, mode=m)[1]), [s])
            for m in ("reduced", "complete")
        ],
        "slogdet": [(lambda xp, x: [*xp.linalg.slogdet(x)], [square])],
        "solve": [
            (lambda xp, x, y: xp.linalg.solve(x, y), [square, square]),
            (lambda xp, x, y: xp.linalg.solve(x, y), [square[0], v[:4]]),
        ],
        "svd": [(lambda xp, x: xp.linalg.svd(x, full_matrices=False)[1], [s])],
        "svdvals": [(lambda xp, x: xp.linalg.svdvals(x), [s])],
        "linalg.tensordot": [(lambda xp, x, y: xp.linalg.tensordot(x, y.T, axes=1), [x, y])],
        "trace": [(lambda xp, x: xp.linalg.trace(x), [square])],
        "linalg.vecdot": [(lambda xp, x, y: xp.linalg.vecdot(x, y), [x, y])],
        "vector_norm": [
            (lambda xp, x, o=o: xp.linalg.vector_norm(x, axis=1, ord=o), [x])
            for o in (2, 1, 0, np.inf, -np.inf, 3)
        ],
    }
    ft = {
        name: [(lambda xp, x, name=name: getattr(xp.fft, name)(x, axis=0), [given])]
        for name, given in (
            ("fft", c),
            ("ifft", c),
            ("rfft", x),
            ("irfft", c),
            ("hfft", c),
            ("ihfft", x),
        )
    }
    many = {
        name: [
            (lambda xp, x, name=name: getattr(xp.fft, name)(x, axes=(0, 1)), [given]),
            (lambda xp, x, name=name: getattr(xp.fft, name)(x, s=(4, 4), axes=(0, 1)), [given]),
        ]
        for name, given in (("fftn", c), ("ifftn", c), ("rfftn", x), ("irfftn", c))
    }
    return {
        **la,
        **ft,
        **many,
        "fftfreq": [(lambda xp: xp.fft.fftfreq(7, d=0.5), [])],
        "rfftfreq": [(lambda xp: xp.fft.rfftfreq(8), [])],
        "fftshift": [(lambda xp, x: xp.fft.fftshift(x, axes=0), [x])],
        "ifftshift": [(lambda xp, x: xp.fft.ifftshift(x), [x])],
        "arange": [(lambda xp: [xp.arange(7), xp.arange(1, 9, 3), xp.arange(5, dtype="int8")], [])],
        "asarray": [(lambda xp: [xp.asarray([[1, 2], [3, 4]]), xp.asarray(2.5)], [])],
        "eye": [(lambda xp: [xp.eye(3), xp.eye(3, 4, k=-1)], [])],
        "from_dlpack": [(lambda xp: xp.from_dlpack(np.arange(4.0)), [])],
        "full": [(lambda xp: [xp.full((2, 3), 7), xp.full(3, 1.5)], [])],
        "full_like": [(lambda xp, x: xp.full_like(x, 3), [i])],
        "linspace": [(lambda xp: [xp.linspace(0, 1, 5), xp.linspace(0, 1, 4, endpoint=False)], [])],
        "meshgrid": [
            (lambda xp, x, y, k=k: xp.meshgrid(x, y, indexing=k), [v, x[0]]) for k in ("xy", "ij")
        ],
        "ones": [(lambda xp: [xp.ones((2, 3)), xp.ones(4, dtype="int32")], [])],
        "ones_like": [(lambda xp, x: xp.ones_like(x), [b])],
        "tril": [(lambda xp, x, k=k: xp.tril(x, k=k), [s]) for k in (-1, 0, 2)],
        "triu": [(lambda xp, x, k=k: xp.triu(x, k=k), [s]) for k in (-1, 0, 2)],
        "zeros": [(lambda xp: [xp.zeros((2, 3)), xp.zeros((0, 2))], [])],
        "zeros_like": [(lambda xp, x: xp.zeros_like(x), [i])],
        "astype": [
            (lambda xp, x, d=d: xp.astype(x, d), [given])
            for d in ("float32", "complex128", "bool", "int64")
            for given in (b, i, x)
        ],
        "broadcast_arrays": [(lambda xp, x, y: xp.broadcast_arrays(x, y), [x[:1], y[:, :1]])],
        "broadcast_to": [(lambda xp, x: xp.broadcast_to(x, (3, 7, 5)), [x])],
        "can_cast": [
            (lambda xp: [xp.can_cast("int8", "int16"), xp.can_cast("float64", "int8")], [])
        ],
        "finfo": [(lambda xp: [float(xp.finfo(xp.float32).eps)], [])],
        "iinfo": [(lambda xp: [xp.iinfo(xp.int16).max], [])],
        "isdtype": [
            (lambda xp, kind=kind: [xp.isdtype(xp.int8, kind), xp.isdtype(xp.float32, kind)], [])
            for kind in ("bool", "integral", "numeric", "real floating", "signed integer")
        ],
        "result_type": [
            (lambda xp, x, y: xp.astype(x, xp.result_type(x, y)), [i, x]),
            (lambda xp, x: xp.astype(x, xp.result_type(x, 1.5)), [x]),
        ],
        "clip": [
            (lambda xp, x: [xp.clip(x, -1, 1), xp.clip(x, 0, None), xp.clip(x, None, 1)], [x]),
            (lambda xp, x, y: xp.clip(x, y, y + 1), [x, y]),
        ],
        "matmul": [
            (lambda xp, x, y: xp.matmul(x, y), [square, definite]),
            (lambda xp, x, y: xp.matmul(x, y), [square, square[0]]),
            (lambda xp, x, y: xp.matmul(x, y), [v[:4], square]),
            (lambda xp, x, y: xp.matmul(x, y), [v, v]),
        ],
        "matrix_transpose": [(lambda xp, x: [xp.matrix_transpose(x), x.mT], [s])],
        "tensordot": [
            (lambda xp, x, y: xp.tensordot(x, y, axes=2), [x, y]),
            (lambda xp, x, y: xp.tensordot(x, y, axes=0), [v, x]),
            (lambda xp, x, y: xp.tensordot(x, y, axes=((0,), (0,))), [x, y]),
        ],
        "vecdot": [
            (lambda xp, x, y: xp.vecdot(x, y), [c, c + 1j]),
            (lambda xp, x, y: xp.vecdot(x, y, axis=-2), [s, s]),
        ],
        "concat": [
            (lambda xp, x, y, a=a: xp.concat([x, y], axis=a), [x, y]) for a in (0, 1, -1, None)
        ]
        + [(lambda xp, x, y: xp.concat([x, y]), [i, x])],
        "expand_dims": [(lambda xp, x, a=a: xp.expand_dims(x, axis=a), [x]) for a in (0, 1, -1)],
        "flip": [(lambda xp, x, a=a: xp.flip(x, axis=a), [x]) for a in (None, 0, (0, 1), -1)],
        "moveaxis": [(lambda xp, x: [xp.moveaxis(x, 0, 2), xp.moveaxis(x, (0, 1), (2, 0))], [s])],
        "permute_dims": [(lambda xp, x: xp.permute_dims(x, (2, 0, 1)), [s])],
        "repeat": [
            (lambda xp, x: [xp.repeat(x, 2), xp.repeat(x, 3, axis=1)], [x]),
            (lambda xp, x: xp.repeat(x, np.array([2, 0, 1]), axis=0), [s]),
        ],
        "reshape": [
            (lambda xp, x, t=t: xp.reshape(x, t), [s]) for t in ((24,), (6, 4), (2, -1), (4, 3, 2))
        ],
        "roll": [
            (
                lambda xp, x: [
                    xp.roll(x, 3),
                    xp.roll(x, -1, axis=0),
                    xp.roll(x, (1, 2), axis=(0, 1)),
                ],
                [x],
            )
        ],
        "squeeze": [(lambda xp, x: [xp.squeeze(x, axis=1), xp.squeeze(x, (1,))], [x[:, :1]])],
        "stack": [(lambda xp, x, y, a=a: xp.stack([x, y], axis=a), [x, y]) for a in (0, 1, -1)],
        "tile": [
            (lambda xp, x: [xp.tile(x, (2, 3)), xp.tile(x, (2, 1, 2)), xp.tile(x, (2,))], [x])
        ],
        "unstack": [(lambda xp, x: [*xp.unstack(x, axis=1)], [x])],
        "nonzero": [(lambda xp, x: [*xp.nonzero(x)], [b])],
        "searchsorted": [
            (lambda xp, x, y, k=k: xp.searchsorted(xp.sort(x), y, side=k), [v, x])
            for k in ("left", "right")
        ],
        "where": [(lambda xp, b, x, y: [xp.where(b, x, y), xp.where(b, x, 0.0)], [b, x, y])],
        "unique_all": [(lambda xp, x: [*xp.unique_all(x)], [i])],
        "unique_counts": [(lambda xp, x: [*xp.unique_counts(x)], [i])],
        "unique_inverse": [(lambda xp, x: [*xp.unique_inverse(x)], [i])],
        "unique_values": [(lambda xp, x: xp.sort(xp.unique_values(x)), [i])],
        "argsort": [(lambda xp, x, a=a: xp.argsort(x, axis=a, stable=True), [i]) for a in (0, -1)],
        "sort": [(lambda xp, x, a=a: xp.sort(x, axis=a), [x]) for a in (0, -1)],
        "cumulative_sum": [
            (lambda xp, x, f=f: xp.cumulative_sum(x, axis=0, include_initial=f), [given])
            for f in (False, True)
            for given in (x, i, x.astype("float32"))
        ],
        "cumulative_prod": [
            (lambda xp, x, f=f: xp.cumulative_prod(x, axis=1, include_initial=f), [x])
            for f in (False, True)
        ],
        "diff": [
            (lambda xp, x: [xp.diff(x), xp.diff(x, axis=0, n=2)], [x]),
            (lambda xp, x, y: xp.diff(x, axis=0, prepend=y, append=y), [x, y[:2]]),
        ],
        "take": [(lambda xp, x, n=n: xp.take(x, np.array([2, 0, 2]), axis=n), [x]) for n in (0, 1)],
        "take_along_axis": [(lambda xp, x, i: xp.take_along_axis(x, i, axis=1), [x, i % 5])],
    }


CALLS = calls()


@pytest.mark.parametrize("name", CALLS)
def test_other_functions(name: str) -> None:
    for function, values in CALLS[name]:
        check(function, *values, turns=4)


STANDARD = """
arange asarray empty empty_like eye from_dlpack full full_like linspace meshgrid ones ones_like
tril triu zeros zeros_like astype broadcast_arrays broadcast_to can_cast finfo iinfo isdtype
result_type abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_left_shift
bitwise_invert bitwise_or bitwise_right_shift bitwise_xor ceil clip conj copysign cos cosh divide
equal exp expm1 floor floor_divide greater greater_equal hypot imag isfinite isinf isnan less
less_equal log log1p log2 log10 logaddexp logical_and logical_not logical_or logical_xor maximum
minimum multiply negative nextafter not_equal positive pow real reciprocal remainder round sign
signbit sin sinh square sqrt subtract tan tanh trunc matmul matrix_transpose tensordot vecdot
concat expand_dims flip moveaxis permute_dims repeat reshape roll squeeze stack tile unstack
argmax argmin count_nonzero nonzero searchsorted where unique_all unique_counts unique_inverse
unique_values argsort sort cumulative_prod cumulative_sum max mean min prod std sum var take
take_along_axis all any diff linalg.cholesky linalg.cross linalg.det linalg.diagonal linalg.eigh
linalg.eigvalsh linalg.inv linalg.matmul linalg.matrix_norm linalg.matrix_power linalg.matrix_rank
linalg.matrix_transpose linalg.outer linalg.pinv linalg.qr linalg.slogdet linalg.solve linalg.svd
linalg.svdvals linalg.tensordot linalg.trace linalg.vecdot linalg.vector_norm fft.fft fft.ifft
fft.fftn fft.ifftn fft.rfft fft.irfft fft.rfftn fft.irfftn fft.hfft fft.ihfft fft.fftfreq
fft.rfftfreq fft.fftshift fft.ifftshift
"""


def test_every_function_of_the_standard_is_there_and_compared() -> None:
    tested = {*UNARY, *BINARY, *REDUCTIONS, *CALLS, *LEFT_OUT}
    for name in STANDARD.split():
        place, _, function = name.rpartition(".")
        namespace = getattr(sp, place) if place else sp
        assert callable(getattr(namespace, function)), name
        assert function in tested or name in tested, name
    assert len(LEFT_OUT) <= 0.05 * len(STANDARD.split())


def test_what_is_left_out_is_refused_with_its_reason() -> None:
    from reshard.errors import ShardError, UsageError

    x = sp.ones((3, 2))
    with pytest.raises(ShardError, match="never change"):
        x[0] = 1.0
    with pytest.raises(UsageError, match="kept by ranks"):
        x.to_device("gpu")
    assert x.to_device("cpu") is x
    assert sp.empty((2, 3)).shape == (2, 3)
    assert sp.empty_like(x).dtype is x.dtype


def test_what_the_namespace_says_of_itself() -> None:
    assert sp.ones(2).__array_namespace__() is sp
    info = sp.__array_namespace_info__()
    assert info.default_device() == "cpu" and info.devices() == ["cpu"]
    assert set(info.dtypes(kind="integral")) == set(INTEGERS)
    assert set(info.dtypes()) == set(ALL)
    assert info.default_dtypes()["real floating"] is sp.float64
    assert set(info.capabilities()) >= {"boolean indexing", "data-dependent shapes"}
    assert (sp.e, sp.pi, sp.inf, sp.newaxis) == (np.e, np.pi, np.inf, None) and sp.nan != sp.nan
