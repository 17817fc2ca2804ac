"""Tables of ranks and of files on one screen, however many there are.

Up to 16 have a row each. Of more ranks, those whose row would be the same share it; of more files,
those in the middle become one row. `--json` has every one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reshard.text.markup import printable
from reshard.text.quantities import bytes_text, count_text, table
from reshard.text.rank_sets import short_rank_text
from reshard.text.width import cut_in_the_middle

MOST_ROWS = 16
MOST_KINDS = 12
FIRST_FILES, LAST_FILES = 6, 2
# Of a file's name.
MOST_COLUMNS = 72

_AMOUNTS = ("read_bytes", "written_bytes", "sent_bytes", "received_bytes")
_HEADERS = ("read", "written", "sent", "received")


def rank_table(rows: Sequence[Mapping[str, int]]) -> str:
    """What each rank reads, writes, sends and receives, and all together.

    Args:
        rows: one a rank, in rising order; keys `rank`, and the four in `_bytes`.

    >>> row = dict(read_bytes=8, written_bytes=4, sent_bytes=0, received_bytes=0)
    >>> print(rank_table([{"rank": rank, **row} for rank in range(1024)]))
    each of ranks     read  written  sent  received
    -------------  -------  -------  ----  --------
           0-1023      8 B      4 B   0 B       0 B
              all  8.19 kB  4.10 kB   0 B       0 B
    """
    total = ("all", *(bytes_text(sum(row[name] for row in rows)) for name in _AMOUNTS))
    if len(rows) <= MOST_ROWS:
        body = [(row["rank"], *_amounts(row)) for row in rows]
        return table([*body, total], ("rank", *_HEADERS), "rrrrr")
    # 1. Ranks by what their row says. A dict keeps the order of their first ranks.
    alike: dict[tuple[str, ...], list[Mapping[str, int]]] = {}
    for row in rows:
        alike.setdefault(_amounts(row), []).append(row)
    # 2. Of too many kinds of them, those with the largest amounts.
    kinds = list(alike.values())
    if len(kinds) > MOST_KINDS:
        kinds.sort(key=lambda kind: -max(kind[0][name] for name in _AMOUNTS))
    left_out = sum(map(len, kinds[MOST_KINDS:]))
    body = [
        (short_rank_text([row["rank"] for row in kind], 28), *_amounts(kind[0]))
        for kind in kinds[:MOST_KINDS]
    ]
    text = table([*body, total], ("each of ranks", *_HEADERS), "rrrrr")
    if left_out:
        text += f"\n... and {count_text(left_out, 'rank')} with less, --json lists all"
    return text


def _amounts(row: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(bytes_text(row[name]) for name in _AMOUNTS)


def file_table(files: Sequence[tuple[str, int, int]]) -> str:
    """Files: the name of each, its rank, and its size in bytes.

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
        (cut_in_the_middle(printable(name), MOST_COLUMNS, "..."), rank, bytes_text(size_bytes))
        for name, rank, size_bytes in files
    ]
    if len(files) > MOST_ROWS:
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
