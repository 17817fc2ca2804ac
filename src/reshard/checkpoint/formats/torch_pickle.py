"""The format `torch-pickle`: whole tensors in files of `torch.save`.

A single file, or several with an index that maps tensors to files::

    pytorch_model.bin                        pytorch_model-00001-of-00002.bin
    epoch=3.ckpt, model.pt, model.pth        pytorch_model-00002-of-00002.bin
                                             pytorch_model.bin.index.json

A file holds a state of nested dicts and lists; tensors are named by their paths in it
(`torch_files.nested_states`). Plain values in it are the values of the checkpoint. Written files
hold the same nested state again; several files with an index hold it flat, as `transformers`
expects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard.checkpoint.contents import Checkpoint, StoredFile
from reshard.checkpoint.formats.chunks import ChunkBinder
from reshard.checkpoint.formats.format import Capability, CheckpointFormat, Listing
from reshard.checkpoint.formats.safetensors.header import select_files, tensor_size_bytes
from reshard.checkpoint.formats.safetensors.huggingface import (
    check_weight_map,
    expect_files,
    index_text,
    read_weight_map,
)
from reshard.checkpoint.formats.torch_files.building import TorchFilesBuilder
from reshard.checkpoint.formats.torch_files.nested_states import (
    FlatState,
    flatten_state,
    settle_paths,
    unflatten_state,
)
from reshard.checkpoint.formats.torch_files.pickles import shortened
from reshard.checkpoint.formats.torch_files.reading import (
    StorageChecksums,
    check_tensor,
    is_torch_file,
    read_torch_file,
    region_of,
)
from reshard.checkpoint.formats.torch_files.values import ArchivedTensor
from reshard.checkpoint.formats.write_plan import (
    NewCheckpoint,
    WritePlan,
    group_by_bytes,
    group_by_file,
)
from reshard.checkpoint.storage.filesystem import is_attribute_file
from reshard.checkpoint.storage.remote_paths import map_paths
from reshard.errors import FormatError

FORMAT_NAME = "torch-pickle"
SINGLE_FILE = "pytorch_model.bin"
INDEX_NAME = "pytorch_model.bin.index.json"
SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
# Other files that training programs write next to a model.
_OTHER_FILES = (
    "training_args.bin",
    "optimizer.pt",
    "optimizer.bin",
    "scheduler.pt",
    "scheduler.bin",
)
_OTHER_PREFIXES = ("rng_state", "random_states", "scaler.")


class TorchPickleFormat(CheckpointFormat):
    """Whole tensors in a file of `torch.save`, or in several with an index."""

    name = FORMAT_NAME
    evidence = f"`{SINGLE_FILE}`, `{INDEX_NAME}`, or one file of torch.save"
    capabilities = frozenset({Capability.WHOLE, Capability.VALUES, Capability.FILE_LIMIT})
    single_suffixes = SUFFIXES

    def detect(self, listing: Listing) -> bool:
        """Return whether it is such a file or index, or a folder with these and no safetensors."""
        path = listing.path
        if not listing.is_folder:
            is_index = path.name.endswith(".bin.index.json")
            return is_index or (path.suffix != ".safetensors" and is_torch_file(path))
        return not select_files(listing.names) and _find_file(path) is not None

    def open(self, path: Path) -> Checkpoint:
        """Return the checkpoint of an index, or of a single file."""
        if path.is_dir():
            path = path / (_find_file(path) or SINGLE_FILE)
        if not path.name.endswith(".index.json"):
            return _checkpoint(path.parent, {path.name: read_flat_state(path)})
        weight_map = read_weight_map(path)
        expect_files(path, weight_map)
        names = sorted(set(weight_map.values()))
        contents = map_paths(read_flat_state, (path.parent / name for name in names))
        states = dict(zip(names, contents, strict=True))
        check_weight_map(path, weight_map, {name: states[name].tensors for name in names})
        return _checkpoint(path.parent, states)

    def has_file(self, name: str) -> bool:
        """Return whether it is the index; other names do not identify the format."""
        return name == INDEX_NAME

    def own_files(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """Return the index."""
        return (INDEX_NAME,)

    def plan_write(self, new: NewCheckpoint) -> WritePlan:
        """Plan a file of whole tensors, or files up to a limit.

        Raises:
            UsageError: a type that PyTorch does not have.
        """
        groups = group_by_bytes(
            new.tensors,
            lambda name: tensor_size_bytes(new.tensors[name].dtype, new.tensors[name].layout.shape),
            new.most_file_bytes,
        )
        if new.source_files:
            groups = group_by_file(new.tensors, new.source_files)
        builder, moved = TorchFilesBuilder(new.tensors), list[str]()
        for number, names in enumerate(groups, start=1):
            numbered = f"pytorch_model-{number:05d}-of-{len(groups):05d}.bin"
            file_name = (new.file_name or SINGLE_FILE) if len(groups) == 1 else numbered
            tensors = {name: builder.put_whole(name, 0) for name in names}
            # Values are in the first file.
            leaves = {**tensors, **(new.values if number == 1 else {})}
            paths = settle_paths(leaves, new.paths) if len(groups) == 1 else {}
            moved += [name for name, path in paths.items() if path != new.paths.get(name, path)]
            builder.write(file_name, unflatten_state(leaves, paths))
        return WritePlan(
            self.name,
            None,
            builder.bind(),
            tuple(builder.files),
            _note_moved(moved),
            paths=dict(new.paths),
            values=new.values,
        )

    def final_files(self, write_plan: WritePlan) -> Iterator[tuple[str, bytes]]:
        """Yield the index, if there are several files."""
        if len(write_plan.files) > 1:
            yield INDEX_NAME, index_text(write_plan.tensors.values()).encode()


FORMAT = TorchPickleFormat()


def _note_moved(names: Sequence[str]) -> tuple[str, ...]:
    """Return a note on names whose paths differ from the source's."""
    if not names:
        return ()
    return (
        f"{len(names)} names (first: {names[0]}) are keys at the top of the state, since their "
        "places in the source have other names or are taken; --training torch places optimizer "
        "state as PyTorch's optimizers load it",
    )


