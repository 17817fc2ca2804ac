"""The protocol of formats: how a kind of checkpoint on disk is detected, opened and written.

A format detects its paths, opens them, and plans the files of new checkpoints; reading, writing,
digests, journals and names are the same for all formats. To add a format, derive a class
from `CheckpointFormat`, and name it in `registry`::

    class ArrayFolder(CheckpointFormat):
        name = "arrays"
        evidence = "files ending in `.npy`"
        suffixes = (".npy",)

        # Reading.
        def detect(self, listing): ...      # whether a file or folder is of this format
        def open(self, path): ...           # the tensors, and the file range of each shard

        # Writing, unless the format is read only.
        capabilities = frozenset({Capability.WHOLE})
        def plan_write(self, new): ...      # the files, and the file range of each shard
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from reshard.checkpoint.blocks.tensor_columns import TensorColumns
from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.formats.write_plan import NewCheckpoint, WritePlan
from reshard.checkpoint.manifest import MANIFEST_NAME, Manifest
from reshard.dtypes import DType
from reshard.errors import CheckpointError, FormatError, UsageError
from reshard.layout import Layout
from reshard.mesh import DeviceMesh
from reshard.runs import find_distinct

if TYPE_CHECKING:
    from reshard.checkpoint.formats.source_sharding import SourceSharding


# Old names of attributes of formats: plug-ins may define or use them until the next version.
_RENAMED = {
    "arrange": "plan_write",
    "can_hold": "capabilities",
    "open_cut": "open_sharded",
    "place": "assign_layouts",
    "takes_cut": "takes_source_sharding",
}


class Capability(Enum):
    """A kind of contents, or an option, that new checkpoints of a format support."""

    WHOLE = "whole tensors"
    SHARDS = "tensors sharded over ranks"
    ITEMS = "items that are not tensors"
    VALUES = "plain values"
    METADATA = "text metadata"
    ATTRIBUTES = "attributes"
    REPLICAS = "a copy of equal shards for every rank"
    FILE_LIMIT = "a limit for the size of files"


class Listing:
    """A path and, if it is a folder, the names in it, listed once for the detection of all formats.

    >>> Listing(Path("/nowhere")).is_folder
    False
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_folder = path.is_dir()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names in the folder, sorted; empty for a file."""
        return tuple(sorted(path.name for path in self.path.iterdir())) if self.is_folder else ()

    @cached_property
    def has_folders(self) -> bool:
        """Whether there are folders in the folder."""
        return any((self.path / name).is_dir() for name in self.names)


class CheckpointFormat(ABC):
    """A kind of checkpoint on disk.

    Attributes:
        name: on the command line, in manifests and in reports.
        evidence: the files by which it is detected, for the error if no format is.
        suffixes: the endings of the names of its files.
        capabilities: of new checkpoints; a format with neither `WHOLE` nor `SHARDS` is read only.
        own_metadata: keys of text metadata that belong to the format, not to the user.
        carries_weights: whether files of weights in other formats, such as Megatron's
            `common.pt`, are part of its checkpoints and carried along.
        training: the style of names in which it stores training state
            (`reshard.checkpoint.training.state`), such as `reshard`; None if it stores any names.
        single_suffixes: the endings of names of targets that are a single file instead of a folder.
        written_for: the program for whose ranks it is made (`--for`), or None.
        takes_source_sharding: whether a user can specify the shardings of its tensors
            (`open_sharded`).
    """

    name: str
    evidence: str
    suffixes: ClassVar[tuple[str, ...]] = ()
    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    own_metadata: ClassVar[frozenset[str]] = frozenset()
    carries_weights: ClassVar[bool] = False
    training: ClassVar[str | None] = None
    single_suffixes: ClassVar[tuple[str, ...]] = ()
    written_for: ClassVar[str | None] = None
    takes_source_sharding: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """Define old names of attributes under their new names, with a warning."""
        super().__init_subclass__()
        for old, new in _RENAMED.items():
            if old in vars(cls):
                warnings.warn(
                    f"{cls.__module__}.{cls.__qualname__}.{old} is now {new}",
                    DeprecationWarning,
                    stacklevel=2,
                )
                setattr(cls, new, vars(cls)[old])
        detect = vars(cls).get("detect")
        if "path" in getattr(getattr(detect, "__code__", None), "co_varnames", ())[:2]:
            warnings.warn(
                f"{cls.__module__}.{cls.__qualname__}.detect(path) is now "
                "detect(listing); the path is `listing.path`",
                DeprecationWarning,
                stacklevel=2,
            )
            # Type checkers refuse an assignment to a method.
            setattr(cls, "detect", _detect_by_path(vars(cls)["detect"]))  # noqa: B010

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of an old name, with a warning."""
        if name not in _RENAMED:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        new = _RENAMED[name]
        warnings.warn(f"{name} of a format is now {new}", DeprecationWarning, stacklevel=2)
        return getattr(self, new)

    @property
    def is_written(self) -> bool:
        """Whether the format can be written."""
        return not self.capabilities.isdisjoint({Capability.WHOLE, Capability.SHARDS})

    @property
    def shards_itself(self) -> bool:
        """Whether the format determines the layouts of a new checkpoint (`assign_layouts`)."""
        return type(self).assign_layouts is not CheckpointFormat.assign_layouts

    @abstractmethod
    def detect(self, listing: Listing) -> bool:
        """Return whether a checkpoint of this format is at a path, an existing file or folder.

        It examines names, and the first bytes of files if names are not sufficient.
        """

    @abstractmethod
    def open(self, path: Path) -> Checkpoint:
        """Describe the checkpoint at `path`, which was detected. Only headers are read.

        Raises:
            CheckpointError: a file that is missing.
            FormatError: a file that is damaged, or not of its format.
            CoverageError: shards that do not cover their tensors.
        """

    def open_with_manifest(self, folder: Path, manifest: Manifest) -> Checkpoint:
        """Describe a checkpoint that reshard wrote, with the digests of its manifest.

        Raises:
            CheckpointError: files that are not those that were written.
            FormatError: files that contradict the manifest.
        """
        return check_against_manifest(self.open(folder), manifest)

    def find_read_names(self, names: Collection[str]) -> Mapping[str, str]:
        """Map names of tensors as they were written to their names after `open`.

        A format whose files have names of their own may read a tensor under another name than the
        name under which it was written. Names that stay the same may be left out.
        """
        return {}

    def open_sharded(self, path: Path, sharding: SourceSharding) -> Checkpoint:
        """Describe a checkpoint whose files do not specify the shardings of its tensors.

        Raises:
            UsageError: files that specify them, as in most formats.
        """
        raise UsageError(
            f"checkpoints of format {self.name} specify how their tensors are sharded; leave "
            "out the source's mesh, rules and recipe"
        )

    def drops_copies(self, checkpoint: Checkpoint) -> bool:
        """Return whether the program that wrote a checkpoint stores a single replica of shards."""
        return False

    def has_file(self, name: str) -> bool:
        """Return whether a file of that name belongs to checkpoints of this format."""
        return name.endswith(self.suffixes)

    def is_own_value(self, name: str, value: Any) -> bool:
        """Return whether a plain value is the format's own, and not part of the saved state.

        Examples are defaults of files, and how the ranks shared the work. Comparisons leave them
        out.
        """
        return False

    def own_files(self, checkpoint: Checkpoint) -> Collection[str]:
        """Return the further files of a checkpoint, which a conversion does not copy.

        A new checkpoint gets new files (`final_files`).
        """
        return ()

    def copies(self, checkpoint: Checkpoint) -> Mapping[str, tuple[str, DType]]:
        """Return the additional tensors of a new checkpoint that are copies of other tensors.

        Args:
            checkpoint: in the names and dtypes of the target.

        Returns:
            For each name, the name of the copied tensor, and the dtype of the copy.
        """
        return {}

    def assign_layouts(
        self, checkpoint: Checkpoint, mesh: DeviceMesh | None, ranks: int
    ) -> Mapping[str, Layout] | None:
        """Return the layouts of all tensors if the format determines them, such as flat partitions.

        Returns None, as here, if rules, a recipe or a strategy specify the shardings.

        Args:
            checkpoint: in the names and dtypes of the target.
            mesh: of the target, or None for a number of ranks, and for whole tensors.
            ranks: the number of ranks.

        Raises:
            UsageError: a mesh with axes over which the format does not shard.
        """
        return None

    def plan_write(self, new: NewCheckpoint) -> WritePlan:
        """Plan the files of a new checkpoint, and the file range of each shard.

        Raises:
            UsageError: contents that the format cannot store, such as a dtype.
            RecipeError: layouts that it cannot store.
        """
        raise UsageError(
            f"checkpoints of format {self.name} are read only; choose another --format"
        )

    def final_files(self, write_plan: WritePlan) -> Iterator[tuple[str, bytes]]:
        """Return the files that are written after all tensors, such as an index: name, content."""
        return iter(())


