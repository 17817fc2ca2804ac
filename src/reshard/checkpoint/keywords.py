"""The types of keywords, such as those of `convert` and `load`.

Only type checkers and editors use this module, which is not imported at run time.
`tools/options_page.py` writes it from the fields of `reshard.checkpoint.options`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    import os
    import threading
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from reshard.checkpoint.blocks.block_io import OpenFiles
    from reshard.checkpoint.naming.renaming import Names
    from reshard.checkpoint.options import LayoutFile, RecipeName, Target
    from reshard.checkpoint.processes import Processes
    from reshard.checkpoint.storage.local_files import SourceFile
    from reshard.checkpoint.storage.threads import ProgressFunction
    from reshard.recipes.rules import Rule


class LayoutArguments(TypedDict, total=False):
    """The keywords of layouts and names."""

    to: Target | None
    mesh_order: str | Sequence[str] | None
    rules: Iterable[str | Rule]
    recipe: RecipeName | None
    options: Mapping[str, str] | Iterable[str]
    strategy: str | None
    source_names: Names | None
    target_names: Names | None
    layout: LayoutFile | None
    allow: Iterable[str]
    include: Iterable[str]
    exclude: Iterable[str]
    strip_prefix: Iterable[str]
    rename: Iterable[str]
    select: str | None


class RequestArguments(LayoutArguments, total=False):
    """The keywords of a `ConversionRequest`."""

    format: str | None
    replicas: str | None
    most_file_bytes: int | None
    dtype: str | None
    dequantize: bool
    quantize: str | None
    training: str | None
    adapters: Iterable[str | os.PathLike[str]]
    source_layout: LayoutFile | None
    check_copies: str | None


class RunArguments(TypedDict, total=False):
    """The keywords of `RunOptions`."""

    extra_bytes: int
    threads: int | None
    overwrite: bool
    discard_others: bool
    restart: bool
    progress: ProgressFunction | None
    sync_bytes: int
    processes: Processes | None
    stop: threading.Event | None
    staging: str | os.PathLike[str] | None


class ConvertArguments(RequestArguments, RunArguments, total=False):
    """The keywords of `convert`."""


class LoadArguments(LayoutArguments, total=False):
    """The keywords of `load`."""

    out: Mapping[str, NDArray[Any]] | None
    threads: int | None
    files: OpenFiles[SourceFile] | None
    dtype: str | None
    readers_on_host: int
    count_read: Callable[[int], None] | None
    progress: ProgressFunction | None
    stop: threading.Event | None


class CompareArguments(TypedDict, total=False):
    """The keywords of `compare`."""

    left_names: Names | None
    right_names: Names | None
    recipe: RecipeName | None
    dtype: str | None
    adapters: Iterable[str | os.PathLike[str]]
    source_layout: LayoutFile | None
    include: Iterable[str]
    exclude: Iterable[str]
    strip_prefix: Iterable[str]
    rename: Iterable[str]
    select: str | None
    threads: int | None
    progress: ProgressFunction | None


class DiffArguments(TypedDict, total=False):
    """The keywords of `diff`."""

    compression: str | None
    overwrite: bool
    trust_digests: bool
    extra_bytes: int
    threads: int | None
    progress: ProgressFunction | None


class PretrainedArguments(TypedDict, total=False):
    """The keywords of `plan_for_pretrained`."""

    dtype: str | None
    adapters: Iterable[str | os.PathLike[str]]
    source_layout: LayoutFile | None
    allow: Iterable[str]
    include: Iterable[str]
    exclude: Iterable[str]
    strip_prefix: Iterable[str]
    rename: Iterable[str]
    select: str | None