def _find_file(folder: Path) -> str | None:
    """Return the index or the single file of a folder, or None if there are none or several."""
    names = {path.name for path in folder.iterdir()}
    for name in (INDEX_NAME, SINGLE_FILE):
        if name in names:
            return name
    models = [
        name
        for name in names
        if name.endswith(SUFFIXES)
        and not is_attribute_file(name)
        and name not in _OTHER_FILES
        and not name.startswith(_OTHER_PREFIXES)
    ]
    return models[0] if len(models) == 1 and is_torch_file(folder / models[0]) else None


def read_flat_state(path: Path) -> FlatState:
    """Return the tensors and values of a file by name.

    Raises:
        CheckpointError: a file that cannot be read.
        FormatError: a file that is damaged, or holds an object of a class instead of tensors.
    """
    flat = flatten_state(read_torch_file(path), str(path))
    # The path of the whole content is empty.
    if "" in flat.unread:
        raise FormatError(
            f"{path} holds {flat.unread['']}, no state; to make it would run a program. Load it "
            "where you trust it, and save its state_dict()"
        )
    for name, tensor in flat.tensors.items():
        check_tensor(path, name, tensor.dtype, tensor.shape)
    return flat


def _checkpoint(folder: Path, states: Mapping[str, FlatState]) -> Checkpoint:
    values: dict[str, Any] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    unread: dict[str, str] = {}
    unreadable: dict[str, str] = {}
    binder = ChunkBinder(folder)
    archived: list[tuple[str, str, ArchivedTensor]] = []
    checksums = StorageChecksums()
    for file, flat in states.items():
        for name, tensor in flat.tensors.items():
            binder.add(name, tensor.dtype, tensor.shape, [(0, region_of(file, tensor))], 1)
            archived.append((name, file, tensor))
            checksums.add_whole(name, "the whole", file, tensor)
        values.update(flat.values)
        # A name without a path stands at the top.
        paths.update({name: path for name, path in flat.paths.items() if path != (name,)})
        for name, why in flat.unread.items():
            (unreadable if name in flat.unread_tensors else unread)[name] = why
    files = tuple(StoredFile(file, (folder / file).stat().st_size, 0) for file in states)
    return Checkpoint(
        folder,
        FORMAT_NAME,
        binder.bind(),
        files,
        paths=paths,
        checksums=checksums.list(),
        values=values,
        unread=tuple((shortened(name), reason) for name, reason in unread.items()),
        unreadable=unreadable,
        notes=_note_ties(archived),
    )


def _note_ties(archived: list[tuple[str, str, ArchivedTensor]]) -> tuple[str, ...]:
    """Return a note if tensors are the same storage under several names."""
    names: dict[tuple[Any, ...], list[str]] = {}
    for name, file, tensor in archived:
        # Tensors without elements share no bytes, even at the same address.
        if 0 not in tensor.shape:
            key = file, tensor.start_bytes, tensor.view, tensor.shape, tensor.dtype
            names.setdefault(key, []).append(name)
    tied = [" = ".join(map(shortened, same)) for same in names.values() if len(same) > 1]
    if not tied:
        return ()
    shown = "; ".join(tied[:3]) + (f"; {len(tied) - 3} more" if len(tied) > 3 else "")
    return (f"tied, and stored once in the source: {shown}; a target stores each",)
