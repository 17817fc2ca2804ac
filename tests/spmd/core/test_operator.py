"""The table of rules: who is in it, who is not, and users' own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import reshard.spmd
from reshard.errors import SpecError
from reshard.spmd.core import operator as table
from reshard.spmd.core.operator import operator_of, operators, rule, rule_of, shipped_operators

# The functions of the array API standard 2024.12 that give arrays, by the section of the standard.
ARRAY_API = """
abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_invert
bitwise_or bitwise_right_shift bitwise_xor ceil clip conj copysign cos cosh divide equal exp expm1
floor floor_divide greater greater_equal hypot imag isfinite isinf isnan less less_equal log log1p
log2 log10 logaddexp logical_and logical_not logical_or logical_xor maximum minimum multiply
negative nextafter not_equal positive pow real reciprocal remainder round sign signbit sin sinh
square sqrt subtract tan tanh trunc
arange empty empty_like eye full full_like linspace meshgrid ones ones_like tril triu zeros
zeros_like astype take take_along_axis
matmul matrix_transpose tensordot vecdot
cholesky cross det diagonal eigh eigvalsh inv matrix_norm matrix_power matrix_rank outer pinv qr
slogdet solve svd svdvals trace vector_norm
fft ifft fftn ifftn rfft irfft rfftn irfftn hfft ihfft fftfreq rfftfreq fftshift ifftshift
broadcast_arrays broadcast_to concat expand_dims flip moveaxis permute_dims repeat reshape roll
squeeze stack tile unstack argmax argmin count_nonzero nonzero searchsorted where
unique_all unique_counts unique_inverse unique_values argsort sort
cumulative_prod cumulative_sum max mean min prod std sum var all any diff
"""

ISSUE = """
add select clamp dot_general einsum permute_dims broadcast_to reshape sum max min mean prod argmax
concat stack slice pad flip roll split take embedding scatter dynamic_slice dynamic_update_slice
convolution max_pool avg_pool cumulative_sum sort top_k softmax log_softmax layer_norm rms_norm
cross_entropy attention fft cholesky triangular_solve qr random_bits where one_hot
"""


@pytest.fixture
def own_rules() -> Iterator[None]:
    """Takes away what a test adds to the table."""
    yield
    for name in set(table._table) - shipped_operators():
        del table._table[name]
    table._warned.clear()


def test_the_standard_s_functions_and_the_issue_s_are_in_the_table() -> None:
    assert not set(ARRAY_API.split()) - shipped_operators()
    assert not set(ISSUE.split()) - shipped_operators()


def test_only_operators_with_results_of_unknown_shape_have_no_rule() -> None:
    """All that are replicated: their results' shapes depend on the values."""
    assert {name for name in shipped_operators() if not operators[name].has_rule} == {
        "nonzero",
        "unique_all",
        "unique_counts",
        "unique_inverse",
        "unique_values",
    }


