"""The text of a header as everybody writes it, read and written as columns.

Files have headers of 100,000 tensors and more. The safetensors package and this one write entries
with their keys in one order and without spaces::

    "w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}

Such text is read by a pattern, a megabyte at a time. Anything else, also all that is wrong, is left
to the reader of JSON in `header`, which says what it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from reshard.checkpoint.formats.safetensors.values import (
    LARGEST_OFFSET,
    HeaderKind,
    HeaderTensors,
    check_shape,
    tensor_size_bytes,
)
from reshard.dtypes import dtype
from reshard.errors import FormatError, UsageError
from reshard.runs import IntArray

_NUMBER = "(?:0|[1-9][0-9]{0,18})"
_ENTRY = re.compile(
    r'"([^"\\\x00-\x1f]*)":\{"dtype":"([A-Z0-9_a-z]{1,32})",'
    rf'"shape":\[((?:{_NUMBER}(?:,{_NUMBER})*)?)\],"data_offsets":\[({_NUMBER}),({_NUMBER})\]\}},'
)
# An entry of the sharding information, as PyTorch and this package write it.
_OFFSETS = re.compile(
    r'"([^"\\\x00-\x1f]*)": \{"saved_offsets": '
    r"\[((?:(?:0|[1-9][0-9]{0,18})(?:, (?:0|[1-9][0-9]{0,18}))*)?)\]\}(?:, (?=\")|\}$)"
)
_FIXED_CHARACTERS = len('"":{"dtype":"","shape":[],"data_offsets":[,]},')
_PIECE_CHARACTERS = 1 << 20
#: Characters that may stand around JSON.
JSON_SPACES = " \t\n\r"


def read_columns(text: str, data_start_bytes: int) -> tuple[HeaderTensors, Mapping[str, object]]:
    """The tensors in the JSON text of a header, in the order of their offsets, and its metadata.

    Raises ValueError for text that is not as the package writes it, or that is wrong.
    """
    end = _find_end(text)
    at = 1
    metadata: dict[str, object] = {}
    if not text.startswith("{") or text[end - 1 : end] != "}":
        raise ValueError("no object")
    if text.startswith('{"__metadata__":{'):
        # A key that is there twice is for the other reader.
        metadata, at = json.JSONDecoder(object_pairs_hook=_expect_unique).raw_decode(text, 16)
        if at == end - 1:
            return HeaderTensors((), (), (), ()), metadata
        if text[at : at + 1] != ",":
            raise ValueError("no comma")
        at += 1
    names: list[str] = []
    numbers: dict[tuple[str, str], int] = {}
    kind: list[IntArray] = []
    starts: list[IntArray] = []
    stops: list[IntArray] = []
    for piece in _cut_pieces(text, at, end - 1):
        found = _ENTRY.findall(piece)
        if not found:
            raise ValueError("no entries")
        columns = list(zip(*found, strict=True))
        # Entries do not overlap: if they have all characters, nothing lies between them.
        characters = sum(sum(map(len, column)) for column in columns)
        if characters + len(found) * _FIXED_CHARACTERS != len(piece):
            raise ValueError("other entries")
        names += columns[0]
        pairs = zip(columns[1], columns[2], strict=True)
        kind.append(np.array([numbers.setdefault(pair, len(numbers)) for pair in pairs]))
        starts.append(np.array(list(map(int, columns[3])), dtype=np.int64))
        stops.append(np.array(list(map(int, columns[4])), dtype=np.int64))
    kinds = [_read_kind(*pair) for pair in numbers]
    if stops and max(int(stop.max()) for stop in stops) > LARGEST_OFFSET - data_start_bytes:
        raise ValueError("offsets beyond any file")
    tensors = HeaderTensors(names, kinds, _join(kind), _join(starts) + data_start_bytes)
    is_wrong = (tensors.stops != _join(stops) + data_start_bytes).any()
    if is_wrong or "__metadata__" in names:
        raise ValueError("offsets that do not fit, or metadata")
    return sorted_by_offset(tensors), metadata


def _find_end(text: str) -> int:
    """Where the spaces behind a text begin; without a copy of it, which may be long."""
    end = len(text)
    while end and text[end - 1] in JSON_SPACES:
        begin = max(end - _PIECE_CHARACTERS, 0)
        end = begin + len(text[begin:end].rstrip(JSON_SPACES))
    return end


def find_metadata(text: str) -> Mapping[str, object] | None:
    """The metadata of a header, read by itself; None where it does not come first.

    >>> find_metadata('{"__metadata__":{"format":"pt"},"w":...')
    {'format': 'pt'}
    """
    if '"__metadata__"' not in text:
        return {}
    if not text.startswith('{"__metadata__":{'):
        return None
    try:
        found: dict[str, object]
        found, _ = json.JSONDecoder(object_pairs_hook=_expect_unique).raw_decode(text, 16)
    except (ValueError, RecursionError):
        return None
    return found


def find_offsets(text: str, names: Sequence[str]) -> dict[str, tuple[int, ...]] | None:
    """The offsets of these tensors in text as it is mostly written, of few objects for very many.

    None for text that has others, or another order: it may be right all the same.
    """
    offsets: dict[str, tuple[int, ...]] = {}
    by_text: dict[str, tuple[int, ...]] = {}
    at = 1 if text.startswith("{") else len(text)
    for name in names:
        entry = _OFFSETS.match(text, at)
        if entry is None or entry[1] != name:
            return None
        found = by_text.get(entry[2])
        if found is None:
            found = tuple(map(int, entry[2].split(", "))) if entry[2] else ()
            by_text[entry[2]] = found
        offsets[name] = found
        at = entry.end()
    return offsets if names and at == len(text) and text.endswith("}}") else None


def sorted_by_offset(tensors: HeaderTensors) -> HeaderTensors:
    """The tensors in the order of their offsets; empty ones come before another at their place."""
    if (np.diff(tensors.starts) > 0).all():
        return tensors
    order = np.lexsort((tensors.stops, tensors.starts))
    names = [tensors.names[row] for row in order.tolist()]
    return HeaderTensors(names, tensors.kinds, tensors.kind[order], tensors.starts[order])


def write_entries(
    names: Sequence[str], kinds: Sequence[HeaderKind], kind: IntArray, begin: int = 0
) -> str:
    """The entries of tensors that follow each other from offset `begin` on, as JSON text."""
    sizes = [tensor_size_bytes(element, shape) for element, shape in kinds]
    stops = begin + np.cumsum(np.array(sizes or [0], dtype=np.int64)[kind])
    starts = [begin, *stops[:-1].tolist()]
    texts = [
        f'":{{"dtype":"{element.safetensors_tag}","shape":[{",".join(map(str, shape))}],'
        for element, shape in kinds
    ]
    quoted = map(json.encoder.encode_basestring, names)
    return ",".join(
        f'{name[:-1]}{texts[number]}"data_offsets":[{start},{stop}]}}'
        for name, number, start, stop in zip(
            quoted, kind.tolist(), starts, stops.tolist(), strict=True
        )
    )


def _cut_pieces(text: str, begin: int, end: int) -> Iterator[str]:
    """The text in pieces of whole entries, each with the comma behind its last."""
    while begin < end:
        # No name has a quotation mark in it.
        cut = text.find(']},"', begin + _PIECE_CHARACTERS, end)
        stop = end if cut < 0 else cut + 2
        yield text[begin:stop] + ","
        begin = stop + 1


def _read_kind(tag: str, shape: str) -> HeaderKind:
    try:
        element = dtype(tag)
        lengths = tuple(map(int, shape.split(","))) if shape else ()
        check_shape("any", element, lengths)
    except (UsageError, FormatError) as error:
        raise ValueError(str(error)) from error
    if element.safetensors_tag != tag:
        raise ValueError(tag)
    return element, lengths


def _expect_unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _join(columns: list[IntArray]) -> IntArray:
    return np.concatenate(columns) if columns else np.zeros(0, dtype=np.int64)
