"""The parts of parameters on tensor-parallel ranks, joined to whole parameters.

A job describes its layers to DeepSpeed by `universal_checkpoint_info` in the files of weights:
patterns of names, or a map of each parameter (`affine_map`)::

    tp_replicated_parameter_patterns            all ranks have the whole
    parameter_to_average_patterns               the same; their mean counts
    parameter_with_row_parallelism_patterns     sharded along dimension 1
    parameter_with_2_sub_params_cat_dim_0       two halves, each sharded along dimension 0
    parameter_with_sub_params                   several parts, each sharded along a dimension
    vocabulary_parameter_patterns               padded rows after `original_vocab_size`
    (no pattern)                                sharded along dimension 0

1. This determines the boxes of each rank's part in the parameter (`Joiner`).
2. A file has a range of the elements of a part. Its intersections with the boxes of the part are
   regions of the parameter (`formats.chunks`).
3. When the parts of all ranks are known, they are joined (`stored_tensors`). Parts of a parameter
   that several stages of a pipeline have are copies.
4. All copies are bound, and compared when tensors are read (`reshard.checkpoint.copy_checks`). For
   averaged parameters all elements are compared here, since means are not computed.

Source: DeepSpeed's universal checkpoints, and `ds_to_universal`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.binding import View
from reshard.checkpoint.formats.chunks import BlockPlace
from reshard.checkpoint.formats.deepspeed.saved_states import SavedPart
from reshard.checkpoint.formats.torch_files.pickles import shortened
from reshard.checkpoint.formats.torch_files.values import as_sizes
from reshard.errors import FormatError
from reshard.layout import Box

Shape = tuple[int, ...]

INFO = "universal_checkpoint_info"
_REPLICATED = "tp_replicated_parameter_patterns"
_AVERAGED = "parameter_to_average_patterns"
_ROWS = "parameter_with_row_parallelism_patterns"
_HALVES = "parameter_with_2_sub_params_cat_dim_0"
_SUB_PARAMS = "parameter_with_sub_params"
_WIDTHS = "sub_param_shard_widths"
_VOCABULARY = "vocabulary_parameter_patterns"
_VOCABULARY_SIZE = "original_vocab_size"
_UNSUPPORTED = "autotp_unsupported_parameter_patterns"
_MAP = "affine_map"
_LATEST_MAP = 1
# From this version on the widths of sub-parameters are listed, and sizes are not counts.
_WIDTHS_VERSION = 0.4
_LISTS = (_REPLICATED, _AVERAGED, _ROWS, _HALVES, _VOCABULARY)

# Patterns come from files that may not be trusted. These limits bound the time of matching them.
_MAX_PATTERN_LENGTH = 2000
_MAX_REPEATS = 4
_REPEAT = re.compile(r"(?<!\\)[*+{]")
# Repeated groups, lookarounds and references to groups may take exponential time.
_RISKY = re.compile(r"(?<!\\)\)[*+?{]|\(\?[^:]|\\[1-9]")


class Joiner:
    """A resolver of the assembly of parameters by `info`; `label` names its file in errors.

    Raises:
        FormatError: an `info` that is missing or unknown.
    """

    def __init__(self, info: Any, ranks: int, label: str) -> None:
        self.ranks, self.label = ranks, label
        keys = (*_LISTS, _SUB_PARAMS, _MAP)
        if not isinstance(info, dict) or not any(key in info for key in keys):
            raise FormatError(
                f"{label} is of {ranks} tensor-parallel ranks, and has no {INFO} that describes "
                f"how the parts are joined ({_ROWS} and so on). Jobs of Megatron-DeepSpeed and of "
                f"AutoTP save it; set it on the model as an attribute and save again, or join the "
                "parts with the program that cut them"
            )
        part = SavedPart(info, f"{label} {INFO}")
        self._lists = {key: self._read_patterns(part, key) for key in _LISTS}
        self._sub_params = [
            (pattern, *self._read_sub_params(entry))
            for entry in self._read_parts(part, _SUB_PARAMS)
            for pattern in self._read_patterns(entry, "patterns")
        ]
        self._widths = part.take_dict(_WIDTHS, optional=True)
        self._unsupported = {
            self._check(pattern): reason
            for pattern, reason in part.take_dict(_UNSUPPORTED, optional=True).items()
        }
        self._vocabulary_size = info.get(_VOCABULARY_SIZE)
        version = info.get("universal_checkpoint_version", 0.0)
        self._has_widths = isinstance(version, int | float) and version >= _WIDTHS_VERSION
        maps = SavedPart(part.take_dict(_MAP, optional=True), f"{part.label} {_MAP}")
        if (maps.get("version") or _LATEST_MAP) != _LATEST_MAP:
            raise self.wrong(f"{_MAP} of version {maps.get('version')!r}, expected {_LATEST_MAP}")
        params = maps.take_dict("params", optional=True)
        self._maps = {self._check(p): SavedPart(entry, maps.label) for p, entry in params.items()}

    def wrong(self, reason: str) -> FormatError:
        """Return the error for an `info` with an unexpected part."""
        return FormatError(
            f"{self.label}: {INFO} has {reason}; it is damaged, or of a version of DeepSpeed that "
            "is not known. Convert it with ds_to_universal, whose result is read"
        )

    def join(self, name: str, parts: Sequence[Shape]) -> tuple[tuple[BlockPlace, ...], bool]:
        """Return the place of each rank's part in a parameter, and whether their mean counts.

        Raises:
            FormatError: parts that do not fit together, or leave elements out.
        """
        places, is_averaged = self._find_places(name, tuple(parts))
        shape = places[0].shape
        # Boxes that several ranks have are copies.
        boxes = {(to, box.shape) for place in places for box, to in place.pieces}
        held = sum(math.prod(box_shape) for _, box_shape in boxes)
        if held != math.prod(shape):
            raise FormatError(
                f"{self.label}: the parts of {name!r} have {held} elements, expected "
                f"{math.prod(shape)} of {list(shape)}; {INFO} is of another model, or damaged"
            )
        return places, is_averaged

    def _find_places(
        self, name: str, parts: tuple[Shape, ...]
    ) -> tuple[tuple[BlockPlace, ...], bool]:
        for pattern, reason in self._unsupported.items():
            if re.match(pattern, name):
                raise FormatError(
                    f"{self.label}: {name!r} cannot be joined: {shortened(str(reason))}, as "
                    "DeepSpeed's AutoTP reports"
                )
        if (pattern_of_map := self._match(self._maps, name)) is not None:
            return self._join_map(name, self._maps[pattern_of_map], parts), False
        is_averaged = False
        if self._is_in(_REPLICATED, name) or self._is_in(_AVERAGED, name):
            self._expect_like(name, parts, None)
            places = (BlockPlace.split(parts[0], None, 0, 1),) * self.ranks
            is_averaged = not self._is_in(_REPLICATED, name)
        elif self._is_in(_HALVES, name):
            self._expect_like(name, parts, 0)
            if any(shape[0] % 2 for shape in parts):
                raise self._unfit(name, parts, "two halves each")
            halves = [shape[0] // 2 for shape in parts]
            places = self._join_widths(name, parts, 0, [halves, halves])
        elif (sub := self._match([p for p, *_ in self._sub_params], name)) is not None:
            shape, dim = next((s, d) for p, s, d in self._sub_params if p == sub)
            if any(len(part) != len(shape) for part in parts):
                raise self._unfit(name, parts, f"{len(shape)} dimensions each")
            self._expect_like(name, parts, dim)
            widths = self._find_widths(name, sub, shape, dim, parts)
            places = self._join_widths(name, parts, dim, widths)
        else:
            dim = 1 if self._is_in(_ROWS, name) else 0
            self._expect_like(name, parts, dim)
            places = self._join_widths(name, parts, dim, [[shape[dim] for shape in parts]])
        if self._is_in(_VOCABULARY, name):
            places = self._drop_padding(name, places)
        return places, is_averaged

    # Reading `info`.

    def _read_parts(self, part: SavedPart, key: str) -> list[SavedPart]:
        return [SavedPart(entry, part.label) for entry in part.take_list(key, optional=True)]

    def _read_patterns(self, part: SavedPart, key: str) -> list[str]:
        return [self._check(pattern) for pattern in part.take_list(key, optional=True)]

    def _check(self, pattern: Any) -> str:
        """Return a pattern that can be tried on names."""
        is_text = isinstance(pattern, str) and len(pattern) <= _MAX_PATTERN_LENGTH
        if not is_text or _RISKY.search(pattern) or len(_REPEAT.findall(pattern)) > _MAX_REPEATS:
            raise self.wrong(
                f"the pattern {shortened(repr(pattern))}, expected a regular expression of at most "
                f"{_MAX_PATTERN_LENGTH} characters with at most {_MAX_REPEATS} repetitions, none "
                "of them of a group"
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise self.wrong(f"the pattern {shortened(repr(pattern))} ({error})") from None
        return str(pattern)

    def _read_sub_params(self, part: SavedPart) -> tuple[Sequence[Any], int]:
        shape = part.take_list("shape", optional=True)
        dim = part.get("partition_dim")
        if type(dim) is not int or not 0 <= dim < len(shape):
            raise self.wrong(f"{_SUB_PARAMS} with the dimension {shortened(repr(dim))}")
        return shape, dim

    def _match(self, patterns: Mapping[str, Any] | Sequence[str], name: str) -> str | None:
        # As in ds_to_universal, which matches the beginning of a name and allows a single match.
        matches = [pattern for pattern in patterns if re.match(pattern, name)]
        if len(matches) > 1:
            raise self.wrong(f"several patterns for {name!r}: {', '.join(map(repr, matches[:4]))}")
        return matches[0] if matches else None

    def _is_in(self, key: str, name: str) -> bool:
        return self._match(self._lists[key], name) is not None

    # Parts along a dimension.

    def _unfit(self, name: str, parts: Sequence[Shape], expected: str) -> FormatError:
        shapes = ", ".join(str(list(shape)) for shape in parts[:8])
        return FormatError(
            f"{self.label}: the parts of {name!r} have shapes {shapes}, expected {expected}, as "
            f"{INFO} specifies. The files belong to different saves, or it is of another model"
        )

    def _expect_like(self, name: str, parts: Sequence[Shape], dim: int | None) -> None:
        """Raise FormatError for parts that differ elsewhere than in `dim`."""
        other_dims = {
            shape if dim is None else (*shape[:dim], *shape[dim + 1 :]) for shape in parts
        }
        sizes = {len(shape) for shape in parts}
        if len(other_dims) > 1 or len(sizes) > 1 or (dim is not None and min(sizes) <= dim):
            where = "equal ones" if dim is None else f"ones that differ in dimension {dim} alone"
            raise self._unfit(name, parts, where)

    def _join_widths(
        self, name: str, parts: tuple[Shape, ...], dim: int, widths: Sequence[Sequence[int]]
    ) -> tuple[BlockPlace, ...]:
        """Join sub-parameters, each sharded along `dim` in the widths of its parts."""
        if any(
            sum(of_ranks[rank] for of_ranks in widths) != shape[dim]
            for rank, shape in enumerate(parts)
        ):
            raise self._unfit(name, parts, f"widths {[list(of_ranks) for of_ranks in widths][:4]}")
        first = parts[0]
        total = sum(shape[dim] for shape in parts)
        pieces: list[list[tuple[Box, Shape]]] = [[] for _ in parts]
        inside = [0] * len(parts)
        at = 0
        for of_ranks in widths:
            for rank, width in enumerate(of_ranks):
                if width:
                    before, after = (0,) * dim, (0,) * (len(first) - dim - 1)
                    local = (*before, inside[rank], *after)
                    stop = (*first[:dim], inside[rank] + width, *first[dim + 1 :])
                    pieces[rank].append((Box(local, stop), (*before, at, *after)))
                inside[rank] += width
                at += width
        whole = (*first[:dim], total, *first[dim + 1 :])
        return tuple(
            BlockPlace(whole, part, tuple(own)) for part, own in zip(parts, pieces, strict=True)
        )

    def _find_widths(
        self, name: str, pattern: str, shape: Sequence[Any], dim: int, parts: tuple[Shape, ...]
    ) -> list[list[int]]:
        """Return the widths of each sub-parameter's parts."""
        total = sum(part[dim] for part in parts)
        stored_widths = self._widths.get(pattern) if self._has_widths else None
        if stored_widths is not None:
            listed = stored_widths if isinstance(stored_widths, list | tuple) else ()
            widths = [list(sizes) for sub in listed if (sizes := as_sizes(sub))]
            is_whole = len(widths) == len(stored_widths) and all(
                len(w) == self.ranks for w in widths
            )
            if not is_whole or sum(map(sum, widths)) != total:
                raise self.wrong(f"{_WIDTHS} of {name!r} as {shortened(repr(stored_widths))}")
            return widths
        entry = shape[dim]
        sizes = as_sizes(entry) if isinstance(entry, list | tuple) else None
        if sizes is None and type(entry) is int and entry > 0 and total % entry == 0:
            # A number of equal sub-parameters.
            sizes = (total // entry,) * entry
        if sizes is None or sum(sizes) != total:
            raise self.wrong(f"sub-parameters of {name!r} as {shortened(repr(entry))}, of {total}")
        if any(size % self.ranks for size in sizes):
            raise self.wrong(
                f"no widths of the parts of {name!r}, whose sub-parameters of {list(sizes)} are "
                f"not even over {self.ranks} ranks"
            )
        return [[size // self.ranks] * self.ranks for size in sizes]

    def _drop_padding(self, name: str, places: tuple[BlockPlace, ...]) -> tuple[BlockPlace, ...]:
        """Remove the rows that pad a vocabulary."""
        size, shape = self._vocabulary_size, places[0].shape
        if type(size) is not int or not shape or not 0 < size <= shape[0]:
            raise self.wrong(
                f"{_VOCABULARY_SIZE} {shortened(repr(size))} for {name!r} of {list(shape)}"
            )
        trimmed = []
        for place in places:
            pieces = tuple(
                (Box(box.start, (min(box.stop[0], box.start[0] + size - at[0]), *box.stop[1:])), at)
                for box, at in place.pieces
                if at[0] < size
            )
            trimmed.append(BlockPlace((size, *shape[1:]), place.block_shape, pieces))
        return tuple(trimmed)

    # Maps.

    def _join_map(
        self, name: str, value: SavedPart, parts: Sequence[Shape]
    ) -> tuple[BlockPlace, ...]:
        """Join a parameter whose boxes are listed."""
        whole, ranks = as_sizes(value.get("logical_shape")), value.take_dict("ranks", optional=True)
        if whole is None or {str(rank) for rank in ranks} != {*map(str, range(self.ranks))}:
            raise self.wrong(f"a map of {name!r} that is not of {self.ranks} ranks")
        by_rank = {int(rank): SavedPart(entry, value.label) for rank, entry in ranks.items()}
        places = []
        for rank, part in enumerate(parts):
            shape = as_sizes(by_rank[rank].get("shard_shape"))
            if shape != part:
                raise self._unfit(name, parts, f"{shape} on rank {rank}")
            own = []
            for piece in self._read_parts(by_rank[rank], "pieces"):
                box = self._read_piece(name, piece, part, whole)
                if box is not None:
                    own.append(box)
            places.append(BlockPlace(whole, part, tuple(own)))
        return tuple(places)

    def _read_piece(
        self, name: str, piece: SavedPart, part: Shape, whole: Shape
    ) -> tuple[Box, Shape] | None:
        shape, scale = as_sizes(piece.get("shape")), piece.get("scale")
        if shape is None or len(shape) != len(whole) or scale not in (None, 1.0):
            raise self.wrong(f"a piece of {name!r} that is scaled, or lacks a shape of {whole}")
        if 0 in shape:
            return None
        starts = []
        for key, full_shape in (("source", whole), ("dest", part)):
            place = piece.get(key)
            pair = place if isinstance(place, list | tuple) and len(place) == 2 else (None, None)
            strides = as_sizes(pair[1])
            full_strides = View.row_major(full_shape).strides
            alike = strides is not None and len(strides) == len(full_strides)
            # The stride of a single index does not matter.
            if (
                not alike
                or type(pair[0]) is not int
                or any(
                    size > 1 and a != b
                    for size, a, b in zip(shape, strides or (), full_strides, strict=False)
                )
            ):
                raise self.wrong(f"a piece of {name!r} that is not a box")
            rest, start = pair[0], []
            for stride in full_strides:
                start.append(rest // stride if stride else 0)
                rest -= start[-1] * stride
            if any(
                a < 0 or a + n > size for a, n, size in zip(start, shape, full_shape, strict=True)
            ):
                raise self.wrong(f"a piece of {name!r} outside of {list(full_shape)}")
            starts.append(tuple(start))
        stop = tuple(at + size for at, size in zip(starts[1], shape, strict=True))
        return Box(starts[1], stop), starts[0]
