"""Megatron's checkpoints, with a folder for each step that was saved.

    latest_checkpointed_iteration.txt     3000, or `release`
    iter_0002000/
    iter_0003000/

    torch_dist/         checkpoints of `dist_checkpointing`
    legacy/             a folder for each model-parallel rank
    fsdp_dtensor        checkpoints of Megatron FSDP
    parameters          names, order and tensor parallelism of a model's parameters
    common_state        arguments, parameter groups, steps
    rank_blocks         blocks of ranks, in tensors and in flat buffers of optimizer state

Neither Megatron nor PyTorch is imported.
"""

from __future__ import annotations

from pathlib import Path

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
        text = tracker.read_bytes()[:64].decode().strip()
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
