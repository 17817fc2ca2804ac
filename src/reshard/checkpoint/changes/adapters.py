"""Merging PEFT adapters into the checkpoint of their base: `W + scale * B @ A`.

    convert BASE OUT --adapter A --adapter B         W + A's change, then B's

1. An adapter is a folder with `adapter_config.json` and its tensors, in any readable format.
2. The matrices A and B change the weight that their names begin with; a tensor that was trained
   as a whole (`modules_to_save`) replaces the base's, in its type.
3. Adapters whose merge would differ from PEFT's are refused by name: other kinds of adapters, and
   adapters whose initialisation has changed the base.

The arithmetic is the same as PEFT's on a CPU:

1. A and B are cast to float32. An element of their product is summed in float64 and rounded once,
   so it does not depend on the order of summation; then it is multiplied by the scale.
2. The sum with the weight is computed in float32, and rounded to the weight's type. Further
   adapters start from that.
3. With a magnitude (DoRA), each output of the sum is multiplied by magnitude / norm, where `norm`
   is the norm of the sum's row.

A weight is treated as a matrix: its first dimension, and all others flattened.

Sources: LoRA (arXiv 2106.09685); DoRA (arXiv 2402.09353); PEFT's `merge_and_unload`.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard._records import Record
from reshard.binding import Binding, FileRange
from reshard.checkpoint.changes.computed_tensors import CastTensor, ComputedTensor, ReadBox
from reshard.checkpoint.contents import Checkpoint, StoredTensor, read_again
from reshard.checkpoint.formats.opening import open_checkpoint, read_adapter_config
from reshard.dtypes import DType, dtype
from reshard.elements import CastCounts, as_float32, cast_elements, is_castable
from reshard.errors import UsageError
from reshard.layout import Box
from reshard.recipes.adapters import LowRankAdapters
from reshard.text import count_text

# Elements of a product at once, and of a piece of A in float64: 1 MiB and 2 MiB.
_PRODUCT, _FACTOR = 1 << 17, 1 << 18


class LowRankChange(Record):
    """The low-rank change of a weight by an adapter.

    Attributes:
        a: `(rank, inputs...)`.
        b: `(outputs, rank, 1...)`.
        scale: the factor of the product.
        is_swapped: whether the first dimension of the weight is its inputs.
        magnitude: the magnitude of each output (DoRA); None for a plain sum.
        is_rounded: whether the product is rounded to the weight's type before it is added, as by
            PEFT for embeddings.
    """

    a: StoredTensor
    b: StoredTensor
    scale: float
    is_swapped: bool = False
    magnitude: StoredTensor | None = None
    is_rounded: bool = False

    @property
    def sources(self) -> tuple[StoredTensor, ...]:
        """The stored tensors of the change."""
        return (self.a, self.b) if self.magnitude is None else (self.a, self.b, self.magnitude)

    @property
    def rank(self) -> int:
        """The rank."""
        return self.a.shape[0]


class _Merged(Record):
    """A tensor of the base with the changes of adapters, in its own type."""

    base: StoredTensor

    @property
    def dtype(self) -> DType:
        """The type of the base."""
        return self.base.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the base."""
        return self.base.shape


