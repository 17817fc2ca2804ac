"""Names of the files of a distributed checkpoint of PyTorch, and of the format."""

from __future__ import annotations

import re

FORMAT_NAME = "torch-dcp"
METADATA_NAME = ".metadata"
SUFFIX = ".distcp"
_FILE_NAME = re.compile(r"__(\d+)_(\d+)\.distcp")


def data_file_name(rank: int) -> str:
    """The name of a rank's file.

    >>> data_file_name(3)
    '__3_0.distcp'
    """
    return f"__{rank}_0{SUFFIX}"


def rank_of_file(name: str) -> int | None:
    """The rank in a file name, or None.

    >>> rank_of_file("__12_1.distcp"), rank_of_file("weights.distcp")
    (12, None)
    """
    match = _FILE_NAME.fullmatch(name)
    return int(match[1]) if match and len(match[1]) < 8 else None
