from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import UsageError
from reshard.text.quantities import bytes_text, count_text, duration_text, rate_text, table
from reshard.text.width import display_width

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