def _detect_by_path(detect: Callable[[Any, Path], bool]) -> Callable[[Any, Listing | Path], bool]:
    """Adapt a `detect` that takes a path, as in plug-ins of the previous version."""

    def detect_listing(self: Any, listing: Listing | Path) -> bool:
        return detect(self, listing.path if isinstance(listing, Listing) else listing)

    return detect_listing


def check_against_manifest(checkpoint: Checkpoint, manifest: Manifest) -> Checkpoint:
    """Add the digests of its manifest to a checkpoint, which must have the same contents.

    Raises:
        CheckpointError: files that are not those that were written.
        FormatError: tensors that differ from the manifest's.
    """
    folder = checkpoint.folder
    # An empty file, as a rank without tensors has, may be in no metadata.
    written = {file.name: file.size_bytes for file in manifest.files if file.size_bytes}
    present = {file.name: file.size_bytes for file in checkpoint.files if file.size_bytes}
    # Files first: if sizes differ, so do the files, whatever their headers contain.
    for name in sorted({*written, *present}):
        if written.get(name) != present.get(name):
            raise CheckpointError(
                f"{folder / name} has {present.get(name, 'no')} bytes, the manifest says "
                f"{written.get(name, 'none')}; the files were replaced after the checkpoint was "
                f"written. If that was meant, delete {folder / MANIFEST_NAME}"
            )
    if {*checkpoint.tensors} != {*manifest.tensors}:
        name = min({*checkpoint.tensors} ^ {*manifest.tensors})
        raise FormatError(
            f"tensor {name!r} is {'not ' if name not in checkpoint.tensors else ''}in the files of "
            f"{folder}, other than the manifest says"
        )
    tensors, described = TensorColumns.of(checkpoint.tensors), manifest.tensors
    rows = described.rows(tensors.names)
    pairs, first, _ = find_distinct(np.column_stack([tensors.kind, described.kind[rows]]))
    for (number, other), row in zip(pairs.tolist(), first.tolist(), strict=True):
        found_kind, kind = tensors.kinds[number], described.kinds[other]
        if (found_kind.dtype, found_kind.layout.shape) != (kind.dtype, kind.layout.shape):
            raise FormatError(
                f"tensor {tensors.names[row]!r} in {folder} is {found_kind.dtype.name} "
                f"{list(found_kind.layout.shape)}, the manifest says {kind.dtype.name} "
                f"{list(kind.layout.shape)}"
            )
    digests = None if described.digests is None else described.digests.take(rows)
    tensors = tensors.with_digests(digests)
    items = {
        name: item.replace(digest=manifest.items.get(name))
        for name, item in checkpoint.items.items()
    }
    return checkpoint.replace(tensors=tensors, items=items)
