"""Templates of rules, and the factors of reshapes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from reshard.errors import NotationError, SpecError
from reshard.spmd.rules.templates import (
    Template,
    broadcast_with_shapes_template,
    einsum_template,
    elementwise_template,
    matmul_template,
    reduce_template,
    reshape_factors,
    reshape_template,
    transpose_template,
)
from selection import choose
from spmd.movement_cases import factored


def text(template: Any, *shapes: tuple[int, ...]) -> str:
    return str(template.rule(*shapes))


def test_the_issue_s_rules() -> None:
    assert text(matmul_template(0), (4, 8), (8, 16)) == (
        "([i, k], [k, j]) -> ([i, j]) {i=4, j=16, k=8} reduction={k}"
    )
    assert text(matmul_template(2), (2, 3, 4, 8), (2, 3, 8, 5)) == (
        "([i, j, k, m], [i, j, m, l]) -> ([i, j, k, l]) {i=2, j=3, k=4, l=5, m=8} reduction={m}"
    )
    assert text(elementwise_template(0), ()) == "([]) -> ([]) {}"
    assert text(elementwise_template(2), (4, 8), (4, 8), (4, 8)) == (
        "([i, j], [i, j], [i, j]) -> ([i, j]) {i=4, j=8}"
    )
    assert text(reduce_template(3, [-1, 0]), (2, 3, 4)) == (
        "([i, j, k]) -> ([j]) {i=2, j=3, k=4} reduction={i, k}"
    )
    assert text(transpose_template(3, [2, 0, 1]), (2, 3, 4)) == (
        "([j, k, i]) -> ([i, j, k]) {i=4, j=2, k=3}"
    )
    assert text(broadcast_with_shapes_template((1, 8), (4, 8)), (1, 8)) == (
        "([i, k]) -> ([j, k]) {i=1, j=4, k=8} need_replication={i}"
    )
    assert text(einsum_template("bhsd,bhtd->bhst"), (2, 3, 4, 8), (2, 3, 5, 8)) == (
        "([i, j, k, m], [i, j, l, m]) -> ([i, j, k, l]) {i=2, j=3, k=4, l=5, m=8} reduction={m}"
    )


@pytest.mark.parametrize(
    ("given_shape", "wanted", "expected"),
    [
        ((8,), (2, 4), "([ij]) -> ([i, j]) {i=2, j=4}"),
        ((4, 4), (16,), "([i, j]) -> ([ij]) {i=4, j=4}"),
        ((2, 4), (8,), "([i, j]) -> ([ij]) {i=2, j=4}"),
        (
            (6, 4),
            (8, 3),
            "([ij, l]) -> ([ik, m]) {i=2, j=3, k=4, l=4, m=3} need_replication={j, k, l, m}",
        ),
        (
            (4, 6),
            (6, 4),
            "([ij, ln]) -> ([ik, mn]) {i=2, j=2, k=3, l=3, m=2, n=2} need_replication={j, k, l, m}",
        ),
        ((1, 8), (8, 1), "([i, j]) -> ([j, k]) {i=1, j=8, k=1} need_replication={i}"),
        ((), (1, 1), "([]) -> ([i, j]) {i=1, j=1}"),
        ((1,), (), "([i]) -> ([]) {i=1} need_replication={i}"),
        (
            (4, 0),
            (4, 0, 3),
            "([i, j]) -> ([i, j, k]) {i=4, j=0, k=3} need_replication={k}",
        ),
        ((0, 3), (0, 5, 3), "([i, j]) -> ([i, k, j]) {i=0, j=3, k=5} need_replication={k}"),
    ],
)
def test_reshapes(given_shape: tuple[int, ...], wanted: tuple[int, ...], expected: str) -> None:
    assert text(reshape_template(given_shape, wanted), given_shape) == expected


@st.composite
def reshapes(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    size = draw(st.sampled_from([1, 4, 6, 8, 12, 24, 36, 60, 96]))
    return factored(draw, size), factored(draw, size)


@settings(max_examples=choose(60, 200), deadline=None)
@given(reshapes())
def test_shared_factors_are_the_same_digits(pair: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """An element's digit along a shared factor is the same in both shapes, by enumeration."""
    before, after = pair
    operand, result, sizes = reshape_factors(before, after)
    numbers = np.arange(math.prod(before))

    def digits(shape: tuple[int, ...], mapping: Any) -> dict[int, np.ndarray]:
        found = {}
        for place, dim in zip(np.unravel_index(numbers, shape), mapping, strict=True):
            left = place
            for factor in reversed(dim):
                found[factor] = left % sizes[factor]
                left = left // sizes[factor]
            assert not left.any()
        return found

    first, second = digits(before, operand), digits(after, result)
    assert {*first, *second} == set(range(len(sizes)))
    for factor in first.keys() & second.keys():
        assert (first[factor] == second[factor]).all()


