"""Options of a refit: their types, and their validation before ranks wait.

A rank that raised an error alone would leave others waiting, so all ranks' agreement reports
problems.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch.distributed as dist

from reshard.dtypes import dtype as as_dtype
from reshard.errors import ReshardError, UsageError
from reshard.topology import Topology
from reshard.torch.exchange.changes import UNITS, ChangedOnly
from reshard.torch.models.naming import Naming, resolve_tie
from reshard.torch.refitting.matching import CastOption
from reshard.torch.refitting.methods import RefitMethod
from reshard.torch.refitting.planning import Buckets, Planning
from reshard.torch.refitting.transforms import QUANTIZATIONS, Transform


class RefitOptions(TypedDict, total=False):
    """The keyword arguments of `refit`, which are those of `Refit.prepare`; see there."""

    source_names: Naming | None
    target_names: Naming | None
    ties: Mapping[str, str] | None
    stacks: Mapping[str, str] | None
    num_experts: int | None
    cast: CastOption
    strict: bool
    source_offset: int | None
    target_offset: int | None
    transforms: Mapping[str, Transform] | None
    quantize: str | None
    planning: Planning
    method: RefitMethod
    topology: Topology | None
    extra_bytes: int
    check_replicas: bool
    buckets: Buckets
    changed_only: ChangedOnly
    group: dist.ProcessGroup | None


def validate_tables(
    ties: object, transforms: object, extra_bytes: object, check_replicas: object
) -> str | None:
    """Return why options of this rank are invalid, or None."""
    if not isinstance(check_replicas, bool):
        return f"check_replicas={check_replicas!r}; it is True or False"
    if not isinstance(ties, Mapping) or not isinstance(transforms, Mapping):
        return f"ties={ties!r}, transforms={transforms!r}; give tables by name"
    for name, transform in transforms.items():
        if not isinstance(transform, Transform):
            return f"transforms={{{name!r}: {transform!r}}}; give a Transform, such as Cast('int8')"
    if isinstance(extra_bytes, bool) or not isinstance(extra_bytes, int):
        return f"extra_bytes={extra_bytes!r}; give a whole number of bytes"
    try:
        for name in ties:
            resolve_tie(name, ties)
    except UsageError as error:
        return str(error)
    return None


def validate_buckets(buckets: object) -> str | None:
    """Return why buckets are invalid, or None.

    >>> validate_buckets({"up": 0}), validate_buckets("auto")
    (None, None)
    """
    numbers = buckets.values() if isinstance(buckets, Mapping) else [buckets]
    minimum = 0 if isinstance(buckets, Mapping) else 1
    if buckets in (None, "auto") or all(type(n) is int and n >= minimum for n in numbers):
        return None
    return (
        f"buckets={buckets!r}; give a number of bytes above 0, 'auto', a table of numbers, or None"
    )


def validate_changed_only(changed_only: object) -> str | None:
    """Return why `changed_only` is invalid, or None."""
    if isinstance(changed_only, bool) or changed_only in UNITS:
        return None
    return f"changed_only={changed_only!r}; it is True, False, 'elements' or 'blocks'"


def validate_quantize(quantize: object) -> str | None:
    """Return why `quantize` is invalid, or None.

    >>> validate_quantize("fp8")
    "quantize='fp8'; it is one of 'fp8-block128', or None"
    """
    if quantize is None or (isinstance(quantize, str) and quantize in QUANTIZATIONS):
        return None
    return f"quantize={quantize!r}; it is one of {', '.join(map(repr, QUANTIZATIONS))}, or None"


def validate_cast(cast: object) -> str | None:
    """Return why `cast` is invalid, or None.

    >>> validate_cast({"up": "bfloat16", "down": False}), validate_cast(True)
    (None, None)
    >>> validate_cast("bfloat")
    "cast='bfloat'; give True, False, or a type such as 'bfloat16', for all or in a table by name"
    """
    for dtype in cast.values() if isinstance(cast, Mapping) else [cast]:
        try:
            if not isinstance(dtype, bool):
                as_dtype(dtype)
        except ReshardError:
            return (
                f"cast={cast!r}; give True, False, or a type such as 'bfloat16', for all or in a "
                "table by name"
            )
    return None


def validate_names(stacks: object, *offsets: object) -> str | None:
    """Return why names or rank offsets are invalid, or None."""
    if not isinstance(stacks, Mapping) or not all(isinstance(name, str) for name in stacks):
        return f"stacks={stacks!r}; give a table of names, such as {{'*.up': '*.{{}}.up'}}"
    for offset in offsets:
        if offset is None:
            continue
        if isinstance(offset, bool) or not isinstance(offset, int) or offset < 0:
            return f"an offset of {offset!r}; the first rank of a side is a whole number from 0 up"
    return None


def sort_table(given: Any) -> Any:
    """Return a table in an order that is equal on all ranks; other values unchanged."""
    return sorted(given.items(), key=str) if isinstance(given, Mapping) else given
