"""What the array API standard 2024.12 says beside values: signatures, types, numbers, refusals.

Signatures are the standard's own. Types of results and special numbers are compared with NumPy's,
which follow the standard, on arrays in shards. Where the package differs on purpose, the
difference stands in `DIFFERENT`, with its reason, and is tested.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import operator
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import reshard.spmd as sp
from conformance.test_array_api import ALL, BINARY, FLOATS, INTEGERS, REAL_FLOATS, UNARY, any_spec
from reshard import DeviceMesh, ShardingSpec, spec
from reshard.errors import ArrayIndexError, ReshardError, ShardError, SpecError, UsageError

MESH = DeviceMesh.of(x=2, y=3)
DATA = np.arange(35.0).reshape(7, 5)

# What differs from the standard, or is left open by it, on purpose.
DIFFERENT = {
    "x[0] = 1": "arrays never change",
    "x += 1": "makes a new array: the name is bound to it, others keep the old one",
    "True as an index": "a mask is an array; True is a slip more often than a new axis",
    "one device": "arrays are made on the CPU; shards stay where the runner has them",
    "-0.0 of pending sums": "zeros of both signs add up to 0.0",
}

SIGNATURES = """
arange(start, /, stop=None, step=1, *, dtype=None, device=None)
asarray(obj, /, *, dtype=None, device=None, copy=None)
empty(shape, *, dtype=None, device=None)
empty_like(x, /, *, dtype=None, device=None)
eye(n_rows, n_cols=None, /, *, k=0, dtype=None, device=None)
from_dlpack(x, /, *, device=None, copy=None)
full(shape, fill_value, *, dtype=None, device=None)
full_like(x, /, fill_value, *, dtype=None, device=None)
linspace(start, stop, /, num, *, dtype=None, device=None, endpoint=True)
meshgrid(*arrays, indexing='xy')
ones(shape, *, dtype=None, device=None)
ones_like(x, /, *, dtype=None, device=None)
tril(x, /, *, k=0)
triu(x, /, *, k=0)
zeros(shape, *, dtype=None, device=None)
zeros_like(x, /, *, dtype=None, device=None)
astype(x, dtype, /, *, copy=True, device=None)
can_cast(from_, to, /)
finfo(type, /)
iinfo(type, /)
isdtype(dtype, kind)
result_type(*arrays_and_dtypes)
broadcast_arrays(*arrays)
broadcast_to(x, /, shape)
concat(arrays, /, *, axis=0)
expand_dims(x, /, *, axis=0)
flip(x, /, *, axis=None)
moveaxis(x, source, destination, /)
permute_dims(x, /, axes)
repeat(x, repeats, /, *, axis=None)
reshape(x, /, shape, *, copy=None)
roll(x, /, shift, *, axis=None)
squeeze(x, /, axis)
stack(arrays, /, *, axis=0)
tile(x, repetitions, /)
unstack(x, /, *, axis=0)
argmax(x, /, *, axis=None, keepdims=False)
argmin(x, /, *, axis=None, keepdims=False)
count_nonzero(x, /, *, axis=None, keepdims=False)
nonzero(x, /)
searchsorted(x1, x2, /, *, side='left', sorter=None)
where(condition, x1, x2, /)
unique_all(x, /)
unique_counts(x, /)
unique_inverse(x, /)
unique_values(x, /)
argsort(x, /, *, axis=-1, descending=False, stable=True)
sort(x, /, *, axis=-1, descending=False, stable=True)
cumulative_prod(x, /, *, axis=None, dtype=None, include_initial=False)
cumulative_sum(x, /, *, axis=None, dtype=None, include_initial=False)
max(x, /, *, axis=None, keepdims=False)
mean(x, /, *, axis=None, keepdims=False)
min(x, /, *, axis=None, keepdims=False)
prod(x, /, *, axis=None, dtype=None, keepdims=False)
std(x, /, *, axis=None, correction=0.0, keepdims=False)
sum(x, /, *, axis=None, dtype=None, keepdims=False)
var(x, /, *, axis=None, correction=0.0, keepdims=False)
take(x, indices, /, *, axis=None)
take_along_axis(x, indices, /, *, axis=-1)
all(x, /, *, axis=None, keepdims=False)
any(x, /, *, axis=None, keepdims=False)
diff(x, /, *, axis=-1, n=1, prepend=None, append=None)
clip(x, /, min=None, max=None)
matmul(x1, x2, /)
matrix_transpose(x, /)
tensordot(x1, x2, /, *, axes=2)
vecdot(x1, x2, /, *, axis=-1)
linalg.cholesky(x, /, *, upper=False)
linalg.cross(x1, x2, /, *, axis=-1)
linalg.det(x, /)
linalg.diagonal(x, /, *, offset=0)
linalg.eigh(x, /)
linalg.eigvalsh(x, /)
linalg.inv(x, /)
linalg.matmul(x1, x2, /)
linalg.matrix_norm(x, /, *, keepdims=False, ord='fro')
linalg.matrix_power(x, n, /)
linalg.matrix_rank(x, /, *, rtol=None)
linalg.matrix_transpose(x, /)
linalg.outer(x1, x2, /)
linalg.pinv(x, /, *, rtol=None)
linalg.qr(x, /, *, mode='reduced')
linalg.slogdet(x, /)
linalg.solve(x1, x2, /)
linalg.svd(x, /, *, full_matrices=True)
linalg.svdvals(x, /)
linalg.tensordot(x1, x2, /, *, axes=2)
linalg.trace(x, /, *, offset=0, dtype=None)
linalg.vecdot(x1, x2, /, *, axis=-1)
linalg.vector_norm(x, /, *, axis=None, keepdims=False, ord=2)
fft.fft(x, /, *, n=None, axis=-1, norm='backward')
fft.ifft(x, /, *, n=None, axis=-1, norm='backward')
fft.fftn(x, /, *, s=None, axes=None, norm='backward')
fft.ifftn(x, /, *, s=None, axes=None, norm='backward')
fft.rfft(x, /, *, n=None, axis=-1, norm='backward')
fft.irfft(x, /, *, n=None, axis=-1, norm='backward')
fft.rfftn(x, /, *, s=None, axes=None, norm='backward')
fft.irfftn(x, /, *, s=None, axes=None, norm='backward')
fft.hfft(x, /, *, n=None, axis=-1, norm='backward')
fft.ihfft(x, /, *, n=None, axis=-1, norm='backward')
fft.fftfreq(n, /, *, d=1.0, dtype=None, device=None)
fft.rfftfreq(n, /, *, d=1.0, dtype=None, device=None)
fft.fftshift(x, /, *, axes=None)
fft.ifftshift(x, /, *, axes=None)
"""


@pytest.mark.parametrize("line", SIGNATURES.split("\n")[1:-1], ids=lambda line: line.split("(")[0])
def test_signatures(line: str) -> None:
    name, _, rest = line.partition("(")
    found: dict[str, Any] = {}
    exec(f"def expected({rest}: pass", found)
    function = operator.attrgetter(name)(sp)
    wanted = inspect.signature(found["expected"]).parameters
    given = inspect.signature(function).parameters
    for parameter in wanted.values():
        own = given[parameter.name]
        assert own.default == parameter.default, own
        # What is given by name may be given by place as well.
        by_name = parameter.kind is own.KEYWORD_ONLY and own.kind is own.POSITIONAL_OR_KEYWORD
        assert own.kind is parameter.kind or by_name, own
    # What there is beyond the standard is by name only, and may be left out.
    for own in given.values():
        if own.name not in wanted:
            assert own.kind is own.KEYWORD_ONLY and own.default is None


ATTRIBUTES = "dtype device mT ndim shape size T"
METHODS = """
__abs__ __add__ __and__ __array_namespace__ __bool__ __complex__ __dlpack__ __dlpack_device__ __eq__
__float__ __floordiv__ __ge__ __getitem__ __gt__ __index__ __int__ __invert__ __le__ __lshift__
__lt__ __matmul__ __mod__ __mul__ __ne__ __neg__ __or__ __pos__ __pow__ __rshift__ __setitem__
__sub__ __truediv__ __xor__ to_device __radd__ __rand__ __rfloordiv__ __rlshift__ __rmatmul__
__rmod__ __rmul__ __ror__ __rpow__ __rrshift__ __rsub__ __rtruediv__ __rxor__
"""


def test_the_array_has_all_attributes_and_methods() -> None:
    x = sp.ones((2, 2))
    for name in (ATTRIBUTES + METHODS).split():
        assert hasattr(x, name), name


def number(dtype: str) -> Any:
    return {"b": True, "i": 2, "u": 2, "f": 2.5, "c": 1 + 2j}[np.dtype(dtype).kind]


@pytest.mark.parametrize(
    "name", ["add", "multiply", "equal", "less", "where", "concat", "stack", "divide", "matmul"]
)
def test_result_types_of_all_pairs(name: str) -> None:
    for one, other in itertools.product(ALL, ALL):
        left, right = np.ones((3, 3), one), np.ones((3, 3), other)
        x, y = sp.array(left, spec(MESH, "x, -")), sp.array(right, spec(MESH, "-, y"))
        if name == "where":
            found, expected = sp.where(x == y, x, y), np.where(left == right, left, right)
        elif name in ("concat", "stack"):
            found, expected = getattr(sp, name)([x, y]), getattr(np, name)([left, right])
        else:
            found, expected = getattr(sp, name)(x, y), getattr(np, name)(left, right)
        assert found.dtype.numpy == expected.dtype, (one, other)
        np.testing.assert_array_equal(np.asarray(found), expected)
        assert sp.result_type(x, y).numpy == np.result_type(left, right)
        assert sp.result_type(x.dtype, y.dtype).numpy == np.result_type(left, right)
        assert sp.can_cast(x.dtype, y.dtype) == np.can_cast(left.dtype, right.dtype)
        assert sp.isdtype(x.dtype, y.dtype) == (one == other)


# What PyTorch cannot, or what the standard leaves open: types of two kinds together.
TORCH_LACKS = {"uint16", "uint32", "uint64"}


@pytest.mark.parametrize("name", ["add", "multiply", "equal", "where", "concat"])
def test_result_types_of_tensors(name: str) -> None:
    for one, other in itertools.product(ALL, ALL):
        kinds = np.dtype(one).kind + np.dtype(other).kind
        is_defined = kinds in ("bb", "ff", "cc", "fc", "cf") or set(kinds) <= {"i", "u"}
        if TORCH_LACKS & {one, other} or not is_defined:
            continue
        left, right = np.ones((3, 3), one), np.ones((3, 3), other)
        with sp.running(sp.in_process("torch")):
            x, y = sp.array(left, spec(MESH, "x, -")), sp.array(right, spec(MESH, "-, y"))
        if name == "where":
            found, expected = sp.where(x == y, x, y), np.where(left == right, left, right)
        elif name == "concat":
            found, expected = sp.concat([x, y]), np.concat([left, right])
        else:
            found, expected = getattr(sp, name)(x, y), getattr(np, name)(left, right)
        assert found.dtype.numpy == expected.dtype, (one, other)


def test_numbers_of_python_take_the_array_s_type() -> None:
    for dtype in ALL:
        x = sp.array(np.ones(3, dtype), spec(MESH, "x"))
        own = number(dtype)
        for value in (own, 1, 0.5) if np.dtype(dtype).kind in "fc" else (own,):
            for found in (x == value, x != value):
                assert found.dtype is sp.bool
            if dtype == "bool":
                continue
            for found in (x + value, value * x, x - value, sp.where(x == x, x, value)):
                assert found.dtype.name == dtype, (dtype, value)
    with pytest.raises(UsageError, match="int8"):
        sp.ones(3, dtype="int8") + 1000


@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_special_numbers(name: str) -> None:
    """Infinite ones, those that are none, zeros of both signs, and the ends of the range."""
    dtypes = [d for d in (UNARY.get(name) or BINARY[name]) if d in FLOATS]
    count = 1 if name in UNARY else 2
    for dtype in dtypes:
        few = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -2.0, 3.0]
        if dtype in REAL_FLOATS:
            few += [float(np.finfo(dtype).max), float(np.finfo(dtype).tiny)]
        else:
            few = [complex(one, other) for one, other in itertools.product(few[:6], few[:6])]
        if count == 1:
            arrays = [np.array(few, dtype).reshape(-1, 2)]
        else:
            column = np.array(few, dtype)[:, None]
            arrays = [np.repeat(column, len(few), 1), np.repeat(column, len(few), 1).T]
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            expected = getattr(np, name)(*arrays)
            random = np.random.default_rng(1)
            for _ in range(3):
                operands = [sp.array(one, any_spec(random, one.ndim)) for one in arrays]
                found = np.asarray(getattr(sp, name)(*operands))
                # The last digit is the library's: vectors may be computed another way than rests.
                np.testing.assert_allclose(found, expected, 1e-6, 0, err_msg=dtype)
                assert found.dtype == expected.dtype
                if expected.dtype.kind == "f":
                    zero = expected == 0
                    np.testing.assert_array_equal(
                        np.signbit(found[zero]), np.signbit(expected[zero])
                    )


def reduced(name: str, data: np.ndarray) -> tuple[Any, Any]:
    return getattr(np, name)(data, axis=0), lambda x: getattr(sp, name)(x, axis=0)


@pytest.mark.parametrize(
    "name", ["sum", "prod", "max", "min", "mean", "std", "all", "any", "argmax", "argmin", "sort"]
)
def test_special_numbers_are_reduced_as_they_are_whole(name: str) -> None:
    few = np.array([math.nan, math.inf, -math.inf, 1.0, 0.0, -2.0, 3.0])
    columns = np.array(list(itertools.permutations(few[:5], 4))).T
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        expected, function = reduced(name, columns)
        for text in ("x, y", "y, -", "x y, -", "-, x"):
            found = np.asarray(function(sp.array(columns, spec(MESH, text))))
            np.testing.assert_array_equal(found, expected)


def test_arrays_without_dimensions() -> None:
    """Every elementwise function gives one for one, and it is a number of Python's."""
    for name, dtypes in {**UNARY, **BINARY}.items():
        for dtype in dtypes:
            value = np.array(1, dtype)
            count = 1 if name in UNARY else 2
            operands = [sp.array(value, ShardingSpec(MESH, []))] * count
            with np.errstate(all="ignore"):
                found = getattr(sp, name)(*operands)
                expected = getattr(np, name)(*[value] * count)
            assert found.shape == () and found.ndim == 0 and found.size == 1
            assert found.dtype.numpy == expected.dtype, (name, dtype)


