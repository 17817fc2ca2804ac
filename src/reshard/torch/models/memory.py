"""Memory of a model's tensors: which of them lie in one place.

A target must not lie where a source is, and no two targets may share memory, but for names of one
tensor that are declared tied. By their first and last bytes most are apart; where these reach into
one another, as columns of one matrix do, elements are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from reshard.errors import RunError, ShardError
from reshard.torch.loaders.strided_overlap import StridedRegion, find_meetings
from reshard.torch.models.naming import tied_root
from reshard.torch.models.parameters import LocalTensors
from reshard.torch.sides import check_writable


def check_memory(before: LocalTensors, after: LocalTensors, ties: Mapping[str, str]) -> None:
    """Note problems of a target's memory, and which of its names are of one tensor.

    A target must not lie where a source is. Targets that are one tensor must be declared tied;
    they are filled once. Others must not share memory.
    """
    problems: list[str] = []
    alias_of: dict[str, str] = {}
    at: dict[tuple[Any, ...], str] = {}
    for name, local in after.locals.items():
        try:
            check_writable(local, None)
        except ShardError as error:
            problems.append(f"{name}: {error}")
        # One tensor under two names is written once if these are tied, and refused otherwise.
        key = (local.device, local.data_ptr(), tuple(local.shape), local.stride())
        other = at.setdefault(key, name) if local.numel() else name
        if other != name and tied_root(name, ties) == tied_root(other, ties):
            alias_of[name] = other
        elif other != name:
            problems.append(
                f"{name}: one tensor with {other} in the target; if it is to be, declare "
                f"ties={{{name!r}: {other!r}}}"
            )
    problems += _find_overlaps(
        {name: local for name, local in after.locals.items() if name not in alias_of}
    )
    shared = _find_shared(before.locals, after.locals)
    if shared:
        problems.append(f"{shared} share memory; a target must not lie where a source is")
    after.roster = replace(
        after.roster,
        entries=after.roster.columns.with_aliases(alias_of),
        problems=(*after.roster.problems, *problems),
    )


def _find_shared(sources: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> str:
    """The first source and target that share memory; empty where none do."""
    # A sweep by address: for each side, how far what began so far reaches.
    spans = sorted(
        (str(tensor.device), *_find_addresses(tensor), number, name)
        for number, side in enumerate((sources, targets))
        for name, tensor in side.items()
        if tensor.numel()
    )
    reach: list[tuple[str, int, str]] = [("", 0, "")] * 2
    for device, begin, end, number, name in spans:
        where, furthest, holder = reach[1 - number]
        if where == device and begin < furthest:
            return f"{name} and {holder}"
        if reach[number][:2] < (device, end):
            reach[number] = (device, end, name)
    return ""


def _find_addresses(tensor: torch.Tensor) -> tuple[int, int]:
    steps = sum((n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (1 + steps) * tensor.element_size()


def _find_overlaps(targets: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """What is wrong with targets that share some of their memory."""
    spans = sorted(
        (str(tensor.device), *_find_addresses(tensor), name)
        for name, tensor in targets.items()
        if tensor.numel()
    )
    reaching: list[tuple[str, int, str]] = []
    for device, begin, end, name in spans:
        reaching = [one for one in reaching if one[0] == device and one[1] > begin]
        for _, _, other in reaching:
            if _share_elements(targets[name], targets[other]):
                yield (
                    f"{name} and {other} of the target share some of their memory; give each "
                    "memory of its own"
                )
                break
        reaching.append((device, end, name))


def _share_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    first = min(one.data_ptr(), other.data_ptr())
    regions = [
        StridedRegion(
            tensor.data_ptr() - first,
            (*tensor.shape, tensor.element_size()),
            (*(stride * tensor.element_size() for stride in tensor.stride()), 1),
        )
        for tensor in (one, other)
    ]
    try:
        return any(True for _ in find_meetings(*regions))
    except RunError:
        # Too large to compare by elements, and of odd strides: their spans decide.
        return True