@pytest.mark.usefixtures("own_rules")
@pytest.mark.parametrize("name", ["unique_values", "no_such_operator"])
def test_an_operator_without_a_rule_is_replicated_with_one_warning(name: str) -> None:
    table._warned.clear()
    with pytest.warns(UserWarning, match=f"operator {name} has no sharding rule"):
        found = rule_of(name, [(4, 8), (3,)], result_shapes=[(5,)])
    assert str(found) == (
        "([i, j], [k]) -> ([l]) {i=4, j=8, k=3, l=5} need_replication={i, j, k, l}"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rule_of(name, [(2,)]).need_replication == (0,)
    assert operator_of(name).partial_operands(1) == ()


@pytest.mark.usefixtures("own_rules")
def test_users_rules() -> None:
    @reshard.spmd.rule("scaled_sum", linear=(0,), note="a test's")
    def scaled_sum(shapes: Any, *, times: int) -> str:
        ((i, j),) = shapes
        return f"([i, j]) -> ([i]) {{i={i}, j={j}}} reduction={{j}}"

    assert rule_of("scaled_sum", [(4, 8)], times=2).reduction == (1,)
    own = operators["scaled_sum"]
    assert own.result_shapes([(4, 8)], times=2) == ((4,),)
    assert own.partial_operands(1) == ((0,),) and own.note == "a test's"

    @rule("scaled_sum")
    def again(shapes: Any, **_: Any) -> Any:
        return rule_of("max", shapes, axis=1)

    assert rule_of("scaled_sum", [(4, 8)], times=2).reduction_operator == "max"


@pytest.mark.usefixtures("own_rules")
def test_invalid_rules_of_users_are_refused() -> None:
    with pytest.raises(SpecError, match="operator matmul has a rule of the package's"):
        rule("matmul")
    rule("short")(lambda shapes: "([i]) -> ([i]) {i=3}")
    with pytest.raises(SpecError, match=r"short: operand 0 of shape \(4,\) has 4 in dimension 0"):
        rule_of("short", [(4,)])


@pytest.mark.usefixtures("own_rules")
def test_a_user_may_give_a_rule_to_an_operator_without_one() -> None:
    shipped = operators["nonzero"]
    rule("nonzero")(lambda shapes: "([i]) -> ([j]) {i=4, j=4} need_replication={i, j}")
    try:
        assert operator_of("nonzero").has_rule
    finally:
        table._table["nonzero"] = shipped


def test_inferred_results_are_cached() -> None:
    first = operators["sum"].inferred([(4, 8)], axis=[1])
    assert operators["sum"].inferred(((4, 8),), axis=(1,)) is first
    assert operators["sum"].inferred([(4, 8)], axis=True) is not first


@pytest.mark.parametrize(
    ("name", "shapes", "attributes", "part"),
    [
        ("add", [(3,), (4,)], {}, "do not broadcast"),
        ("add", [(3,)], {}, "1 operands"),
        ("matmul", [(2, 3), (4, 5)], {}, "3 and 4 are sizes of k in `... i k, ... k j -> ... i j`"),
        ("matmul", [(), (4,)], {}, "a scalar"),
        ("tensordot", [(2,), (3,)], {"axes": 2}, "they have fewer"),
        ("dot_general", [(2, 3), (4, 5)], {"contracting": [[1], [0]]}, "3 and 4"),
        ("dot_general", [(2, 3), (3,)], {"contracting": [[2], [0]]}, "dimensions (2,) of 2"),
        ("zeros", [(4,)], {"shape": (4, 8)}, "zeros of shapes (4,); an operand 0 of 0 dimensions"),
        ("dynamic_slice", [(4,), (2,)], {"sizes": [3]}, "an operand 1 of 0 dimensions"),
        ("einsum", [(2,)], {"subscripts": "i,j"}, "1 operands"),
        ("sum", [(2, 3)], {"axis": 2}, "dimensions (2,) of 2"),
        ("sum", [(2,), (3,)], {}, "2 operands"),
        ("reshape", [(4, 3)], {"shape": (5, -1)}, "-1 has no one size"),
        ("reshape", [(4, 3)], {"shape": (5, 2)}, "cannot be reshaped"),
        ("squeeze", [(4, 3)], {"axis": 0}, "must have size 1"),
        ("moveaxis", [(4, 3)], {"source": 0, "destination": (0, 1)}, "as many places as axes"),
        ("concat", [(4, 3), (4,)], {}, "may differ in axis 0"),
        ("concat", [], {}, "no arrays"),
        ("stack", [(4,), (3,)], {}, "one shape"),
        ("split", [(4,)], {"indices_or_sections": 3}, "into 3 equal"),
        ("slice", [(4,)], {"starts": [1], "limits": [5]}, "must lie inside"),
        ("pad", [(4,)], {"pad_width": []}, "per dimension"),
        ("repeat", [(4,)], {"repeats": [1, 2]}, "2 repeats"),
        ("meshgrid", [(4, 2)], {}, "vectors"),
        ("tril", [(4,)], {}, "no matrix"),
        ("take", [(4, 2), (3,)], {}, "without an axis"),
        ("take_along_axis", [(4, 2), (3,)], {}, "of the form `*a k *b, *a j *b"),
        ("take_along_axis", [(4, 2), (3, 2)], {}, "do not broadcast"),
        ("scatter", [(4, 2), (3,), (2, 2)], {}, "were expected"),
        ("dynamic_slice", [(4,), ()], {"sizes": [5]}, "must fit inside"),
        ("dynamic_update_slice", [(4,), (5,), ()], {}, "must fit inside"),
        ("searchsorted", [(4,)], {}, "1 operands"),
        ("sort", [(4,), (3,)], {}, "one shape"),
        ("top_k", [(4,)], {"k": 5}, "top 5 of 4"),
        ("convolution", [(2, 6, 8), (10, 5, 3)], {}, "must divide"),
        ("convolution", [(2, 6, 8), (10, 6, 3), (10,)], {}, "3 operands"),
        ("convolution", [(2, 6, 8), (10, 6)], {}, "ranks must be equal"),
        ("max_pool", [(8,)], {"window": (2, 2)}, "more dimensions"),
        ("max_pool", [(8, 8)], {"window": (2, 2), "strides": (1,)}, "one of each"),
        ("cumulative_sum", [(2, 3)], {}, "along which"),
        ("cumulative_sum", [(2, 3)], {"axis": 1, "parts": (1, 1)}, "must be that size"),
        ("layer_norm", [(4, 8), (4,)], {}, "8 and 4 are sizes of n0 in `*a *n, *n -> *a *n`"),
        ("batch_norm", [(4, 8)] + [(4,)] * 4, {}, "8 and 4 are sizes of c"),
        ("cross_entropy", [(4, 10), (10,)], {}, "4 and 10 are sizes of a0"),
        ("attention", [(3, 5, 2), (2, 5, 2), (2, 5, 2)], {}, "g dividing h"),
        ("attention", [(4, 5, 2), (2, 5, 2), (2, 5, 2), (3, 5)], {}, "must broadcast"),
        ("cholesky", [(4, 3)], {}, "square"),
        ("det", [(4, 3)], {}, "square"),
        ("qr", [(4,)], {}, "matrices"),
        ("solve", [(4, 4), (3, 2)], {}, "were expected"),
        ("triangular_solve", [(4, 4), (3, 2)], {"left_side": False}, "triangular solve"),
        ("cross", [(4, 2), (4, 2)], {}, "size 3"),
        ("fft", [()], {}, "dimensions (-1,) of 0"),
    ],
)
def test_operands_that_do_not_fit(
    name: str, shapes: Any, attributes: dict[str, Any], part: str
) -> None:
    with pytest.raises(SpecError) as caught:
        rule_of(name, shapes, **attributes)
    assert part in str(caught.value)


def test_the_page_is_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[3]
    monkeypatch.syspath_prepend(str(root / "tools"))
    page = root / "docs" / "rules.md"
    assert page.read_text() == import_module("rules_page").rules_document()
    for name in shipped_operators():
        assert f"`{name}`" in page.read_text()


def test_windows_of_one_element_that_move_are_not_the_array_itself() -> None:
    """The result is as long as the operand, but holds other elements."""
    still = rule_of("max_pool", [(2,)], window=(1,), strides=1)
    moved = rule_of("max_pool", [(2,)], window=(1,), strides=(2,), padding=[(0, 1)])
    assert not still.permutation and moved.permutation == (0,)


def test_a_partial_dividend_is_reduced_first() -> None:
    """Over 0, 3 - 1 is inf, but inf - inf is not a number."""
    assert operators["divide"].partial_operands(2) == ()