@pytest.mark.parametrize("dtype", ALL)
def test_numbers_are_python_s(dtype: str) -> None:
    x = sp.array(np.array(number(dtype), dtype), ShardingSpec(MESH, []))
    assert type(bool(x)) is bool and type(complex(x)) is complex
    if dtype not in ("complex64", "complex128"):
        assert type(int(x)) is int and type(float(x)) is float
    if dtype in INTEGERS:
        assert type(operator.index(x)) is int


def test_the_dlpack_protocol() -> None:
    x = sp.array(DATA, spec(MESH, "x, y"))
    assert x.__dlpack_device__() == (1, 0)
    np.testing.assert_array_equal(np.from_dlpack(x), DATA)
    assert torch.from_dlpack(x).shape == (7, 5)
    np.testing.assert_array_equal(np.asarray(sp.from_dlpack(torch.ones(3))), np.ones(3))
    np.testing.assert_array_equal(np.asarray(sp.from_dlpack(x, copy=True)), DATA)
    assert x.__dlpack__(max_version=(1, 0), dl_device=(1, 0), copy=True) is not None
    with pytest.raises(BufferError):
        x.__dlpack__(dl_device=(2, 0))
    with pytest.raises(UsageError, match="from_dlpack of a list"):
        sp.from_dlpack([1, 2])