class MergedWeight(_Merged):
    """A weight with the changes of adapters, applied in order."""

    changes: tuple[LowRankChange, ...]
    _norms: dict[int, NDArray[np.float32]] = field(default_factory=dict, compare=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)

    @property
    def sources(self) -> tuple[StoredTensor, ...]:
        """The weight, and the tensors of each change."""
        return (self.base, *(tensor for change in self.changes for tensor in change.sources))

    def input_bytes(self, box: Box) -> tuple[int, ...]:
        """Return the bytes of a box of the weight, and of the whole adapters."""
        adapters = (math.prod(t.shape) * t.dtype.itemsize_bytes for t in self.sources[1:])
        return (box.elements * self.base.dtype.itemsize_bytes, *adapters)

    def fill(self, box: Box, out: NDArray[np.generic], read: ReadBox) -> CastCounts:
        """Write the box's elements, merged and rounded."""
        factors = self._read_factors(read)
        for number, change in enumerate(self.changes):
            if change.magnitude is not None:
                self._find_norms(number, box, factors, read)
        return self._merge(box, len(self.changes), factors, read, out)

    def _read_factors(self, read: ReadBox) -> list[list[NDArray[np.float32]]]:
        """Return each change's A `(rank, in)`, B `(out, rank)` and magnitude `(out)`."""
        factors: list[list[NDArray[np.float32]]] = []
        source = 1
        for change in self.changes:
            parts: list[NDArray[np.float32]] = []
            for tensor in change.sources:
                bare = read(source, Box.of(tensor.shape)).reshape(-1)
                parts.append(as_float32(bare, tensor.dtype))
                source += 1
            parts[0] = parts[0].reshape(change.rank, -1)
            parts[1] = parts[1].reshape(-1, change.rank)
            factors.append(parts)
        return factors

    def _merge(
        self,
        box: Box,
        changes: int,
        factors: Sequence[Sequence[NDArray[np.float32]]],
        read: ReadBox,
        out: NDArray[np.generic],
    ) -> CastCounts:
        """Write the elements of a box into `out` after `changes` changes, rounded."""
        counts = CastCounts()
        bare = read(0, box)
        rows, columns = _find_ranges(box, self.shape)
        base = bare.reshape(rows.stop - rows.start, -1)
        target = out.reshape(base.shape)
        rank = max((change.rank for change in self.changes), default=1)
        wide = max(1, min(base.shape[1], _FACTOR // rank))
        high = max(1, _PRODUCT // wide)
        for top in range(0, base.shape[0], high):
            for left in range(0, base.shape[1], wide):
                inside = np.s_[top : top + high, left : left + wide]
                at_rows = range(rows.start + top, min(rows.start + top + high, rows.stop))
                first = columns.start + left
                at_columns = range(first, min(first + wide, columns.stop))
                piece = np.ascontiguousarray(base[inside])
                for number in range(changes):
                    piece, cast_counts = self._apply(
                        number, piece, at_rows, at_columns, factors[number]
                    )
                    counts += cast_counts
                target[inside] = piece
        return counts

    def _apply(
        self,
        number: int,
        piece: NDArray[np.generic],
        rows: range,
        columns: range,
        factors: Sequence[NDArray[np.float32]],
    ) -> tuple[NDArray[np.generic], CastCounts]:
        """Return a piece of the weight, as bare elements, after change `number`."""
        merged = self._add(number, piece, rows, columns, factors)
        change = self.changes[number]
        if change.magnitude is not None:
            outputs = columns if change.is_swapped else rows
            part = slice(outputs.start, outputs.stop)
            with np.errstate(all="ignore"):
                factor = factors[2][part] / self._norms[number][part]
                merged = (factor if change.is_swapped else factor[:, None]) * merged
        rounded, counts = self._round(merged)
        return rounded.reshape(piece.shape), counts

    def _round(self, values: NDArray[np.float32]) -> tuple[NDArray[np.generic], CastCounts]:
        """Return values as bare elements of the weight's type, of shape `(n,)`."""
        rounded = np.empty(values.size, dtype=self.dtype.storage)
        bare = np.ascontiguousarray(values).reshape(-1).view(np.uint32)
        return rounded, cast_elements(bare, dtype("float32"), rounded, self.dtype)

    def _add(
        self,
        number: int,
        piece: NDArray[np.generic],
        rows: range,
        columns: range,
        factors: Sequence[NDArray[np.float32]],
    ) -> NDArray[np.float32]:
        """Return the sum of a piece and its part of the product, in float32."""
        change, (a, b, *_) = self.changes[number], factors
        outputs, inputs = (columns, rows) if change.is_swapped else (rows, columns)
        left = b[outputs.start : outputs.stop].astype(np.float64)
        right = a[:, inputs.start : inputs.stop].astype(np.float64)
        product = (left @ right).astype(np.float32)
        delta = (product.T if change.is_swapped else product) * np.float32(change.scale)
        if change.is_rounded:
            delta = as_float32(self._round(delta)[0], self.dtype).reshape(delta.shape)
        values = as_float32(piece.reshape(-1), self.dtype).reshape(piece.shape)
        with np.errstate(all="ignore"):
            return values + delta

    def _find_norms(
        self,
        number: int,
        like: Box,
        factors: Sequence[Sequence[NDArray[np.float32]]],
        read: ReadBox,
    ) -> None:
        """Compute the norms of the outputs of a change's sum once, in boxes as large as `like`."""
        with self._lock:
            if number in self._norms:
                return
            change = self.changes[number]
            total = np.zeros(factors[number][1].shape[0], dtype=np.float64)
            for box in _list_boxes(self.shape, like):
                bare = np.empty(box.shape, dtype=self.dtype.storage)
                self._merge(box, number, factors, read, bare)
                rows, columns = _find_ranges(box, self.shape)
                piece = bare.reshape(len(rows), -1)
                # Compute the sum in parts: the product of a whole box, in float64, would take
                # several times the box's memory.
                step = max(1, _PRODUCT // max(1, piece.shape[1]))
                for top in range(0, len(rows), step):
                    part = piece[top : top + step]
                    at = range(rows.start + top, rows.start + top + part.shape[0])
                    merged = self._add(number, part, at, columns, factors[number])
                    squares = np.square(merged, dtype=np.float64)
                    if change.is_swapped:
                        total[columns.start : columns.stop] += squares.sum(axis=0)
                    else:
                        total[at.start : at.stop] += squares.sum(axis=1)
            self._norms[number] = np.sqrt(total).astype(np.float32)


def _find_ranges(box: Box, shape: tuple[int, ...]) -> tuple[range, range]:
    """Return the rows and columns of a box, with all dimensions but the first flattened.

    A block has a single index of each dimension before the dimension that it splits, and all
    indices of the dimensions after it.

    >>> _find_ranges(Box((2, 0, 0), (4, 3, 5)), (8, 3, 5))
    (range(2, 4), range(0, 15))
    >>> _find_ranges(Box((2, 1, 0), (3, 3, 5)), (8, 3, 5))
    (range(2, 3), range(5, 15))
    """
    first = 0
    for size, start in zip(shape[1:], box.start[1:], strict=True):
        first = first * size + start
    return range(box.start[0], box.stop[0]), range(first, first + math.prod(box.shape[1:]))


def _list_boxes(shape: tuple[int, ...], like: Box) -> list[Box]:
    """Return boxes of whole rows, or parts of rows, that cover a weight, as large as `like`."""
    row = math.prod(shape[1:])
    step = like.elements // row
    if step:
        return [
            Box((top, *(0 for _ in shape[1:])), (min(top + step, shape[0]), *shape[1:]))
            for top in range(0, shape[0], step)
        ]
    # Rows longer than a block occur in two dimensions only.
    wide = like.elements
    return [
        Box((top, left), (top + 1, min(left + wide, shape[1])))
        for top in range(shape[0])
        for left in range(0, shape[1], wide)
    ]


class MergedBias(_Merged):
    """A bias with the biases of adapters added in order: `bias + scale * change`."""

    changes: tuple[tuple[StoredTensor, float], ...]

    @property
    def sources(self) -> tuple[StoredTensor, ...]:
        """The bias and the changes."""
        return (self.base, *(tensor for tensor, _ in self.changes))

    def input_bytes(self, box: Box) -> tuple[int, ...]:
        """Return the bytes of the same box of each source."""
        return tuple(box.elements * tensor.dtype.itemsize_bytes for tensor in self.sources)

    def fill(self, box: Box, out: NDArray[np.generic], read: ReadBox) -> CastCounts:
        """Write the box's elements, rounded after each change."""
        counts = CastCounts()
        out[...] = read(0, box)
        for number, (tensor, scale) in enumerate(self.changes, 1):
            change = as_float32(read(number, box).reshape(-1), tensor.dtype)
            with np.errstate(all="ignore"):
                total = as_float32(out.reshape(-1), self.dtype) + change * np.float32(scale)
            bare = np.ascontiguousarray(total).view(np.uint32)
            counts += cast_elements(bare, dtype("float32"), out.reshape(-1), self.dtype)
        return counts


_MERGED_TYPES = ("float32", "bfloat16", "float16")
# PEFT may save a wrapped module's own tensors in addition to the change, with this in their names.
_BASE_LAYER = ".base_layer."
# Initialisations that change the base. All others only determine A and B.
_BASE_CHANGING = ("pissa", "olora", "loftq", "corda", "lora_ga")
# Settings with which PEFT merges differently, or cannot merge.
_UNKNOWN_SETTINGS = (
    "target_parameters",
    "layer_replication",
    "trainable_token_indices",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
    "monteclora_config",
    "velora_config",
)


@dataclass
class _Merge:
    """A merge in progress: the changes of each tensor of the base, in the order of adapters."""

    base: Checkpoint
    weights: dict[str, list[LowRankChange]] = field(default_factory=dict)
    bases: dict[str, StoredTensor] = field(default_factory=dict)
    biases: dict[str, list[tuple[StoredTensor, float]]] = field(default_factory=dict)
    replaced: dict[str, StoredTensor] = field(default_factory=dict)
    added: list[str] = field(default_factory=list)
    adapters: list[Checkpoint] = field(default_factory=list)

    def add(self, path: str | os.PathLike[str]) -> None:
        """Add an adapter. Raises UsageError if it cannot be merged."""
        checkpoint = open_checkpoint(path)
        config = read_adapter_config(checkpoint)
        if config is None:
            raise UsageError(
                f"the adapter {os.fspath(path)} has no adapter_config.json; give the folder that "
                "PEFT saved"
            )
        self._check_config(checkpoint, config)
        tensors = {
            name: _in_any_folder(checkpoint, tensor) for name, tensor in checkpoint.tensors.items()
        }
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        low_rank = LowRankAdapters(shapes, {"adapter_config": config})
        # Replace base weights first: this drops the changes that were added to them before.
        saved = {name for name in tensors if _BASE_LAYER in name}
        for name in sorted(saved):
            self._take_base(checkpoint, low_rank.base_name(name), tensors[name])
        for weight, members in low_rank.members.items():
            self._add_matrices(checkpoint, config, weight, members, tensors)
        inside = saved | {n for members in low_rank.members.values() for n in members.values()}
        for name, tensor in tensors.items():
            if name not in inside:
                if ".lora_" in name or "trainable_tokens" in name:
                    raise UsageError(
                        f"{checkpoint.folder} has {name!r}, a kind of change that cannot be "
                        "merged; merge it with PEFT"
                    )
                self._replace(low_rank.base_name(name), tensor)
        self.adapters.append(checkpoint)

    def _check_config(self, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
        kind = config.get("peft_type")
        if kind != "LORA":
            raise UsageError(
                f"{checkpoint.folder} is an adapter of the type {kind!r}; only LORA can be merged, "
                "merge others with PEFT"
            )
        for key in _UNKNOWN_SETTINGS:
            if config.get(key):
                raise UsageError(
                    f"{checkpoint.folder} has {key} in adapter_config.json, with which the change "
                    "differs from scale * B @ A; merge it with PEFT"
                )
        how = str(config.get("init_lora_weights", True)).lower()
        if how.startswith(_BASE_CHANGING):
            raise UsageError(
                f"{checkpoint.folder} was initialised by {how!r}, which changes the base as well; "
                "save it with PEFT's path_initial_model_for_weight_conversion, or merge it with "
                "PEFT"
            )

    def _add_matrices(
        self,
        checkpoint: Checkpoint,
        config: Mapping[str, Any],
        weight: str,
        members: Mapping[str, str],
        tensors: Mapping[str, StoredTensor],
    ) -> None:
        """Add the change of a weight."""
        kind = "embedding " if "embedding A" in members else ""
        a, b = tensors[members[f"{kind}A"]], tensors[members[f"{kind}B"]]
        for matrix in (a, b):
            if not is_castable(matrix.dtype) or matrix.dtype.name == "float64":
                raise UsageError(
                    f"{matrix.name!r} of {checkpoint.folder} is of {matrix.dtype.name}; "
                    f"adapters of {', '.join(_MERGED_TYPES)} can be merged"
                )
        name = self._find_base(checkpoint, weight)
        base = self.base.tensors[name]
        if base.dtype.name not in _MERGED_TYPES:
            raise UsageError(
                f"{name!r}, which {checkpoint.folder} changes, is of {base.dtype.name}; a "
                f"change can be merged into {', '.join(_MERGED_TYPES)}: --dequantize it first"
            )
        is_swapped = _find_orientation(base, a, b, config, is_embedding=bool(kind))
        if is_swapped is None:
            raise UsageError(
                f"{members[f'{kind}A']!r} of shape {list(a.shape)} and its B of shape "
                f"{list(b.shape)} do not change a weight of shape {list(base.shape)}, which "
                f"{name!r} has; is it the adapter of another model?"
            )
        magnitude = tensors[members["vector"]] if "vector" in members else None
        if bool(config.get("use_dora")) != (magnitude is not None):
            raise UsageError(
                f"{checkpoint.folder} has {'a' if magnitude else 'no'} magnitude of {name!r}, "
                f"but its config has use_dora={bool(config.get('use_dora'))}; it is incomplete"
            )
        module = weight.removesuffix(".weight")
        scale = _find_scale(config, module, a.shape[0], checkpoint.folder)
        change = LowRankChange(a, b, scale, is_swapped, magnitude, is_rounded=bool(kind))
        self.weights.setdefault(name, []).append(change)
        if "bias" in members:
            bias = self._find_base(checkpoint, f"{module}.bias")
            self.biases.setdefault(bias, []).append((tensors[members["bias"]], scale))

    def _find_base(self, checkpoint: Checkpoint, name: str) -> str:
        """Return the name of the base's tensor that an adapter changes."""
        base = self._look_up(name)
        if base is not None:
            return base
        raise UsageError(
            f"{checkpoint.folder} changes {name!r}, which {self.base.folder} does not have; is it "
            "the adapter of another model?"
        )

    def _look_up(self, name: str) -> str | None:
        """Return the name in the base, with or without a prefix `model.`, or None."""
        # The adapter may have been trained on the base model without a head, whose names do not
        # have the prefix.
        candidates = (name, f"model.{name}", name.removeprefix("model."))
        return next((key for key in candidates if key in self.base.tensors), None)

    def _take_base(self, checkpoint: Checkpoint, name: str, tensor: StoredTensor) -> None:
        """Replace the base's weight by the weight saved with its change, as PEFT saves embeddings.

        Like PEFT, drop the changes of earlier adapters.
        """
        key = self._find_base(checkpoint, name)
        base = self.base.tensors[key]
        if (base.shape, base.dtype) != (tensor.shape, tensor.dtype):
            raise UsageError(
                f"{tensor.name!r} of {checkpoint.folder} is {tensor.dtype.name} "
                f"{list(tensor.shape)} and replaces {key!r}, which is {base.dtype.name} "
                f"{list(base.shape)}; is it the adapter of another model?"
            )
        self.bases[key] = tensor
        self.weights.pop(key, None)

    def _replace(self, name: str, tensor: StoredTensor) -> None:
        key = self._look_up(name)
        if key is None:
            self.added.append(name)
            self.replaced[name] = tensor
            return
        base = self.base.tensors[key]
        if base.shape != tensor.shape:
            raise UsageError(
                f"{tensor.name!r} of shape {list(tensor.shape)} replaces {key!r} of shape "
                f"{list(base.shape)}; is it the adapter of another model?"
            )
        if base.dtype is not tensor.dtype and not (
            is_castable(base.dtype) and is_castable(tensor.dtype)
        ):
            raise UsageError(
                f"{tensor.name!r} is of {tensor.dtype.name} and replaces {key!r} of "
                f"{base.dtype.name}, to which it cannot be cast"
            )
        self.replaced[key] = tensor


def merge_adapters(
    checkpoint: Checkpoint, paths: Iterable[str | os.PathLike[str]]
) -> tuple[Checkpoint, dict[str, ComputedTensor]]:
    """Return a checkpoint with adapters merged into it in order.

    Args:
        checkpoint: the base.
        paths: of the adapters: folders with `adapter_config.json`.

    Returns:
        The merged checkpoint, and its computed tensors by name.

    Raises:
        UsageError: an adapter that is for another base or cannot be merged.
        CheckpointError: an adapter that cannot be read.
    """
    merge = _Merge(checkpoint)
    for path in paths:
        merge.add(path)
    if not merge.adapters:
        return checkpoint, {}
    computed: dict[str, ComputedTensor] = {}
    tensors = dict(checkpoint.tensors)
    for name, tensor in merge.replaced.items():
        base = checkpoint.tensors.get(name)
        if base is None or base.dtype is tensor.dtype:
            tensors[name] = tensor.replace(name=name, digest=None)
        else:
            computed[name] = CastTensor(tensor, base.dtype)
    for name, changes in merge.weights.items():
        if name in merge.replaced:
            raise UsageError(f"{name!r} is changed by one adapter and replaced by another")
        weight = merge.bases.pop(name, checkpoint.tensors[name])
        computed[name] = MergedWeight(weight, tuple(changes))
    for name, tensor in merge.bases.items():
        tensors[name] = tensor.replace(name=name, digest=None)
    for name, sums in merge.biases.items():
        computed[name] = MergedBias(checkpoint.tensors[name], tuple(sums))
    for name, merged in computed.items():
        base = checkpoint.tensors[name]
        tensors[name] = StoredTensor(name, merged.dtype, base.binding, base.spec)
    return _finish(merge, tensors, computed), computed


def _finish(
    merge: _Merge, tensors: dict[str, StoredTensor], computed: Mapping[str, ComputedTensor]
) -> Checkpoint:
    """Return the base with other tensors, and with the files of the adapters added."""
    base = merge.base
    files, identities = list(base.files), dict(base.identities)
    for adapter in merge.adapters:
        for file in adapter.files:
            name = os.fspath(adapter.path(file.name).resolve())
            if name not in identities:
                files.append(file.replace(name=name, rank=0))
                identities[name] = adapter.identities[file.name]
    read = {source.name for tensor in computed.values() for source in tensor.sources}
    notes = [
        f"{count_text(len(merge.weights), 'weight')} have the changes of "
        f"{count_text(len(merge.adapters), 'adapter')} merged in"
    ]
    if merge.replaced:
        notes.append(
            "trained as a whole, replacing the base's: "
            f"{count_text(len(merge.replaced), 'tensor')} (first: {next(iter(merge.replaced))})"
        )
    if merge.added:
        notes.append(f"not in the base, added from an adapter: {', '.join(merge.added[:5])}")
    checksums = read_again(base.checksums, read)
    return base.replace(
        tensors=tensors,
        files=tuple(files),
        identities=identities,
        checksums=tuple(entry for entry in checksums if entry.tensor not in merge.replaced),
        notes=(*base.notes, *notes),
    )


def _in_any_folder(checkpoint: Checkpoint, tensor: StoredTensor) -> StoredTensor:
    """Return a tensor bound to absolute paths, to be read with another checkpoint's tensors."""
    if checkpoint.derived:
        raise UsageError(
            f"the adapter {checkpoint.folder} is compressed; convert it first (--to full)"
        )

    def whole(place: Any) -> FileRange:
        path = os.fspath(checkpoint.path(place.path).resolve())
        return FileRange(path, place.start_bytes)

    binding = tensor.binding
    addresses = {
        slot: tuple(map(whole, place)) if isinstance(place, tuple) else whole(place)
        for slot, place in binding.addresses.items()
    }
    return tensor.replace(binding=Binding(binding.layout, addresses, binding.views), spec=None)


def _find_orientation(
    base: StoredTensor,
    a: StoredTensor,
    b: StoredTensor,
    config: Mapping[str, Any],
    *,
    is_embedding: bool,
) -> bool | None:
    """Return whether a weight has its inputs first, or None if the matrices do not fit it."""
    if any(size != 1 for size in b.shape[2:]):
        return None
    plain = base.shape == (b.shape[0], *a.shape[1:])
    swapped = len(a.shape) == 2 and base.shape == (a.shape[1], b.shape[0])
    if is_embedding:
        return True if swapped else None
    # The shapes of a square weight fit both ways, so only the config can decide.
    if plain and swapped:
        return bool(config.get("fan_in_fan_out"))
    return swapped if plain or swapped else None


def _find_scale(config: Mapping[str, Any], module: str, rank: int, folder: Path) -> float:
    """Return the scale of the change of a module."""
    numbers = []
    # 8 is the default of both in PEFT, whose saves may leave defaults out.
    for what, default in (("r", 8), ("lora_alpha", 8)):
        patterns = config.get("rank_pattern" if what == "r" else "alpha_pattern") or {}
        key = _find_pattern(patterns, module) if isinstance(patterns, Mapping) else None
        number = config.get(what, default) if key is None else patterns[key]
        if type(number) not in (int, float) or not math.isfinite(number):
            raise UsageError(f"{folder}: {what} of {module!r} is {number!r}, expected a number")
        numbers.append(number)
    if numbers[0] != rank:
        raise UsageError(
            f"{folder}: the matrices of {module!r} are of rank {rank}, its config has rank "
            f"{numbers[0]}; they belong to different saves"
        )
    return float(numbers[1] / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _find_pattern(patterns: Mapping[str, Any], module: str) -> str | None:
    """Return the first pattern that a module's name ends with, as PEFT searches it."""
    for key in patterns:
        try:
            if re.match(rf"(.*\.)?({key})$", module):
                return key
        except re.error:
            continue
    return None
