"""Copies of tensors that a format has beside those of a source, such as 16-bit weights.

A copy is another tensor of the target: in another element type it is computed, in the same one it
is read again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from reshard.checkpoint.changes.casts import CastTensor
from reshard.checkpoint.changes.planning import ChangedElements
from reshard.dtypes import DType
from reshard.errors import UsageError


def add_copies(
    changed: ChangedElements, copies: Mapping[str, tuple[str, DType]]
) -> ChangedElements:
    """A checkpoint with copies of its tensors: by the name of each, that of its source and a type.

    Raises:
        UsageError: a copy of what is computed itself.
    """
    if not copies:
        return changed
    old = changed.checkpoint
    tensors, computed = dict(old.tensors), dict(changed.computed)
    copied = set()
    for name, (source, dtype) in copies.items():
        if source in changed.computed:
            raise UsageError(
                f"{name!r} would be made of {source!r}, which is computed itself; convert in two "
                "steps, first without the new element type"
            )
        tensor = old.tensors[source]
        copied.add(source)
        tensors[name] = dataclasses.replace(tensor, name=name, dtype=dtype, digest=None)
        if dtype is not tensor.dtype:
            computed[name] = CastTensor(tensor, dtype)
    # What is copied is read more than once.
    checksums = tuple(
        dataclasses.replace(one, is_read_once=one.is_read_once and one.tensor not in copied)
        for one in old.checksums
    )
    checkpoint = dataclasses.replace(old, tensors=tensors, checksums=checksums)
    return dataclasses.replace(changed, checkpoint=checkpoint, computed=computed)
