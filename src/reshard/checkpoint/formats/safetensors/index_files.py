"""Index files, which say which of several files each tensor is in, as Hugging Face writes them.

The same text stands beside safetensors (`model.safetensors.index.json`) and beside files of
`torch.save` (`pytorch_model.bin.index.json`)::

    {"metadata": {"total_size": 96}, "weight_map": {"lm_head.weight": "model-00001-of-00002..."}}
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from reshard.checkpoint.contents import StoredTensor
from reshard.checkpoint.manifest import is_plain_name
from reshard.checkpoint.storage.json_text import parse_json
from reshard.errors import CheckpointError, FormatError

_LARGEST_INDEX_BYTES = 100_000_000


def read_weight_map(index: Path) -> Mapping[str, str]:
    """The file of each tensor.

    Raises:
        CheckpointError: an index that cannot be read.
        FormatError: one that is no such JSON, or names files outside its folder.
    """
    try:
        if index.stat().st_size > _LARGEST_INDEX_BYTES:
            raise FormatError(
                f"{index} has over {_LARGEST_INDEX_BYTES} bytes, no index is so large"
            )
        text = index.read_bytes().decode("utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot read {index}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FormatError(f"{index} is not UTF-8 text: {error}") from error
    try:
        content = parse_json(text)
    except FormatError as error:
        raise FormatError(f"{index}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{index} is not JSON: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        raise FormatError(f"{index} has no `weight_map` from tensor names to file names")
    for tensor, file in weight_map.items():
        if not is_plain_name(file):
            raise FormatError(
                f"{index} says that tensor {tensor!r} is in {file!r}, which leads outside the "
                "checkpoint; only files beside the index are read"
            )
    return weight_map


def expect_files(index: Path, weight_map: Mapping[str, str]) -> None:
    """Raise CheckpointError for a file that is missing."""
    for name in sorted(set(weight_map.values())):
        if not (index.parent / name).exists():
            raise CheckpointError(
                f"{index} names the file {name!r}, which is missing; "
                f"{sum(file == name for file in weight_map.values())} tensors are in it. Fetch it "
                "again, the checkpoint is incomplete"
            )


def check_weight_map(
    index: Path, weight_map: Mapping[str, str], found: Mapping[str, Collection[str]]
) -> None:
    """Raise FormatError unless each file has the tensors that the index says, and no others.

    `found` has the names of the tensors in each file.
    """
    listed: dict[str, set[str]] = {name: set() for name in found}
    for tensor, file in weight_map.items():
        listed[file].add(tensor)
    for name, tensors in found.items():
        there = set(tensors)
        for tensor in sorted(listed[name] - there):
            raise FormatError(
                f"{index} says that tensor {tensor!r} is in {name}, but it is not; the index "
                "and the files do not belong together"
            )
        for tensor in sorted(there - listed[name]):
            where = weight_map.get(tensor)
            raise FormatError(
                f"{index.parent / name} holds tensor {tensor!r}, which {index.name} "
                f"{'does not list' if where is None else f'says is in {where}'}; the index and "
                "the files do not belong together"
            )


def index_text(tensors: Iterable[StoredTensor]) -> str:
    """The index of tensors in several files, as Hugging Face writes it."""
    weight_map = {}
    total = 0
    for tensor in tensors:
        weight_map[tensor.name] = tensor.file_range(0).path
        total += tensor.size_bytes
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(content, indent=2) + "\n"
