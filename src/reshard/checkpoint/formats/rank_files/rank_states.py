"""The states in ranks' files: parts of tensors and plain values, by canonical names.

model_..._rank_R     NAME                           as it stands in the state
optim_..._rank_R     optimizer.state.NAME.KEY       and the value optimizer.param_groups
extra_state_...      PATH, or rank_R.PATH           where ranks differ: random states
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from reshard.binding import View
from reshard.checkpoint.formats.rank_files.file_names import (
    EXTRA,
    OPTIMIZER,
    RankFile,
    name_of_rank,
)
from reshard.checkpoint.formats.rank_files.local_parts import LocalPart, PartReader, is_part
from reshard.checkpoint.formats.safetensors.header import SUFFIX, read_header
from reshard.checkpoint.formats.torch_files.nested_states import flatten_state
from reshard.checkpoint.formats.torch_files.optimizer_states import OPTIMIZER_PREFIX
from reshard.checkpoint.formats.torch_files.reading import (
    check_tensor,
    read_storage,
    read_torch_file,
)
from reshard.checkpoint.formats.torch_files.values import ArchivedTensor
from reshard.checkpoint.storage.remote_paths import map_paths
from reshard.errors import FormatError, UnreadableTensorError

# Where programs keep the state of the model in a file with more in it.
_MODEL_KEYS = ("model", "state_dict", "module", "model_state_dict")


@dataclass
class RankStates:
    """What the files of all ranks have.

    Attributes:
        parts: for each name the part of each rank, and its file.
        values: plain values that are equal on all ranks; of one rank under `rank_R.`.
        unread: what is neither, with the reason.
        unreadable: tensors that cannot be read on some rank, with their type.
    """

    parts: dict[str, dict[int, tuple[str, LocalPart]]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)


def read_states(folder: Path, groups: Mapping[str, tuple[RankFile, ...]]) -> RankStates:
    """The states in the files of each kind.

    Raises:
        CheckpointError: a file that cannot be read.
        FormatError: one that is damaged, or no state.
    """
    states = RankStates()
    every = [folder / file.name for files in groups.values() for file in files]
    contents = map_paths(_read_content, every)
    for kind, files in groups.items():
        values: dict[str, dict[int, Any]] = {}
        for file in files:
            path, content = folder / file.name, next(contents)
            unreadable: dict[str, str] = {}
            parts = _find_parts(path, content, file, len(files), values, states, unreadable)
            begin = OPTIMIZER_PREFIX if kind == OPTIMIZER else ""
            states.unreadable |= {begin + name: why for name, why in unreadable.items()}
            for name, part in parts.items():
                own = name_of_rank(name, file.rank, len(files)) if kind == EXTRA else name
                if kind == OPTIMIZER:
                    own = OPTIMIZER_PREFIX + name
                states.parts.setdefault(own, {})[file.rank] = file.name, part
        for name, by_rank in values.items():
            name = OPTIMIZER_PREFIX + name if kind == OPTIMIZER else name
            found = [*by_rank.values()]
            # By their texts too: a NaN is equal to itself.
            first, text = found[0], repr(found[0])
            are_equal = all(one == first or repr(one) == text for one in found)
            if len(found) == len(files) and are_equal:
                states.values[name] = found[0]
            else:
                states.values |= {
                    name_of_rank(name, rank, len(files)): one for rank, one in by_rank.items()
                }
    # What one rank cannot read is missing from the whole.
    for name in states.unreadable:
        states.parts.pop(name, None)
    return states


def list_parameters(
    parts: Mapping[str, Mapping[int, tuple[str, LocalPart]]], cut: Collection[str] = ()
) -> list[str]:
    """Return the names of the model's parameters in their order.

    Plain tensors beside parts of others are buffers, but for those that a user has `cut`; of tied
    tensors the first counts.
    """
    model = {name: own for name, own in parts.items() if not name.startswith(OPTIMIZER_PREFIX)}
    says_cuts = any(not part.is_plain for own in model.values() for _, part in own.values())
    seen = set()
    names = []
    for name, own in model.items():
        first = next(iter(own.values()))[1]
        if (says_cuts and first.is_plain and name not in cut) or name.startswith("rank_"):
            continue
        place = tuple(
            (rank, file, tensor.start_bytes, tensor.view, tensor.shape)
            for rank, (file, part) in own.items()
            for tensor in part.tensors
            if tensor.storage_bytes
        )
        if not place or place not in seen:
            names.append(name)
        seen.add(place)
    return names


def _read_content(path: Path) -> Any:
    """The parts in a file of safetensors; the state in another."""
    return _read_safetensors(path) if path.name.endswith(SUFFIX) else read_torch_file(path)


def _find_parts(
    path: Path,
    state: Any,
    file: RankFile,
    ranks: int,
    values: dict[str, dict[int, Any]],
    states: RankStates,
    unreadable: dict[str, str],
) -> dict[str, LocalPart]:
    """The parts in one file; its values are added to `values`, the rest to what is unread."""
    if path.name.endswith(SUFFIX):
        own: dict[str, LocalPart] = state
        return own
    # A state dict in a dict with more in it has the names of the model.
    if isinstance(state, dict) and file.kind != OPTIMIZER:
        inner = [key for key in _MODEL_KEYS if isinstance(state.get(key), dict)]
        if len(inner) == 1 and not any(is_part(value) for value in state.values()):
            rest = {key: value for key, value in state.items() if key != inner[0]}
            state = {**rest, **state[inner[0]]}
    flat = flatten_state(state, str(path), is_part)
    if "" in flat.unread:
        raise FormatError(f"{path} holds {flat.unread['']}, no state; save its state_dict()")
    reader = PartReader(str(path), file.rank, ranks, partial(read_storage, path))
    parts = {}
    for name, value in flat.tensors.items():
        try:
            parts[name] = part = reader.part(name, value)
        except UnreadableTensorError as error:
            unreadable[name] = str(error)
            continue
        check_tensor(path, name, part.dtype, part.shape)
    for name, value in flat.values.items():
        # A state without anything in it has no name.
        if not name:
            continue
        values.setdefault(name, {})[file.rank] = value
    for name, why in flat.unread.items():
        (unreadable if name in flat.unread_tensors else states.unread)[name] = why
    return parts


def _read_safetensors(path: Path) -> dict[str, LocalPart]:
    parts = {}
    for entry in read_header(path).tensors:
        size_bytes = entry.stop_bytes - entry.start_bytes
        view = View.row_major(entry.shape)
        tensor = ArchivedTensor(entry.dtype, entry.shape, view, entry.start_bytes, size_bytes, None)
        parts[entry.name] = LocalPart(entry.dtype, entry.shape, (tensor,))
    return parts
