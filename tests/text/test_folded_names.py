"""Names of layers and experts are folded into one text, and nothing else is."""

from __future__ import annotations

import itertools
import random

import pytest

from reshard.text.folded_names import fold_names


def texts(names: list[str]) -> list[str]:
    return [one.text for one in fold_names(names, [0] * len(names))]


def test_sets_that_are_products_are_folded_once() -> None:
    pairs = itertools.product(range(3, 6), range(8))
    names = [f"layers.{layer}.experts.{expert}.w1" for layer, expert in pairs]
    assert texts(names) == ["layers.{3-5}.experts.{0-7}.w1"]
    shuffled = random.Random(0).sample(names, len(names))
    assert texts(shuffled) == ["layers.{3-5}.experts.{0-7}.w1"]


def test_other_sets_are_several_texts_with_each_name_once() -> None:
    numbers = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    folded = fold_names([f"a.{one}.b.{two}" for one, two in numbers], [0] * 5)
    assert [one.text for one in folded] == ["a.{0,1}.b.{0,1}", "a.2.b.0"]
    assert sum(one.number for one in folded) == 5


def test_kinds_are_kept_apart() -> None:
    folded = fold_names([f"h.{n}.w" for n in range(6)], [0, 0, 0, 1, 1, 0])
    assert [(one.text, one.kind, one.number) for one in folded] == [
        ("h.{0-2,5}.w", 0, 4),
        ("h.{3,4}.w", 1, 2),
    ]


@pytest.mark.parametrize(
    "name", ["w", "layer1.w", "h.01.w", "h.1e5.w", "h.12345678901.w", "h.-1.w", "", "..", "a\0b"]
)
def test_what_is_no_number_is_kept(name: str) -> None:
    assert texts([name]) == [name]


def test_numbers_alone_and_at_the_ends() -> None:
    assert texts(["0", "1", "2"]) == ["{0-2}"]
    assert texts(["3.w.7"]) == ["3.w.7"]
    assert texts(["3.w.7", "3.w.9"]) == ["3.w.{7,9}"]


def test_many_scattered_numbers_are_counted() -> None:
    scattered = [number * number for number in range(40)]
    assert texts([f"h.{number}.w" for number in scattered]) == ["h.{0..1521: 40 numbers}.w"]