def test_what_types_can_hold() -> None:
    for dtype in FLOATS:
        own, numpy = sp.finfo(getattr(sp, dtype)), np.finfo(dtype)
        assert own.dtype.numpy == numpy.dtype and own.bits == numpy.bits
        for name in ("eps", "max", "min", "smallest_normal"):
            assert type(getattr(own, name)) is float
            assert getattr(own, name) == float(getattr(numpy, name))
    narrow = sp.finfo(sp.ones(2, dtype="bfloat16"))
    assert (narrow.bits, narrow.eps, narrow.dtype.name) == (16, 2.0**-7, "bfloat16")
    for dtype in INTEGERS:
        whole = sp.iinfo(sp.ones(2, dtype=dtype))
        assert whole == (
            np.iinfo(dtype).bits,
            np.iinfo(dtype).max,
            np.iinfo(dtype).min,
            whole.dtype,
        )
        assert type(whole.max) is int and whole.dtype.name == dtype
    for function in (lambda: sp.finfo(sp.int8), lambda: sp.iinfo(sp.float32)):
        with pytest.raises(UsageError, match="was expected"):
            function()


def test_what_the_namespace_says() -> None:
    info = sp.__array_namespace_info__()
    abilities = info.capabilities()
    assert abilities["boolean indexing"] is True and abilities["data-dependent shapes"] is True
    assert type(abilities["max dimensions"]) is int and abilities["max dimensions"] > 0
    for device in info.devices():
        assert set(info.default_dtypes(device=device)) == {
            *("real floating", "complex floating", "integral", "indexing")
        }
        for name, dtype in info.dtypes(device=device, kind=("bool", "integral")).items():
            assert sp.empty(1, dtype=dtype, device=device).dtype.name == name
    x = sp.ones(2)
    for version in ("2021.12", "2022.12", "2023.12", "2024.12", None):
        assert x.__array_namespace__(api_version=version) is sp
    with pytest.raises(UsageError, match=r"version '2099\.12' of the array API"):
        x.__array_namespace__(api_version="2099.12")


