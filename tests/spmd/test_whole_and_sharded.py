"""Eager operations of whole and of sharded arrays, and programs, agree on types and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import reshard.spmd as sp
from reshard import DeviceMesh, spec
from reshard.errors import ReshardError, SpecError, UsageError

MESH = DeviceMesh.of(x=2, y=3)
KINDS = ("bool", "uint8", "int32", "bfloat16", "float16", "float32", "complex64")
FUNCTIONS: list[Callable[..., Any]] = [
    sp.sum,
    sp.prod,
    sp.mean,
    sp.sigmoid,
    sp.sign,
    lambda x: sp.softmax(x, axis=0),
    lambda x: sp.logsumexp(x, axis=0),
    lambda x: sp.cumulative_sum(x, axis=0),
    lambda x: x * 0.5,
    lambda x: x - 2**40,
    lambda x: sp.concat([x, x[:1]]),
]
PAIRED: list[Callable[..., Any]] = [
    sp.add,
    sp.logaddexp,
    sp.floor_divide,
    lambda x, y: sp.sum(x * y),
    lambda x, y: sp.concat([x, y]),
    lambda x, y: sp.stack([x, y]),
    lambda x, y: sp.where(x > 0, x, y),
    sp.matmul,
]


def given(dtype: str, library: str, text: str | None) -> Any:
    kind = getattr(ml_dtypes, dtype, dtype)
    data = np.arange(1, 7).astype(kind)
    sharding = None if text is None else spec(MESH, text)
    return sp.array(data, sharding, runner=sp.in_process(library))


def outcome(function: Callable[..., Any], *arrays: Any) -> Any:
    try:
        found = function(*arrays)
    except ReshardError:
        return "refused"
    dense = np.asarray(found)
    assert dense.dtype.name == found.dtype.name
    return found.dtype.name, found.shape


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_programs_have_the_types_of_the_librarys_eager_operations(dtype: str, library: str) -> None:
    for number, function in enumerate(FUNCTIONS):
        whole, cut = given(dtype, library, None), given(dtype, library, "x")
        expected = outcome(function, whole)
        assert outcome(function, cut) == expected, number
        assert outcome(sp.jit(function), cut) == expected, number
    for other in KINDS:
        for number, function in enumerate(PAIRED):
            arrays = [(given(dtype, library, a), given(other, library, b)) for a, b in _CUTS]
            expected = outcome(function, *arrays[0])
            assert outcome(function, *arrays[1]) == expected, (number, other)
            assert outcome(sp.jit(function), *arrays[1]) == expected, (number, other)


_CUTS = ((None, None), ("x", "y"))


def test_loops_and_branches_of_programs_have_the_librarys_types() -> None:
    x = given("uint8", "torch", "x")

    def total(x: Any) -> Any:
        first = sp.cond(sp.max(x) > 3, sp.sum, lambda x: sp.sum(x) * 2, x)
        return sp.scan(lambda carried, one: (carried + sp.sum(one), carried), first, x)[0]

    assert outcome(sp.jit(total), x) == outcome(total, x) == ("int64", ())
    assert sp.trace(sp.sum, x).outputs[0].dtype.name == "int64"


@pytest.mark.parametrize("runs", [lambda f: f, sp.jit])
@pytest.mark.parametrize("text", [None, ""])
def test_numbers_have_no_axes(text: str | None, runs: Callable[..., Any]) -> None:
    number = sp.array(2.5, None if text is None else spec(MESH, text))
    for function in (sp.sum, sp.prod, sp.any, sp.all, sp.count_nonzero, sp.linalg.vector_norm):
        with pytest.raises(SpecError, match=r"dimensions \(-1,\) of 0"):
            runs(lambda x: function(x, axis=-1))(number)  # noqa: B023


def test_what_rules_refuse_is_refused_of_whole_arrays_too() -> None:
    for text in (None, "x, y"):
        nothing = sp.array(np.zeros((2, 0)), None if text is None else spec(MESH, text))
        with pytest.raises(SpecError, match=r"top 4 of 2; 0 to 2 were expected"):
            sp.top_k(nothing, 4, axis=0)


def test_types_narrower_than_float32_promote() -> None:
    brain, half = (sp.ones(3, dtype=name) for name in ("bfloat16", "float16"))
    assert sp.result_type(brain, "int8").name == "bfloat16"
    assert sp.result_type(brain, half) is sp.float32
    assert sp.result_type(brain, 1.5).name == "bfloat16"
    assert (brain + half).dtype is sp.float32


@pytest.mark.parametrize(
    ("function", "kind", "said"),
    [
        (
            lambda x: sp.argmax(x[:0], axis=0),
            UsageError,
            r"argmax over axes 0 of .*\[0, 3\], which",
        ),
        (lambda x: sp.top_k(x * 1j, 1), UsageError, r"top_k of complex128: .* no order; take"),
        (
            lambda x: sp.sum(x, axis=np.array([0, 1])),
            SpecError,
            r"array.* of 2; name them by whole",
        ),
        (lambda x: sp.flip(x, axis=np.array(["a"])), SpecError, r"'a'.* of 2 .*by whole numbers"),
        (lambda x: sp.broadcast_shapes(x, x), SpecError, r"shape <ShardedArray.*whole numbers"),
        (lambda x: sp.concat(3), SpecError, r"^3, a int, to put together; give arrays"),
        (lambda x: sp.stack(x[0, 0]), SpecError, r"to put together; give arrays"),
        (lambda x: sp.concat([x, x], axis=[]), SpecError, r"dimensions \(\[\],\) of 2"),
        (lambda x: sp.meshgrid(x, x[0]), SpecError, r"of shapes \[4, 3\], \[3\]; vectors"),
        (lambda x: sp.linalg.diagonal(x, offset="a"), UsageError, r"diagonal at 'a'; a whole"),
        (
            lambda x: sp.take_along_axis(x, np.array([0])),
            SpecError,
            r"\[1\] along axis 1 of \[4, 3",
        ),
        (
            lambda x: sp.dynamic_slice(x, 3, (1, 1)),
            UsageError,
            r"begins at 3; give a start for each",
        ),
        (
            lambda x: sp.linspace(x, 1, 3),
            UsageError,
            r"linspace from or to <.*numbers were expected",
        ),
        (lambda x: sp.fft.fftfreq(x), UsageError, r"frequencies of <Sharded.* give 1 or more"),
        (lambda x: sp.array(1, runner=3), UsageError, r"of runner 3, a int; give sp.in_process"),
        (lambda x: sp.roll(x, (), axis=0), SpecError, r"shifts \(\) of axes \(0,\); give one"),
        (lambda x: sp.fft.fft(x, n=1.5), UsageError, r"length n of fft 1\.5 must be a whole"),
        (lambda x: sp.fft.rfft(x, n=0), UsageError, r"length n of rfft 0 must be at least 1"),
        (lambda x: sp.fft.fftn(x, axes=2), SpecError, r"axes \(2,\) of 2 dimensions"),
        (lambda x: sp.fft.fftn(x, axes=()), SpecError, r"fftn of float64\[4, 3\].* no axes; at"),
        (lambda x: sp.fft.fftn(x, s=(2, "a")), UsageError, r"lengths s of fftn \[2, 'a'\] must"),
        (lambda x: sp.fft.ifftn(x, s=(2,), axes=(0, 1)), UsageError, r"\(2,\); give 2 whole"),
        (lambda x: sp.fft.fftshift(x, axes="a"), SpecError, r"axes \('a',\) of 2.*whole numbers"),
        (lambda x: sp.vecdot(x, x, axis="a"), SpecError, r"\('a',\) of 2; name them by whole"),
        (lambda x: sp.linalg.vecdot(x, x, axis=1.5), SpecError, r"\(1\.5,\) of 2; name them"),
    ],
)
def test_wrong_axes_and_lengths_are_named(
    function: Callable[..., Any], kind: type[ReshardError], said: str
) -> None:
    for text in (None, "x, y"):
        x = sp.array(np.ones((4, 3)), None if text is None else spec(MESH, text))
        with pytest.raises(kind, match=said):
            function(x)


@pytest.mark.parametrize("text", [None, "x, y"])
def test_one_axis_or_none_is_transformed_and_rolled(text: str | None) -> None:
    data = np.arange(12.0).reshape(4, 3)
    x = sp.array(data, None if text is None else spec(MESH, text))
    for found, expected in (
        (sp.fft.fftn(x, axes=-2), np.fft.fftn(data, axes=(-2,))),
        (sp.roll(x, 2, axis=()), data),
        (sp.vecdot(x, x[0], axis=-1), np.vecdot(data, data[0])),
        (sp.vecdot(x, x[:, 0][:3], axis=0), np.vecdot(data, data[:3, 0])),
    ):
        np.testing.assert_allclose(np.asarray(found), expected)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_texts_and_objects_are_no_elements(library: str) -> None:
    runner = sp.in_process(library)
    x = sp.array(np.ones(2), runner=runner)
    for wrong in (np.array(["a", "b"]), np.array([None, 1])):
        for function in (lambda y: x + y, lambda y: sp.matmul(y, x), sp.array):
            with pytest.raises(UsageError, match=r"dtype '(str32|object)': unknown"):
                function(wrong)


def test_tensors_alone_are_no_arrays_in_shards() -> None:
    torch = pytest.importorskip("torch")
    for function in (sp.argmin, sp.var, sp.clip):
        with pytest.raises(UsageError, match=r"tensor\(.*, a Tensor; an sp.array was expected"):
            function(torch.ones(2))
