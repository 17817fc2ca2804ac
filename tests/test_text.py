"""Quantities, sets of ranks, folded names and tables as text."""

from __future__ import annotations

import itertools
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import UsageError
from reshard.text import (
    MAX_ROWS,
    bytes_text,
    count_text,
    cut_in_the_middle,
    display_width,
    duration_text,
    file_table,
    fold_names,
    rank_table,
    rank_text,
    rate_text,
    shortened,
    table,
)

BYTE_FACTORS = {"B": 0, "kB": 1, "MB": 2, "GB": 3, "TB": 4, "PB": 5, "EB": 6}
SECONDS = {"µs": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "d": 86400}


@given(st.integers(0, 10**21 - 10**18))
def test_bytes_are_right_to_three_digits(size_bytes: int) -> None:
    number, unit = bytes_text(size_bytes).split()
    said = float(number) * 1000 ** BYTE_FACTORS[unit]
    assert abs(said - size_bytes) <= 0.0051 * size_bytes
    assert float(number) < 1000
    assert unit == "B" or float(number) >= 1


@given(st.floats(1e-6, 1e8))
def test_durations_are_right_to_their_last_unit(duration_s: float) -> None:
    words = duration_text(duration_s).split()
    units = words[1::2]
    said = sum(
        float(number) * SECONDS[unit] for number, unit in zip(words[::2], units, strict=True)
    )
    # Hours are given to minutes and days to hours; half of the lower unit may be lost.
    assert said == pytest.approx(duration_s, rel=0.021, abs=0)


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0.0009999, "1.00 ms"),
        (0.9999, "1.00 s"),
        (59.94, "59.9 s"),
        (119.7, "2 min"),
        (3599.9, "1 h"),
        (86399, "1 d"),
        (90061, "1 d 1 h"),
    ],
)
def test_durations_at_the_edges_of_units(duration_s: float, text: str) -> None:
    assert duration_text(duration_s) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (512 * 10**9, "512 GB"),
        (5 * 10**21, "5,000 EB"),
    ],
)
def test_bytes_at_the_edges_of_units(size_bytes: int, text: str) -> None:
    assert bytes_text(size_bytes) == text


@pytest.mark.parametrize("write", [bytes_text, rate_text, duration_text])
@pytest.mark.parametrize("amount", [-1, float("inf"), float("nan")])
def test_amounts_that_cannot_be_are_refused(write: object, amount: float) -> None:
    with pytest.raises(UsageError, match=str(amount)):
        write(amount)


def test_counts_have_a_plural() -> None:
    assert [count_text(n, "rank") for n in (0, 1, 2000)] == ["0 ranks", "1 rank", "2,000 ranks"]
    assert count_text(2, "copy", "copies") == "2 copies"


def test_tables_align_wide_characters() -> None:
    text = table([("層", 1), ("ab", 22)], ("name", "n"), "cr")
    assert text.split("\n") == ["name   n", "----  --", " 層    1", " ab   22"]
    widths = {display_width(line) for line in text.split("\n")}
    assert widths == {8}


def test_a_table_without_rows_has_its_headers() -> None:
    assert table([], ("a", "bc")) == "a  bc\n-  --"


def test_rows_and_alignments_must_fit() -> None:
    with pytest.raises(UsageError, match="3 entries"):
        table([(1, 2, 3)], ("a", "b"))
    with pytest.raises(UsageError, match="align 'lx'"):
        table([], ("a", "b"), "lx")


LETTERS = st.text(st.sampled_from("abc.層e\u0301"), max_size=30)


@given(LETTERS, st.integers(1, 30))
def test_no_text_is_wider_than_it_may_be(text: str, width: int) -> None:
    for cut in (cut_in_the_middle(text, width), shortened(text, width)):
        assert display_width(cut) <= width
        assert (cut == text) == (display_width(text) <= width)