@pytest.mark.parametrize(
    "function",
    [
        lambda device: sp.ones(3, device=device),
        lambda device: sp.asarray([1], device=device),
        lambda device: sp.arange(3, device=device),
        lambda device: sp.eye(3, device=device),
        lambda device: sp.linspace(0, 1, 3, device=device),
        lambda device: sp.full_like(sp.ones(3), 2, device=device),
        lambda device: sp.empty_like(sp.ones(3), device=device),
        lambda device: sp.astype(sp.ones(3), "float32", device=device),
        lambda device: sp.fft.fftfreq(3, device=device),
        lambda device: sp.from_dlpack(np.ones(3), device=device),
        lambda device: sp.__array_namespace_info__().dtypes(device=device),
    ],
)
def test_devices(function: Callable[[Any], Any]) -> None:
    for device in (None, "cpu"):
        function(device)
    with pytest.raises(UsageError, match=r"device 'gpu'; 'cpu' was expected"):
        function("gpu")


@pytest.mark.parametrize(
    ("function", "kind", "said"),
    [
        (lambda x: operator.setitem(x, 0, 1.0), ShardError, "never change"),
        (lambda x: x[True], ShardError, "index True of type bool"),
        (lambda x: x[9], ArrayIndexError, "index 9"),
        (lambda x: x.to_device("gpu"), UsageError, "kept by ranks"),
        (lambda x: sp.asarray([1], copy=False), UsageError, "without a copy"),
        (lambda x: sp.asarray("text"), ReshardError, "unknown"),
        (lambda x: sp.result_type(), UsageError, "at least one"),
        (lambda x: sp.nonzero(sp.asarray(1.0)), UsageError, "no dimensions"),
        (lambda x: sp.diff(x, n=-1), UsageError, "-1 times"),
        (lambda x: sp.diff(x, n=0.5), UsageError, r"0\.5 times"),
        (lambda x: sp.fft.fftfreq(0), UsageError, "of 0 samples"),
        (lambda x: sp.max(x[:0]), UsageError, "no elements"),
        (lambda x: sp.argmax(x[:0], axis=0), ReshardError, "argmax"),
        (lambda x: sp.sort(sp.asarray(1.0)), SpecError, "of 0"),
        (lambda x: sp.reshape(x, (4, 4)), SpecError, "do not make"),
        (lambda x: sp.squeeze(x, 0), SpecError, "size 1"),
        (lambda x: sp.permute_dims(x, (0, 0)), SpecError, "each of them once"),
        (lambda x: sp.expand_dims(x, axis=5), ArrayIndexError, "from -3 to 2"),
        (lambda x: x + sp.ones(3), SpecError, "do not broadcast"),
        (lambda x: x @ sp.ones(3), SpecError, "must be equal"),
        (lambda x: sp.matmul(sp.asarray(1.0), x), SpecError, "scalar"),
        (lambda x: sp.concat([x, sp.ones((2, 3))]), SpecError, "may differ"),
        (lambda x: sp.searchsorted(x[0], x[0], side="up"), UsageError, "side"),
    ],
)
def test_what_is_refused(
    function: Callable[[Any], Any], kind: type[ReshardError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        function(sp.array(DATA, spec(MESH, "x, y")))


def test_arrays_without_dimensions_have_no_parts() -> None:
    for function in (len, iter, list):
        with pytest.raises(TypeError, match="no dimensions"):
            function(sp.asarray(2.0))
    with pytest.raises(TypeError, match="no number"):
        bool(sp.ones(3))
    x = sp.array(DATA, spec(MESH, "x, y"))
    assert [float(row[0]) for row in x] == DATA[:, 0].tolist()
    assert 3.0 in x and -1.0 not in x


def test_arrays_never_change_so_copies_are_the_same() -> None:
    x = sp.array(DATA, spec(MESH, "x, y"))
    assert copy.copy(x) is x and copy.deepcopy({"x": x})["x"] is x
    again = pickle.loads(pickle.dumps(x))
    assert again.type is x.type and again.runner is x.runner
    np.testing.assert_array_equal(np.asarray(again), DATA)
    old = x
    x += 1
    assert x is not old and float(old[0, 0]) == 0.0 and float(x[0, 0]) == 1.0


def test_what_an_array_is_printed_as() -> None:
    x = sp.array(DATA, spec(MESH, "x, y"))
    assert repr(x) == "<ShardedArray float64[7, 5], 'x, y' over DeviceMesh(x=2,y=3)>"
    assert (
        repr(sp.ones(2, dtype="int8")) == str(sp.ones(2, dtype="int8")) == "<ShardedArray int8[2]>"
    )


def test_differences_are_few_and_explained() -> None:
    assert len(DIFFERENT) < 10 and all(len(reason) > 10 for reason in DIFFERENT.values())
