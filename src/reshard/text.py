"""Quantities, sets of ranks and tables as text, for messages, tables and pages.

Bytes are decimal: 1 kB is 1000 bytes and 1 MB is 1000 kB, as for disks, networks and transfer
rates. Sizes and rates have three significant digits. Counts are exact.

Sets of ranks are shortened: three or more consecutive ranks become a range, four or more at equal
distances their first two and their last: `0-3,8`, `0,4..28`. Names that differ in numbers only are
folded: `layers.{0-31}.up_proj.weight`.

Tables of ranks and files fit on a screen, however many there are: up to 16 have a row each; if
there are more, ranks with equal rows share a row, and the files in the middle become a row.
"""

from __future__ import annotations

import itertools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.errors import FormatError, UsageError


def display_width(text: str) -> int:
    """Return the columns of a line of text: wide East Asian characters two, combining marks none.

    >>> display_width("rank"), display_width("層"), display_width("e\\u0301")
    (4, 2, 1)
    """
    return sum(
        # W and F are the wide and full-width classes of Unicode's annex 11.
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def padded(text: str, width: int, align: str = "left") -> str:
    """Pad `text` with spaces to `width` columns; a longer text is returned unchanged.

    >>> padded("ab", 5, "right"), padded("ab", 5, "center"), padded("abc", 2)
    ('   ab', ' ab  ', 'abc')
    """
    missing = max(0, width - display_width(text))
    before = {"left": 0, "right": missing, "center": missing // 2}[align]
    return " " * before + text + " " * (missing - before)


def shortened(text: str, width: int, mark: str = "…") -> str:
    """Shorten `text` to `width` columns, with `mark` in place of its end.

    >>> shortened("model.embeddings", 8)
    'model.e…'
    """
    if display_width(text) <= width:
        return text
    start = text
    while start and display_width(start) + len(mark) > width:
        start = start[:-1]
    return (start + mark)[:width]


def cut_in_the_middle(text: str, width: int, mark: str = "…") -> str:
    """Shorten `text` to `width` columns, with `mark` in place of its middle.

    Names in a model share prefixes, and differ at their ends too.

    >>> cut_in_the_middle("model.layers.17.mlp.up_proj.weight", 24)
    'model.layers…proj.weight'
    """
    if display_width(text) <= width:
        return text
    # Both ends get half of the columns.
    room = max(0, width - len(mark))
    begin, end = text[: room - room // 2], text[max(0, len(text) - room // 2) :]
    while display_width(begin) > room - room // 2:
        begin = begin[:-1]
    while display_width(end) > room // 2:
        end = end[1:]
    return (begin + mark + end)[:width]


def printable(text: str, keep: str = "") -> str:
    """Return `text` with unprintable characters as escapes, except those in `keep`.

    >>> printable("wte\\x1b[2J"), printable("層")
    ('wte\\\\x1b[2J', '層')
    """
    # Names come from files of others, and a terminal would obey the escape sequences in them.
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_ALIGNMENTS = {"l": "left", "r": "right", "c": "center"}


def _three_digits(value: float) -> str:
    """Return `value` below 1000 with three significant digits, or "1000" if it rounds
    up to that.
    """
    for decimals in (2, 1):
        text = f"{value:.{decimals}f}"
        if len(text) <= 4:
            return text
    return f"{value:.0f}"


def bytes_text(size_bytes: float) -> str:
    """Return a number of bytes in decimal units (1 MB is 1,000,000 bytes), exact below 1 kB.

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
        # Values that round up to 1000 are written in the next unit.
        if text != "1000" and value < 1000:
            return f"{text} {unit}"
    return f"{value:,.0f} {_BYTE_UNITS[-1]}"


def rate_text(bytes_per_s: float) -> str:
    """Return a transfer rate in decimal units.

    Raises:
        UsageError: a negative or infinite rate.

    >>> rate_text(1.42e9)
    '1.42 GB/s'
    """
    _check_amount("rate in bytes per second", bytes_per_s)
    return f"{bytes_text(bytes_per_s)}/s"


def count_text(count: int, noun: str = "", plural: str = "") -> str:
    """Return an exact count with thousands separators, and its noun.

    Args:
        count: how many.
        noun: in the singular; omitted if empty.
        plural: of the noun; `noun` with an s if empty.

    >>> count_text(11_720_448), count_text(1, "rank"), count_text(0, "copy", "copies")
    ('11,720,448', '1 rank', '0 copies')
    """
    number = f"{count:,}"
    if not noun:
        return number
    return f"{number} {noun if count == 1 else plural or noun + 's'}"


def first_text(things: Sequence[object], most: int, separator: str = ", ") -> str:
    """Return the first items, at most `most`, and the number of the others.

    >>> first_text("abcde", 3), first_text("ab", 3)
    ('a, b, c and 2 more', 'a, b')
    """
    more = f" and {len(things) - most} more" if len(things) > most else ""
    return separator.join(map(str, things[:most])) + more


def near_text(name: str, known: Iterable[str]) -> str:
    """Return a question about the known names that resemble a name; empty if there are none.

    Case is ignored.

    >>> near_text("lama", ["Llama", "mistral"]), near_text("x", ["Llama"])
    ('did you mean Llama? ', '')
    """
    # Only errors need it, so it is not loaded with this module.
    import difflib

    folded = {other.casefold(): other for other in known}
    near = [folded[match] for match in difflib.get_close_matches(name.casefold(), folded)]
    return f"did you mean {' or '.join(near)}? " if near else ""


def first_lines(lines: Sequence[object], most: int) -> str:
    """Return the first of many lines, each indented on a line of its own, and how many more.

    >>> first_lines("abcde", 2), first_lines("ab", 3)
    ('\\n  a\\n  b\\n  ... 3 more', '\\n  a\\n  b')
    """
    more = [f"... {len(lines) - most} more"] if len(lines) > most else []
    return "".join(f"\n  {line}" for line in [*lines[:most], *more])


def duration_text(duration_s: float) -> str:
    """Return a time span, from microseconds to days, in two units at most.

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
    # Longer spans would be shown as 60.0 s.
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
    """Return rows under headers as plain text: the lines of `table_lines` joined.

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
    """Yield the lines of a table, in columns as wide as they need, without borders.

    Args:
        rows: each as long as `headers`; entries are converted by `str`.
        headers: the title of each column.
        align: a letter per column, `l`, `r` or `c`; left for all if empty.

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
    # `str` does not copy strings: there may be very many.
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


def rank_text(ranks: Iterable[int]) -> str:
    """Return the ranks in rising order, with regular sequences shortened.

    >>> rank_text([0, 4]), rank_text([3, 2, 1, 0, 8]), rank_text(range(0, 32, 4))
    ('0,4', '0-3,8', '0,4..28')
    """
    rest = sorted(set(ranks))
    words = []
    while rest:
        step = rest[1] - rest[0] if len(rest) > 1 else 0
        # The longest sequence with the distance of the first two.
        length = min(len(rest), 2)
        while length < len(rest) and rest[length] - rest[length - 1] == step:
            length += 1
        if step == 1 and length >= 3:
            words.append(f"{rest[0]}-{rest[length - 1]}")
        elif length >= 4:
            words.append(f"{rest[0]},{rest[1]}..{rest[length - 1]}")
        else:
            # Too short for a range: the first rank alone; the next may begin a sequence.
            length = 1
            words.append(str(rest[0]))
        rest = rest[length:]
    return ",".join(words)


def short_rank_text(ranks: Sequence[int], max_letters: int) -> str:
    """Return the ranks in rising order, or the first, the last and their number if that is too
    long.

    >>> short_rank_text([0, 1, 2], 9), short_rank_text([0, 2, 5, 6, 9], 8)
    ('0-2', '0..9 (5 ranks)')
    """
    text = rank_text(ranks)
    if len(text) <= max_letters:
        return text
    return f"{ranks[0]}..{ranks[-1]} ({len(ranks):,} ranks)"


def ranks_text(ranks: Sequence[int], max_letters: int = 40) -> str:
    """Return the ranks after the word, for a sentence.

    >>> ranks_text([3]), ranks_text([0, 2])
    ('rank 3', 'ranks 0,2')
    """
    return f"rank{'' if len(ranks) == 1 else 's'} {short_rank_text(ranks, max_letters)}"


# Numbers with leading zeros stay text: as integers they could not be written again.
_NUMBER = r"(?<![^.])(?:0|[1-9]\d{0,8})(?![^.])"
_MAX_SET_LETTERS = 40
_Sets = tuple[frozenset[int], ...]


class FoldedName(NamedTuple):
    """A text for `number` names that differ only in numbers."""

    text: str
    kind: int
    number: int


def fold_names(names: Iterable[str], kinds: Iterable[int]) -> list[FoldedName]:
    """Fold names of the same kind that differ in numbers only, ordered by their first name.

    Args:
        names: separated by dots.
        kinds: a number for each name; only names with equal numbers are folded.

    >>> names = ["embed", *(f"layers.{n}.{what}" for n in range(4) for what in ("up", "down"))]
    >>> [one.text for one in fold_names(names, [0, *[1] * 8])]
    ['embed', 'layers.{0-3}.up', 'layers.{0-3}.down']
    >>> fold_names(["a.0.x", "a.1.x", "a.2.x"], [0, 0, 5])[0]
    FoldedName(text='a.{0,1}.x', kind=0, number=2)
    """
    groups: dict[tuple[str, int], list[tuple[int, ...]]] = {}
    for name, kind in zip(names, kinds, strict=True):
        numbers = tuple(map(int, re.findall(_NUMBER, name)))
        template = re.sub(_NUMBER, "\0", name) if numbers else name
        groups.setdefault((template, kind), []).append(numbers)
    folded = []
    for (template, kind), rows in groups.items():
        words = template.split("\0") if rows[0] else [template]
        for sets in _find_products(rows):
            texts = [*map(_set_text, sets), ""]
            text = "".join(
                f"{word}{number_text}" for word, number_text in zip(words, texts, strict=True)
            )
            folded.append(FoldedName(text, kind, math.prod(map(len, sets))))
    return folded


def _find_products(numbers: Sequence[tuple[int, ...]]) -> list[_Sets]:
    """Return products of sets that together contain all tuples, each once."""
    products: list[_Sets] = [tuple(frozenset((number,)) for number in row) for row in numbers]
    for position in reversed(range(len(numbers[0]))):
        merged: dict[tuple[_Sets, _Sets], set[int]] = {}
        for sets in products:
            others = sets[:position], sets[position + 1 :]
            merged.setdefault(others, set()).update(sets[position])
        products = [
            (*before, frozenset(merged_set), *after)
            for (before, after), merged_set in merged.items()
        ]
    return products


def _set_text(numbers: frozenset[int]) -> str:
    """Return a number, or a set in braces."""
    if len(numbers) == 1:
        return str(next(iter(numbers)))
    text = rank_text(numbers)
    if len(text) > _MAX_SET_LETTERS:
        text = f"{min(numbers)}..{max(numbers)}: {len(numbers):,} numbers"
    return f"{{{text}}}"


MAX_ROWS = 16
MAX_KINDS = 12
FIRST_FILES, LAST_FILES = 6, 2
# The columns of a file's name.
MAX_COLUMNS = 72

_AMOUNTS = ("read_bytes", "written_bytes", "sent_bytes", "received_bytes")
_HEADERS = ("read", "written", "sent", "received")


def rank_table(rows: Sequence[Mapping[str, int]]) -> str:
    """Return a table of the bytes that each rank reads, writes, sends and receives, with totals.

    Args:
        rows: a dict for each rank, in rising order; keys `rank`, and the four in `_bytes`.

    >>> row = dict(read_bytes=8, written_bytes=4, sent_bytes=0, received_bytes=0)
    >>> print(rank_table([{"rank": rank, **row} for rank in range(1024)]))
    each of ranks     read  written  sent  received
    -------------  -------  -------  ----  --------
           0-1023      8 B      4 B   0 B       0 B
              all  8.19 kB  4.10 kB   0 B       0 B
    """
    total = ("all", *(bytes_text(sum(row[name] for row in rows)) for name in _AMOUNTS))
    if len(rows) <= MAX_ROWS:
        body = [(row["rank"], *_amounts(row)) for row in rows]
        return table([*body, total], ("rank", *_HEADERS), "rrrrr")
    # 1. Group ranks by their row; a dict keeps the order of their first ranks.
    alike: dict[tuple[str, ...], list[Mapping[str, int]]] = {}
    for row in rows:
        alike.setdefault(_amounts(row), []).append(row)
    # 2. If there are too many groups, keep those with the largest amounts.
    kinds = list(alike.values())
    if len(kinds) > MAX_KINDS:
        kinds.sort(key=lambda kind: -max(kind[0][name] for name in _AMOUNTS))
    left_out = sum(map(len, kinds[MAX_KINDS:]))
    body = [
        (short_rank_text([row["rank"] for row in kind], 28), *_amounts(kind[0]))
        for kind in kinds[:MAX_KINDS]
    ]
    text = table([*body, total], ("each of ranks", *_HEADERS), "rrrrr")
    if left_out:
        text += f"\n... and {count_text(left_out, 'rank')} with less, --json lists all"
    return text


def _amounts(row: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(bytes_text(row[name]) for name in _AMOUNTS)


def file_table(files: Sequence[tuple[str, int, int]]) -> str:
    """Return a table of files: the name of each, its rank, and its size in bytes.

    >>> print(file_table([(f"{n}.safetensors", n, 500 + n % 2) for n in range(20)]))
    file             rank            size
    --------------  -----  --------------
    0.safetensors       0           500 B
    1.safetensors       1           501 B
    2.safetensors       2           500 B
    3.safetensors       3           501 B
    4.safetensors       4           500 B
    5.safetensors       5           501 B
    ... 12 more     6..17  500 B to 501 B
    18.safetensors     18           500 B
    19.safetensors     19           501 B
    """
    rows: list[tuple[str, object, str]] = [
        (cut_in_the_middle(printable(name), MAX_COLUMNS, "..."), rank, bytes_text(size_bytes))
        for name, rank, size_bytes in files
    ]
    if len(files) > MAX_ROWS:
        middle = files[FIRST_FILES : len(files) - LAST_FILES]
        least, most = (bytes_text(f(size_bytes for _, _, size_bytes in middle)) for f in (min, max))
        ends = dict.fromkeys((middle[0][1], middle[-1][1]))
        ranks = "..".join(map(str, ends))
        rows[FIRST_FILES : len(files) - LAST_FILES] = [
            (
                f"... {count_text(len(middle))} more",
                ranks,
                least if least == most else f"{least} to {most}",
            )
        ]
    return table(rows, ("file", "rank", "size"), "lrr")


def parse_json(text: str) -> Any:
    """Return the value of a JSON text in which no object has a key twice.

    Raises:
        FormatError: a key that appears twice in an object.
        ValueError, RecursionError: invalid JSON.

    >>> parse_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    reshard.errors.FormatError: the key 'a' appears twice
    """
    import json

    # `json` alone keeps the last of equal keys without an error.
    return json.loads(text, object_pairs_hook=_unique_pairs)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise FormatError(f"the key {first_duplicate(key for key, _ in pairs)!r} appears twice")
    return content


def first_duplicate(names: Iterable[str]) -> str:
    """Return the first name that appears more than once."""
    return next(name for name, times in Counter(names).items() if times > 1)