@given(LETTERS, st.integers(3, 30))
def test_what_is_cut_in_the_middle_keeps_both_ends(text: str, width: int) -> None:
    begin, mark, end = cut_in_the_middle(text, width).partition("…")
    assert text.startswith(begin)
    assert text.endswith(end)
    # Neither end has a column more than the other but for an odd one, and a wide letter.
    if mark:
        assert abs(display_width(begin) - display_width(end)) <= 2


RANKS = st.one_of(
    st.sets(st.integers(0, 40)),
    st.builds(
        lambda start, count, step, more: set(range(start, start + count * step, step)) | more,
        st.integers(0, 9),
        st.integers(0, 9),
        st.integers(1, 9),
        st.sets(st.integers(0, 99), max_size=4),
    ),
)


@given(RANKS)
def test_rank_text_says_exactly_the_ranks(ranks: set[int]) -> None:
    said: list[int] = []
    for word in re.findall(r"\d+,\d+\.\.\d+|\d+-\d+|\d+", rank_text(ranks)):
        numbers = [int(number) for number in re.findall(r"\d+", word)]
        if ".." in word:
            said += range(numbers[0], numbers[2] + 1, numbers[1] - numbers[0])
        elif "-" in word:
            said += range(numbers[0], numbers[1] + 1)
        else:
            said += numbers
    assert said == sorted(ranks)


def test_regular_ranks_are_short() -> None:
    assert rank_text(range(512)) == "0-511"
    assert rank_text(range(3, 512, 8)) == "3,11..507"
    assert rank_text([0, 1, 2, 4, 8, 12, 16]) == "0-2,4,8..16"
    assert rank_text([]) == ""


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


def rows(read: list[int]) -> list[dict[str, int]]:
    others = {"written_bytes": 5, "sent_bytes": 0, "received_bytes": 1}
    return [{"rank": rank, "read_bytes": amount, **others} for rank, amount in enumerate(read)]


def test_few_ranks_have_a_row_each() -> None:
    lines = rank_table(rows([7] * MAX_ROWS)).splitlines()
    assert lines[0].split() == ["rank", "read", "written", "sent", "received"]
    assert [line.split()[0] for line in lines[2:]] == [*map(str, range(MAX_ROWS)), "all"]
    assert lines[-1].split() == ["all", "112", "B", "80", "B", "0", "B", "16", "B"]


def test_ranks_that_do_the_same_share_a_row() -> None:
    lines = rank_table(rows([3 if rank % 2 else 7 for rank in range(100)])).splitlines()
    assert [line.split()[:2] for line in lines[2:]] == [
        ["0,2..98", "7"],
        ["1,3..99", "3"],
        ["all", "500"],
    ]


def test_of_too_many_kinds_the_largest_are_listed_and_the_rest_counted() -> None:
    lines = rank_table(rows(list(range(100)))).splitlines()
    assert [line.split()[0] for line in lines[2:-2]] == [str(rank) for rank in range(99, 87, -1)]
    assert lines[-2].split()[:3] == ["all", "4.95", "kB"]
    assert lines[-1] == "... and 88 ranks with less, --json lists all"


def test_files_in_the_middle_are_one_row() -> None:
    files = [(f"rank{rank}.safetensors", rank, 100) for rank in range(1024)]
    assert file_table(files).splitlines()[2:] == [
        *(f"rank{rank}.safetensors           {rank}  100 B" for rank in range(6)),
        "... 1,016 more        6..1021  100 B",
        "rank1022.safetensors     1022  100 B",
        "rank1023.safetensors     1023  100 B",
    ]
    assert len(file_table(files[:MAX_ROWS]).splitlines()) == 2 + MAX_ROWS


def test_files_of_one_rank_and_long_names() -> None:
    files = [("model-" * 20 + str(number), 0, number) for number in range(30)]
    lines = file_table(files).splitlines()
    assert lines[8].split() == ["...", "22", "more", "0", "6", "B", "to", "27", "B"]
    assert all(len(line) <= 100 for line in lines)
    assert lines[-1].split()[0].endswith("model-29")
