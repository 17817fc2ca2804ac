"""What cannot be asked of an eager array is said: the value, what was expected, what to do."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, DimSpec, ShardingSpec, spec
from reshard.errors import (
    ArrayIndexError,
    MeshError,
    ReshardError,
    ShardError,
    SpecError,
    UsageError,
)

MESH = DeviceMesh.of(x=2, y=3)
DATA = np.arange(35.0).reshape(7, 5)


def sharded(data: Any = DATA, library: str = "numpy") -> Any:
    text = ", ".join(["x", "y", *"----"][: np.ndim(data)])
    return sp.array(data, spec(MESH, text), runner=sp.in_process(library))


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_narrow_floats_are_summed_wide(library: str) -> None:
    data = np.linspace(0, 6e4, 40).astype(np.float16)
    x = sharded(data, library)
    for axis in (None, 0):
        mean = sp.mean(x, axis=axis)
        assert mean.dtype.name == "float16"
        np.testing.assert_allclose(np.asarray(mean), data.astype(float).mean(), 1e-3)
        np.testing.assert_allclose(np.asarray(sp.std(x, axis=axis)), data.astype(float).std(), 1e-3)
    small = (data / np.float16(500)).astype(np.float16)
    variance = sp.var(sharded(small, library), correction=1)
    assert variance.dtype.name == "float16"
    np.testing.assert_allclose(np.asarray(variance), small.astype(float).var(ddof=1), 1e-3)


def test_variances_of_bfloat16_are_around_a_mean_that_is_not_rounded() -> None:
    x = sp.astype(sharded(np.array([1000, 1000, 1004] * 2, np.float32), "torch"), "bfloat16")
    assert sp.var(x).dtype.name == "bfloat16"
    assert abs(float(sp.var(x)) - 32 / 9) < 0.02


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (9, r"index 9 of a dimension of size 7; give one of -7 to 6"),
        (-8, r"index -8 .* -7 to 6"),
        ((0, 5), r"index 5 .* -5 to 4"),
        (np.array([1, 9]), r"index 9 .* -7 to 6"),
        ([1, -8], r"index -8 .* -7 to 6"),
        ((..., ...), r"2 times \.\.\. .* at most once"),
        ((0, 0, 0), r"3 indices for shape \[7, 5\]; give at most 2"),
        ((np.array([0]),) * 3, r"3 indices for shape \[7, 5\]; give at most 2"),
        (slice(None, None, 0), r"slice ::0 .* a step that is not 0"),
        (slice(1.5, 2), r"slice 1\.5:2: .* give whole numbers"),
    ],
)
def test_indices_that_are_not_there(key: Any, said: str) -> None:
    with pytest.raises(ArrayIndexError, match=said) as caught:
        sharded()[key]
    assert isinstance(caught.value, ReshardError)
    assert isinstance(caught.value, IndexError)


def test_an_array_is_iterated_to_its_end() -> None:
    assert len(list(sharded())) == 7


def test_indices_that_are_known_are_checked_along_cut_axes() -> None:
    for function in (sp.take, sp.take_along_axis):
        with pytest.raises(ArrayIndexError, match="index 7 of a dimension of size 7"):
            function(sharded(), np.array([[7]]), axis=0)


LOOK_UPS: list[Callable[[Any, Any], Any]] = [
    lambda x, i: sp.take(x, i, axis=0),
    lambda x, i: sp.take_along_axis(x, sp.expand_dims(i, axis=1), axis=0),
    lambda x, i: x[i],
    lambda x, i: x[i, 0],
    lambda x, i: x[0 * i, i],
    lambda x, i: sp.embedding(i, x),
    lambda x, i: sp.scatter(x, i, DATA[:2]),
    lambda x, i: sp.scatter(x, i, DATA[:2], mode="add"),
    lambda x, i: sp.take(DATA, i, axis=0),
    lambda x, i: sp.cross_entropy(x[:2], i),
]


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("look_up", LOOK_UPS)
def test_indices_that_only_the_elements_tell_are_checked(look_up: Any, library: str) -> None:
    for text, at, bad in itertools.product(
        ("x, y", "-, x", "-, -"), ("x", "-"), ([0, 7], [-8, 1], [-100, 9])
    ):
        x = sp.array(DATA, spec(MESH, text), runner=sp.in_process(library))
        index, good = (
            sp.array(np.array(one), spec(MESH, at), runner=sp.in_process(library))
            for one in (bad, [4, -5])
        )
        look_up(x, good)
        found = next(one for one in bad if not -7 <= one < 7)
        for _ in range(2):
            with pytest.raises(ArrayIndexError, match=rf"index {found} of a dimension of size"):
                look_up(x, index)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_narrow_indices_do_not_wrap_around(bits: int, library: str) -> None:
    runner = sp.in_process(library)
    long = sp.array(np.arange(200.0), spec(MESH, "x"), runner=runner)
    for dtype, given in ((f"int{bits}", [-1, 5]), (f"uint{bits}", [199, 5])):
        places = np.array(given, dtype)
        for index in (places, sp.array(places, spec(MESH, "y"), runner=runner)):
            np.testing.assert_array_equal(np.asarray(sp.take(long, index)), [199, 5])
        row, column = (sp.array(np.array([n], dtype), runner=runner) for n in (19, 9))
        assert float(sp.reshape(long, (20, 10))[row, column][0]) == 199.0
    if bits == 64:
        with pytest.raises(ArrayIndexError, match="of a dimension of size 200"):
            sp.take(long, sp.array(np.array([2**64 - 1], np.uint64), runner=runner))


@pytest.mark.parametrize(
    ("function", "kind", "said"),
    [
        (lambda x: sp.attention(x, x, x), SpecError, r"queries of shape \[7, 5\].*heads"),
        (lambda x: sp.linalg.cross(x, x, axis=4), SpecError, r"\[?4.* of 2"),
        (lambda x: sp.sum([1, 2]), UsageError, r"sum of \[1, 2\], a list; an sp.array was"),
        (lambda x: sp.fft.fft([1, 2]), UsageError, r"fft of \[1, 2\], a list; an sp.array was"),
        (lambda x: sp.concat([[1], [2]]), UsageError, r"^\[1\], a list, .*; an sp.array was"),
        (lambda x: sp.isin(x, [1, 2]), UsageError, r"isin of \[1, 2\], a list; an sp.array was"),
        (lambda x: np.vstack([x, [1]]), UsageError, r"vstack of \[1\], a list; an sp.array"),
        (lambda x: x.shard(MESH, [None, []]), SpecError, r"dimension None .*\[\] for a dim"),
        (lambda x: ShardingSpec(MESH, 3), SpecError, r"dimensions 3; give a list"),
        (lambda x: DimSpec([3]), SpecError, r"axis 3 of a dimension; give the name"),
        (lambda x: sp.array([[1, 2], [3]]), UsageError, r"\[\[1, 2\], \[3\]\].*equal lengths"),
        (lambda x: sp.ones((2, -1)), UsageError, r"shape \(2, -1\) with a size below 0; give"),
        (lambda x: sp.eye(-1), UsageError, r"shape \(-1, -1\) .* 0 or more"),
        (lambda x: sp.eye(3, k="a"), UsageError, r"diagonal at 'a'.*give a whole number"),
        (lambda x: sp.linspace(0, 1, -1), UsageError, r"of -1: .*0 or more"),
        (lambda x: sp.arange(0, 10, 0), UsageError, r"by 0: .*a step that is not 0"),
        (lambda x: sp.zeros("a"), UsageError, r"shape 'a': .*give one whole number, or"),
        (lambda x: sp.zeros(2.5), UsageError, r"shape 2\.5: .*give one whole number, or"),
        (lambda x: sp.repeat(x, [1, 2], axis=0), UsageError, r"\[1, 2\] of 7 places.*for each"),
        (lambda x: sp.repeat(x, -1, axis=0), UsageError, r"-1 repeats; 0 or more"),
        (lambda x: sp.linalg.matrix_power(sp.eye(3), 1.5), UsageError, r"1\.5; give a whole"),
        (lambda x: sp.reshape(sp.zeros((0, 4)), (-1, 0)), SpecError, r"\(-1, 0\).*say which"),
        (lambda x: round(x, 1), UsageError, r"1 digits; .*whole numbers"),
    ],
)
def test_what_cannot_be_is_said(
    function: Callable[[Any], Any], kind: type[ReshardError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        function(sharded())


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: sp.sum(x, axis=7), r"sum of float64\[7, 5\]: dimensions \(7,\) of 2; name some"),
        (lambda x: sp.sum(x, axis="a"), r"sum of .*: dimensions \('a',\) of 2; name them by whole"),
        (lambda x: sp.prod(x, axis=(0, 0)), r"prod of .*: dimensions \(0, 0\) of 2; .* each once"),
        (lambda x: x @ x, r"matmul of float64\[7, 5\], float64\[7, 5\]: shapes .*: 5 and 7"),
        (lambda x: x + x[1:], r"add of .*do not broadcast; sizes counted"),
    ],
)
def test_whole_arrays_are_refused_as_arrays_in_shards_are(
    function: Callable[[Any], Any], said: str, library: str
) -> None:
    whole = sp.array(DATA, runner=sp.in_process(library))
    with pytest.raises(SpecError, match=said):
        function(whole)
    with pytest.raises(SpecError, match=said):
        function(sharded(DATA, library))


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_what_depends_on_elements_is_said_of_a_compiled_operation_too(library: str) -> None:
    square = np.diag([1.0, 2.0, 3.0])
    sp.linalg.inv(sharded(square, library))
    with pytest.raises(UsageError, match=rf"inv of float64\[3, 3\].*: {library} cannot"):
        sp.linalg.inv(sharded(square * 0, library))
    if library == "torch":
        return
    base, powers = sharded(np.arange(6)), sharded(np.arange(6))
    assert (base**powers).to_dense().tolist() == [0**0, 1, 4, 27, 256, 3125]
    with pytest.raises(UsageError, match=r"pow of int64\[6\].*: numpy cannot"):
        base ** (powers - 1)
    sp.where(base > 0, base, powers)
    places = sp.array(np.array([0, 1]))
    whole = sp.array(DATA)
    sp.take(whole, places, axis=0)
    with pytest.raises(ArrayIndexError, match="index 7 of a dimension of size 7"):
        sp.take(whole, places + 7, axis=0)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_numpys_functions_that_are_made_of_others(library: str) -> None:
    x, row = sharded(DATA, library), sharded(np.arange(5.0), library)
    pairs = [
        (np.ravel(x), DATA.ravel()),
        (np.swapaxes(x, 0, -1), DATA.T),
        (np.swapaxes(x, 1, 1), DATA),
        (np.vstack([x, row]), np.vstack([DATA, np.arange(5.0)])),
        (np.vstack([row, row]), np.vstack([np.arange(5.0)] * 2)),
        (np.hstack([x, x]), np.hstack([DATA, DATA])),
        (np.hstack([row, row]), np.hstack([np.arange(5.0)] * 2)),
        (np.hstack([row[0], row[1]]), [0.0, 1.0]),
        (np.vstack([x, DATA]), np.vstack([DATA, DATA])),
        (round(x / 3), np.round(DATA / 3)),
        (np.dot(x, row), DATA @ np.arange(5.0)),
        (np.dot(2, x), 2 * DATA),
        (np.squeeze(x[:, None, :1]), DATA[:, 0]),
        (np.squeeze(x[:, :1], axis=1), DATA[:, 0]),
        (np.copy(x), DATA),
        (np.around(x / 3), np.round(DATA / 3)),
        (np.trace(x), np.trace(DATA)),
        (np.diagonal(x, offset=1), np.diagonal(DATA, 1)),
        (np.outer(row, row), np.outer(np.arange(5.0), np.arange(5.0))),
        (np.cross(x[:, :3], x[:, 1:4]), np.cross(DATA[:, :3], DATA[:, 1:4])),
        (np.linalg.trace(x), np.trace(DATA)),
        *zip(divmod(x, 4), divmod(DATA, 4), strict=True),
        *zip(divmod(4, x + 1), divmod(4, DATA + 1), strict=True),
    ]
    for found, expected in pairs:
        np.testing.assert_array_equal(np.asarray(found), expected)
    assert np.shape(x) == (7, 5) and np.ndim(x) == 2 and np.size(x) == 35 and np.size(x, 1) == 5
    with pytest.raises(UsageError, match=r"numpy\.dot of arrays of 3 and 2"):
        np.dot(x[None], x)
    with pytest.raises(UsageError, match=r"numpy\.ravel with .*use numpy\.ravel\(a"):
        np.ravel(x, order="F")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sum", r"'sum'; use sp\.sum\(x\)"),
        ("reshape", r"use sp\.reshape\(x, \.\.\.\)"),
        ("astype", r"use sp\.astype\(x, \.\.\.\)"),
        ("transpose", r"use sp\.permute_dims\(x, \.\.\.\)"),
        ("diagonal", r"use sp\.linalg\.diagonal\(x\)"),
        ("dot", r"use numpy\.dot\(x\)"),
        ("ravel", r"use numpy\.ravel\(x\)"),
        ("tolist", r"or x\.to_dense\(\)"),
    ],
)
def test_methods_of_numpys_arrays_are_hinted_at(name: str, said: str) -> None:
    with pytest.raises(AttributeError, match=said):
        getattr(sharded(), name)
    assert not hasattr(sharded(), name)


def test_a_mesh_that_is_not_the_shardings_is_refused() -> None:
    x, other = sharded(), DeviceMesh.of(x=3, y=2)
    with pytest.raises(MeshError, match=r"DeviceMesh\(x=3,y=2\), but from_spec `x, y`"):
        sp.reshard_tensor(x, x.spec, None, other)
    with pytest.raises(MeshError, match=r"DeviceMesh\(x=3,y=2\), but to_spec `y, x`"):
        sp.reshard_tensor(x, None, spec(MESH, "y, x"), other)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: sp.exp(DATA), UsageError, r"exp of array\(.{1,120}; at least one sp.array"),
        (lambda: sp.tile(sharded(), (2, -1)), UsageError, r"tile of \(2, -1\) repetitions"),
        (lambda: sp.zeros((2**40, 2**40)), UsageError, "of more than 9223372036854775807 elements"),
        (lambda: sp.array(np.ma.masked_less(DATA, 3)), ShardError, "whose mask would be lost"),
    ],
)
def test_arguments_that_cannot_be(call: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=r"(?s)" + said):
        call()


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_tensors_that_are_not_dense_are_refused(library: str) -> None:
    torch = pytest.importorskip("torch")
    runner = sp.in_process(library)
    with pytest.raises(ShardError, match=r"a tensor of torch.sparse_coo; .* tensor.to_dense"):
        sp.array(torch.eye(3).to_sparse(), runner=runner)
    parts = [torch.ones(2), torch.ones(3)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    with pytest.raises(ShardError, match="a nested tensor; "):
        sp.array(nested, runner=runner)


def test_numbers_have_formats() -> None:
    total = sp.sum(sharded())
    assert f"{total:.3f} {total:>8}" == "595.000    595.0"
    assert f"{total}" == str(total)
    with pytest.raises(TypeError, match="an array of 2 dimensions is no number"):
        f"{sharded():.3f}"
