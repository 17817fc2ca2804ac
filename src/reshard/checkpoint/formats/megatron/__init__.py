"""Megatron's checkpoints, with a folder for each step that was saved.

    latest_checkpointed_iteration.txt     3000, or `release`
    iter_0002000/
    iter_0003000/

    torch_dist/         checkpoints of `dist_checkpointing`
    legacy/             a folder for each model-parallel rank
    fsdp_dtensor        checkpoints of Megatron FSDP
    modules             names, order and tensor parallelism of the parameters of modules
    common_state        arguments, parameter groups, steps
    rank_blocks         blocks of ranks, in tensors and in flat buffers of optimizer state

Neither Megatron nor PyTorch is imported.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.formats.format import CheckpointFormat, Listing
from reshard.checkpoint.storage.filesystem import read_whole
from reshard.errors import CheckpointError

TRACKER_NAME = "latest_checkpointed_iteration.txt"
_RELEASE = "release"


def iteration_name(iteration: int) -> str:
    """Return the name of the folder of a step.

    >>> iteration_name(2000)
    'iter_0002000'
    """
    return f"iter_{iteration:07d}"


def find_iteration(path: Path) -> Path | None:
    """Return the folder of the last step if `path` has several, else `path`; None if it is not
    a folder.

    Raises:
        CheckpointError: a last step whose folder is missing, or a file that does not name a step.
    """
    if not path.is_dir():
        return None
    tracker = path / TRACKER_NAME
    try:
        text = read_whole(tracker)[:64].decode().strip()
    except FileNotFoundError:
        return path
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {tracker}: {error}") from error
    if text != _RELEASE and not (text.isascii() and text.isdigit()):
        raise CheckpointError(
            f"{tracker} has {text!r}, expected the number of the last step, or {_RELEASE!r}; name "
            "the folder of a step instead"
        )
    folder = path / (text if text == _RELEASE else iteration_name(int(text)))
    if not folder.is_dir():
        others = sorted(entry.name for entry in path.glob("iter_*") if entry.is_dir())
        raise CheckpointError(
            f"{folder} is missing, the last step by {tracker.name}; "
            + (f"there is {others[-1]}, name that" if others else "fetch it again")
        )
    return folder


class MegatronFormat(CheckpointFormat):
    """A format with a folder for each step, which Megatron's names and values are in."""

    training = "megatron"

    @abstractmethod
    def detect_step(self, folder: Path) -> bool:
        """Return whether the folder of a step is of this format."""

    @abstractmethod
    def read_step(self, folder: Path) -> Checkpoint:
        """Describe the checkpoint in the folder of a step."""

    def detect(self, listing: Listing) -> bool:
        """Return whether it is the folder of a step, or of all steps, of this format."""
        folder = find_iteration(listing.path)
        return folder is not None and self.detect_step(folder)

    def open(self, path: Path) -> Checkpoint:
        """Describe the checkpoint of the requested step, or of the last."""
        return self.read_step(find_iteration(path) or path)

    def find_read_names(self, names: Collection[str]) -> Mapping[str, str]:
        """Name norms and experts as the reader does, by whichever layers they were written."""
        from reshard.checkpoint.formats.megatron.modules import find_read_names

        return find_read_names(names)

    def is_own_value(self, name: str, value: Any) -> bool:
        """Return whether Megatron's files have such a value of their own."""
        from reshard.checkpoint.formats.megatron.common_state import is_own_value

        return is_own_value(name, value)
