"""Sizes, rates, counts and times as people write them, and lists of them as a table.

Bytes are decimal: 1 kB is 1000 bytes, 1 MB is 1000 kB, as disks, networks and transfer rates
count. Sizes and rates have three significant digits. Counts are exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from reshard.errors import UsageError
from reshard.text.width import display_width, padded

_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_ALIGNMENTS = {"l": "left", "r": "right", "c": "center"}


def _three_digits(value: float) -> str:
    """`value` below 1000 with three significant digits, or "1000" where it rounds up to that."""
    for decimals in (2, 1):
        text = f"{value:.{decimals}f}"
        if len(text) <= 4:
            return text
    return f"{value:.0f}"


def bytes_text(size_bytes: float) -> str:
    """A number of bytes in decimal units (1 MB is 1,000,000 bytes), below 1 kB exactly.

    Raises:
        UsageError: a negative or infinite number.

    >>> bytes_text(90_868_376), bytes_text(999), bytes_text(999_999), bytes_text(0)
    ('90.9 MB', '999 B', '1.00 MB', '0 B')
    """
    _check_amount("size in bytes", size_bytes)
    if round(size_bytes) < 1000:
        return f"{size_bytes:.0f} B"
    value = float(size_bytes)
    for unit in _BYTE_UNITS[1:]:
        value /= 1000
        text = _three_digits(value)
        # What rounds up to 1000 is written in the next unit.
        if text != "1000" and value < 1000:
            return f"{text} {unit}"
    return f"{value:,.0f} {_BYTE_UNITS[-1]}"


def rate_text(bytes_per_s: float) -> str:
    """A transfer rate in decimal units.

    Raises:
        UsageError: a negative or infinite rate; a caller with no time passed has no rate.

    >>> rate_text(1.42e9)
    '1.42 GB/s'
    """
    _check_amount("rate in bytes per second", bytes_per_s)
    return f"{bytes_text(bytes_per_s)}/s"


def count_text(count: int, noun: str = "", plural: str = "") -> str:
    """An exact count with separated thousands, and the noun it counts.

    Args:
        count: how many.
        noun: what is counted, for one of it; nothing is added when empty.
        plural: for any other number; `noun` with an s when empty.

    >>> count_text(11_720_448), count_text(1, "rank"), count_text(0, "copy", "copies")
    ('11,720,448', '1 rank', '0 copies')
    """
    number = f"{count:,}"
    if not noun:
        return number
    return f"{number} {noun if count == 1 else plural or noun + 's'}"


def first_text(things: Sequence[object], most: int, separator: str = ", ") -> str:
    """Return the first of many things, at most `most`, and how many more there are.

    >>> first_text("abcde", 3), first_text("ab", 3)
    ('a, b, c and 2 more', 'a, b')
    """
    more = f" and {len(things) - most} more" if len(things) > most else ""
    return separator.join(map(str, things[:most])) + more


def duration_text(duration_s: float) -> str:
    """A time span, from microseconds to days, in two units at most.

    Raises:
        UsageError: a negative or infinite time.

    >>> [duration_text(t) for t in (0, 0.000012, 0.0123, 1.519, 59.96, 125, 3723, 180_000)]
    ['0 s', '12.0 µs', '12.3 ms', '1.52 s', '1 min', '2 min 5 s', '1 h 2 min', '2 d 2 h']
    """
    _check_amount("duration in seconds", duration_s)
    if duration_s == 0:
        return "0 s"
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        text = _three_digits(duration_s * factor)
        if duration_s * factor < 1000 and text != "1000":
            return f"{text} {unit}"
    # From here on, three digits would be 60.0 s.
    if duration_s < 59.95:
        return f"{_three_digits(duration_s)} s"
    whole = round(duration_s)
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    index = next(i for i, (seconds, _) in enumerate(units) if whole >= seconds)
    seconds, unit = units[index]
    below, unit_below = units[index + 1]
    # Round to the lower of the two units first, so that 59 min 59.9 s becomes an hour.
    whole = round(whole / below) * below
    if index and whole >= units[index - 1][0]:
        return f"1 {units[index - 1][1]}"
    count, rest = divmod(whole, seconds)
    return f"{count} {unit}" + (f" {rest // below} {unit_below}" if rest else "")


def _check_amount(what: str, amount: float) -> None:
    if not math.isfinite(amount) or amount < 0:
        raise UsageError(f"{what} {amount} must be 0 or more, and finite")


def table(rows: Iterable[Sequence[object]], headers: Sequence[str], align: str = "") -> str:
    """Rows under headers as plain text: the lines of `table_lines` as one text.

    >>> print(table([("wte", "46.9 MB"), ("bias", 1536)], ("tensor", "bytes"), "lr"))
    tensor    bytes
    ------  -------
    wte     46.9 MB
    bias       1536
    """
    return "\n".join(table_lines(rows, headers, align))


def table_lines(
    rows: Iterable[Sequence[object]], headers: Sequence[str], align: str = ""
) -> Iterator[str]:
    """The lines of a table, one by one, in columns as wide as they need, without borders.

    Args:
        rows: each as long as `headers`; entries are written with `str`.
        headers: one a column.
        align: a letter a column, `l`, `r` or `c`; left for all when empty.

    Raises:
        UsageError: a row or an `align` that does not fit the headers.

    >>> list(table_lines([("wte", 3)], ("tensor", "bytes"), "lr"))
    ['tensor  bytes', '------  -----', 'wte         3']
    """
    align = align or "l" * len(headers)
    if len(align) != len(headers) or set(align) - set(_ALIGNMENTS):
        raise UsageError(
            f"align {align!r} for {len(headers)} columns; give one of the letters l, r, c for each"
        )
    # Entries that are texts already are not copied: there may be very many.
    texts = [tuple(map(str, row)) for row in rows]
    for row in texts:
        if len(row) != len(headers):
            raise UsageError(
                f"the row {list(row)} has {len(row)} entries, the table has {len(headers)} columns "
                f"({', '.join(headers)})"
            )
    widths = [
        max(map(display_width, {header, *(row[number] for row in texts)}))
        for number, header in enumerate(headers)
    ]
    # A line of dashes under the headers, as wide as each column.
    for line in itertools.chain([list(headers), ["-" * width for width in widths]], texts):
        yield "  ".join(
            padded(text, width, _ALIGNMENTS[letter])
            for text, width, letter in zip(line, widths, align, strict=True)
        ).rstrip()
