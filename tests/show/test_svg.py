"""Colours of ranks can be told apart, also by people who see fewer, and carry text."""

from __future__ import annotations

import itertools

import pytest

from reshard.show.svg import ink_on, rank_colours

# How strongly long, middle and short cones see linear red, green and blue (Viénot, Brettel and
# Mollon 1999, "Digital video colourmaps for checking the legibility of displays by dichromats").
PROTANOPIA = ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0))
DEUTERANOPIA = ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0))
FULL = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))


def linear(colour: str) -> list[float]:
    channels = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def luminance(colour: str) -> float:
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def seen(colour: str, eyes: tuple[tuple[float, ...], ...]) -> list[float]:
    """A colour as these eyes see it, back as it would be written in a file, 0 to 1."""
    mixed = (sum(w * c for w, c in zip(row, linear(colour), strict=True)) for row in eyes)
    return [12.92 * c if c <= 0.0031308 else 1.055 * c ** (1 / 2.4) - 0.055 for c in mixed]


@pytest.mark.parametrize("eyes", [FULL, PROTANOPIA, DEUTERANOPIA], ids=["full", "red", "green"])
def test_a_few_ranks_differ_for_all_eyes(eyes: tuple[tuple[float, ...], ...]) -> None:
    colours = list(rank_colours(range(8)).values())
    assert len(set(colours)) == 8
    for a, b in itertools.combinations(colours, 2):
        distance = sum((x - y) ** 2 for x, y in zip(seen(a, eyes), seen(b, eyes), strict=True))
        assert distance**0.5 > 0.08, (a, b)


@pytest.mark.parametrize("count", [9, 64, 512, 4000])
def test_many_ranks_are_in_order_of_lightness(count: int) -> None:
    colours = rank_colours(range(count))
    assert list(colours) == list(range(count))
    light = [luminance(colour) for colour in colours.values()]
    assert light[0] < 0.03 and light[-1] > 0.7
    # Rounding to 256 steps a channel may hold neighbours level, never turn the order round.
    assert all(a <= b + 0.004 for a, b in itertools.pairwise(light))


@pytest.mark.parametrize("count", [2, 8, 64, 512])
def test_text_on_a_colour_can_be_read(count: int) -> None:
    for colour in set(rank_colours(range(count)).values()):
        inks = [luminance(colour), luminance(ink_on(colour))]
        contrast = (max(inks) + 0.05) / (min(inks) + 0.05)
        assert contrast >= 4.5, colour


def test_colours_follow_the_order_of_ranks() -> None:
    assert rank_colours([9, 1, 5]) == rank_colours([5, 1, 9, 9])
    assert rank_colours([]) == {}
