"""Small ranges of many objects, such as what describes one tensor each, asked for together.

A request takes as long as some hundred kibibytes, whatever is asked for; what opens a checkpoint
would wait for one after the other::

    objects    |head|.... w ....|tail|head|.... b ....|tail|
    requests   |-1--|           |-----2---|           |-3--|       all under way at once
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from reshard.checkpoint.files.places.object_source import IN_FLIGHT
from reshard.checkpoint.files.places.place_path import PlacePath

_JOINED_BYTES = 64 << 10
_MOST_JOINED_BYTES = 1 << 20


class NamedRange(NamedTuple):
    """Bytes `start` to `stop` of the file `name`."""

    name: str
    start: int
    stop: int


class AheadReads:
    """Ranges of the files of a folder that were asked for; none where it is of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[str, list[tuple[int, bytes]]] = {}

    def ask(self, ranges: Iterable[NamedRange]) -> None:
        """Ask for ranges, several at a time; what was asked for before is forgotten.

        Raises OSError.
        """
        self._found = {}
        if not isinstance(self._folder, PlacePath):
            return
        joined = list(join_ranges(ranges))
        with ThreadPoolExecutor(IN_FLIGHT) as threads:
            found = list(threads.map(self._read, joined))
        for one, content in zip(joined, found, strict=True):
            self._found.setdefault(one.name, []).append((one.start, content))

    def _read(self, one: NamedRange) -> bytes:
        with (self._folder / one.name).open("rb", buffering=0) as file:
            stream: Any = file
            return bytes(stream.fetch(one.start, one.stop - one.start))

    def find(self, name: str, start: int, size: int) -> bytes | None:
        """Bytes of a file, where all of them were asked for."""
        ranges = self._found.get(name, [])
        at = bisect_right(ranges, start, key=lambda one: one[0]) - 1
        if at < 0:
            return None
        begin, content = ranges[at]
        return content[start - begin :][:size] if start + size <= begin + len(content) else None


def join_ranges(ranges: Iterable[NamedRange]) -> Iterator[NamedRange]:
    """Ranges as they are asked for, by name and place: those near each other are one.

    >>> near = [NamedRange("a", 0, 10), NamedRange("a", 900, 950), NamedRange("b", 5, 9)]
    >>> [tuple(one) for one in join_ranges([NamedRange("a", 10**6, 10**6 + 1), *near])]
    [('a', 0, 950), ('a', 1000000, 1000001), ('b', 5, 9)]
    """
    for name, of_name in groupby(sorted(ranges), key=lambda one: one.name):
        start, stop = -1, -1
        for one in of_name:
            if start >= 0 and (
                one.start - stop > _JOINED_BYTES or one.stop - start > _MOST_JOINED_BYTES
            ):
                yield NamedRange(name, start, stop)
                start = -1
            start, stop = (one.start, one.stop) if start < 0 else (start, max(stop, one.stop))
        yield NamedRange(name, start, stop)
