"""One file of PyTorch's own tests, with the storage of reshard in the place of PyTorch's.

Arguments: the file, then those of its test runner. The ranks that the tests start are new
processes, which import this file first: the classes are replaced in each.
"""

from __future__ import annotations

import importlib
import sys
import unittest
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _storage_utils, filesystem
from torch.distributed.checkpoint import state_dict_loader as loader
from torch.distributed.checkpoint import state_dict_saver as saver

from reshard.torch import StorageReader, StorageWriter

theirs = dcp.FileSystemWriter


class Reader(StorageReader):
    """A reader with the arguments of `FileSystemReader`."""

    def __init__(self, path: Any, _extension_registry: Any = None, **how: Any) -> None:
        # What the registry names is known here without it, or not at all.
        super().__init__(path, **how)


class Writer(StorageWriter):
    """A writer with the arguments of `FileSystemWriter`.

    Extensions of streams are not written by reshard: with such, it is PyTorch's own writer.
    """

    def __new__(cls, *arguments: Any, _extensions: Any = None, **how: Any) -> Any:
        if _extensions:
            return theirs(*arguments, _extensions=_extensions, **how)
        return super().__new__(cls)

    def __init__(
        self,
        path: Any,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 0,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Any = None,
    ) -> None:
        super().__init__(
            path, sync_files=sync_files, thread_count=thread_count, overwrite=overwrite
        )


def replace_theirs() -> None:
    """Put the classes in the place of PyTorch's, wherever it looks them up."""
    for module in (dcp, filesystem, _storage_utils, loader, saver):
        for name, ours in (("FileSystemReader", Reader), ("FileSystemWriter", Writer)):
            if hasattr(module, name):
                setattr(module, name, ours)


def main(path: str, *arguments: str) -> None:
    replace_theirs()
    file = Path(path)
    sys.path.insert(0, str(file.parent))
    sys.argv = [path, *arguments]
    module = importlib.import_module(file.stem)
    from torch.testing._internal import common_utils

    # The runner looks for tests in `__main__`.
    tests = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, unittest.TestCase)
        and value.__module__ == file.stem
    }
    vars(sys.modules["__main__"]).update(tests)
    common_utils.run_tests()


if __name__ == "__main__":
    main(*sys.argv[1:])
