"""Elements of engines' parameters that no file has: computed, cast, or all of one value.

A parameter is mostly copied. What is not, such as Mamba's `A = -exp(A_log)`, a router's bias in
float32 or the padding of a vocabulary, is made when it is first read, and kept in a file without a
name, beside which the rest of the parameter is read where it lies::

    rank-0/A     [computed ......]                    one region
    embed_tokens [copied, in model.safetensors][0 0]  the last rows

It is all in memory once, so there is a limit. What is computed is elementwise, by operations that
are known (`OPERATIONS`); anything else is refused by name.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.binding import View
from reshard.checkpoint.contents import Checkpoint
from reshard.checkpoint.storage.filesystem import reason
from reshard.checkpoint.storage.local_files import SourceFile
from reshard.dtypes import DType
from reshard.dtypes import dtype as as_dtype
from reshard.errors import RecipeError, RunError

# Of one parameter: more is no detail of it.
MOST_BYTES = 256 << 20


def _exponentiate(values: NDArray[Any]) -> NDArray[Any]:
    """As PyTorch has it where it is installed: its last bit may differ from NumPy's."""
    try:
        import torch
    except ImportError:
        found: NDArray[Any] = np.exp(values)
        return found
    return np.asarray(torch.exp(torch.from_numpy(np.ascontiguousarray(values))).numpy())


OPERATIONS: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "exp": _exponentiate,
    "neg": np.negative,
}


class MadeRegion(NamedTuple):
    """Elements of a parameter: those of `source` at `view`, with `steps` done to each in turn.

    Without a source they all are `value`. They begin at element `start` of the file.
    """

    start: int
    shape: tuple[int, ...]
    source: str | None
    view: View | None
    steps: tuple[str, ...] = ()
    value: float = 0.0


@dataclass(frozen=True)
class MadeFile:
    """The made elements of one parameter, as a file that is written when it is first read.

    Attributes:
        label: the parameter, in errors.
        dtype: of its elements.
        regions: one behind the other.
        checkpoint: the sources.
        source: a file of the checkpoint, the first that is read.
    """

    label: str
    dtype: DType
    regions: tuple[MadeRegion, ...]
    checkpoint: Checkpoint
    source: str

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return sum(int(np.prod(region.shape)) for region in self.regions)

    def expect_computable(self) -> None:
        """Raise MissingExtraError where an element type takes a package that is not installed."""
        for region in self.regions:
            if region.source is None:
                # Zeros are of every type.
                kinds = [] if region.value == 0 else [self.dtype]
            else:
                named = (step.removeprefix("to ") for step in region.steps if step[:3] == "to ")
                kinds = [self.dtype, self.checkpoint[region.source].dtype, *map(as_dtype, named)]
            for kind in kinds:
                _ = kind.numpy

    def open(self, path: Path, source: SourceFile, scratch: Path | None) -> SourceFile:
        """The file for reading, made in the folder `scratch`."""
        content = b"".join(
            np.ascontiguousarray(self._make(region)).tobytes() for region in self.regions
        )
        return _FileInMemory(path, content, scratch)

    def _make(self, region: MadeRegion) -> NDArray[Any]:
        if region.source is None:
            return _fill(region.shape, region.value, self.dtype)
        from reshard.checkpoint.loading.arrays import read_tensor

        whole = read_tensor(self.checkpoint, region.source).reshape(-1)
        view = region.view or View.row_major(region.shape)
        values = whole[view.positions(region.shape)]
        for step in region.steps:
            values = apply_step(values, step)
        return values if values.dtype == self.dtype.numpy else values.astype(self.dtype.numpy)


def _fill(shape: tuple[int, ...], value: float, dtype: DType) -> NDArray[Any]:
    if value == 0 and not np.signbit(value):
        # All types have zeros of this kind, those that NumPy does not have included.
        return np.zeros(shape, dtype=dtype.storage)
    return np.full(shape, value).astype(dtype.numpy)


class _FileInMemory(SourceFile):
    """A file without a name, with bytes that were made; it reads nothing of its own."""

    def __init__(self, path: Path, content: bytes, scratch: Path | None) -> None:
        try:
            self._scratch = tempfile.TemporaryFile(dir=scratch, buffering=0)  # noqa: SIM115
            view = memoryview(content)
            while view:
                view = view[self._scratch.write(view) :]
            super().__init__(path, descriptor=self._scratch.fileno())
        except OSError as error:
            raise RunError(f"cannot make {path} in {scratch}: {reason(error)}") from error

    def check_unchanged(self) -> None:
        """Do nothing: a file without a name cannot change."""

    def close(self) -> None:
        """Close the file, which removes it."""
        super().close()
        self._scratch.close()


def apply_step(values: NDArray[Any], step: str) -> NDArray[Any]:
    """Elements after one step, such as `"to float32"` or `"exp"`.

    >>> apply_step(np.array([0.0, 1.0], np.float32), "neg").tolist()
    [-0.0, -1.0]
    """
    if step.startswith("to "):
        return values.astype(as_dtype(step.removeprefix("to ")).numpy)
    return OPERATIONS[step](values)


def check_steps(label: str, steps: Sequence[str]) -> None:
    """Raise RecipeError for operations that are not known."""
    unknown = [one for one in steps if one not in OPERATIONS and not one.startswith("to ")]
    if unknown:
        raise RecipeError(
            f"{label} is computed by {', '.join(steps)}, of which {', '.join(unknown)} is not "
            f"known here (known: a change of type, {', '.join(OPERATIONS)}); let the engine load "
            "the checkpoint as it is"
        )