@settings(max_examples=choose(30, 100), deadline=None)
@given(reshapes())
def test_the_major_digit_is_shared_as_far_as_it_can_be(
    pair: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    before, after = ([size for size in shape if size > 1] for shape in pair)
    assume(before and after)
    operand, result, sizes = reshape_factors(before, after)
    common = math.gcd(before[0], after[0])
    if common > 1:
        assert operand[0][0] == result[0][0] and sizes[operand[0][0]] == common


@pytest.mark.parametrize(
    ("build", "part"),
    [
        (lambda: matmul_template(-1), "number of batch dimensions -1"),
        (lambda: elementwise_template(-1), "rank -1"),
        (lambda: reduce_template(2, [2]), "dimensions (2,) of 2"),
        (lambda: reduce_template(2, [0, -2]), "dimensions (0, -2) of 2"),
        (lambda: reduce_template(2, [0], reduction_operator="xor"), "unknown reduction 'xor'"),
        (lambda: transpose_template(2, [0, 0]), "permutation (0, 0)"),
        (lambda: broadcast_with_shapes_template((3,), (4,)), "shape (3,) does not broadcast"),
        (lambda: broadcast_with_shapes_template((1, 4), (4,)), "shape (1, 4) does not broadcast"),
        (lambda: reshape_template((6,), (4,)), "shape (6,) cannot be reshaped"),
        (lambda: einsum_template("ij,jk"), "is not an einsum"),
        (lambda: einsum_template("ii->i"), "has a letter twice"),
        (lambda: einsum_template("i->ij"), "in its result alone"),
        (lambda: matmul_template(0).rule((4, 8)), "1 shapes for"),
        (lambda: matmul_template(0).rule((4, 8), (7, 3)), "operand 1 of shape (7, 3) has 7"),
        (lambda: matmul_template(0).rule((4, 8), (8,)), "gives it 2 dimensions"),
        (lambda: elementwise_template(1).rule((4,), (5,)), "i=4"),
        (lambda: elementwise_template(1).rule(), "0 shapes"),
        (lambda: reshape_template((8,), (2, 4)).rule((9,)), "ij=8"),
    ],
)
def test_templates_that_do_not_fit(build: Any, part: str) -> None:
    with pytest.raises(SpecError) as caught:
        build()
    assert part in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "([i, k], [k, j]) -> ([i, j]) reduction={k}",
        "([i, j], ...) -> ([i, j])",
        "([i, j]) -> ([i]) reduction={j:max}",
        "([i, j]) -> ([i]) need_replication={j}",
        "([i, j]) -> ([i, j]) permutation={j} blocked={i}",
        "([1, i]) -> ([i])",
    ],
)
def test_a_template_is_read_as_it_is_written(text: str) -> None:
    assert str(Template.parse(text)) == text
    assert Template.parse(str(Template.parse(text))) == Template.parse(text)


def test_sizes_that_are_said_hold() -> None:
    split = Template.parse("([ij]) -> ([i, j]) {i=2, j=4}")
    assert str(split.rule((8,))) == "([ij]) -> ([i, j]) {i=2, j=4}"
    with pytest.raises(SpecError, match="has 9 in dimension 0"):
        split.rule((9,))


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (3, NotationError, "text of a sharding rule 3 is not a str"),
        ("[i] -> [i]", NotationError, "is not a sharding rule; write it as"),
        ("([ij]) -> ([i, j])", SpecError, "determines the size of factor i"),
        ("([i], [j], ...) -> ([i])", NotationError, "follows a single operand"),
        ("([i]) -> ([i]) sideways={i}", NotationError, "'sideways'"),
    ],
)
def test_texts_that_are_no_template(text: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        Template.parse(text)
