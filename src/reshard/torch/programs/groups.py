"""Which process groups do a program's steps need, and how are they made?

A step works within groups of a mesh: `x` of a mesh `x=2, y=2` has the groups 0, 2 and 1, 3. Making
a process group is a collective of all ranks of the job, members or not, so all of them make all
groups of a step, in one order. A group is made once, and kept as long as the job has its own.

::

    step 0 over x     {0, 2}  {1, 3}       every rank makes these two,
    step 1 over y     {0, 1}  {2, 3}       then these; a rank is in one of each step

Within a group that is not of all ranks, others do not call, and nothing can be made: there is then
none. torch can make groups by their members alone, but names them after the number of groups that
a process has, so that members with other groups beside wait for each other for ever.

The ranks of a process group are numbered in rising order, whatever the mesh says: go by global
ranks.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable

import torch.distributed as dist

_Key = tuple[dist.ProcessGroup, tuple[int, ...]]
_MADE: dict[_Key, dist.ProcessGroup | None] = {}


def process_group(
    whole: dist.ProcessGroup | None, groups: Iterable[tuple[int, ...]], rank: int
) -> dist.ProcessGroup | None:
    """The process group of a rank among groups that share none, made where there is none yet.

    All ranks of `whole` call this, with all groups of each step, in the order of the steps.

    Args:
        whole: a process group of all ranks that call this; that of all ranks when None.
        groups: global ranks.
        rank: this one.

    Returns:
        The process group of the rank's group; None where it is in none, or alone, or where `whole`
        is not all ranks.
    """
    everyone = dist.group.WORLD
    if whole is not None and whole is not everyone:
        return None
    _forget_ended()
    found = None
    for ranks in groups:
        members = tuple(sorted(ranks))
        if len(members) == dist.get_world_size():
            made: dist.ProcessGroup | None = everyone
        elif len(members) < 2:
            continue
        elif (everyone, members) in _MADE:
            made = _MADE[everyone, members]
        else:
            made = dist.new_group(list(members), timeout=_timeout(everyone))
            made = made if rank in members else None
            _MADE[everyone, members] = made
        found = made if rank in members else found
    return found


def _timeout(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """How long a group waits for a rank: its parts wait as long."""
    found = group._get_backend(group._device_types[0]).options._timeout
    return found if isinstance(found, datetime.timedelta) else None


def _forget_ended() -> None:
    """Drop groups of a job that has ended in this process."""
    for everyone, members in list(_MADE):
        if everyone is not dist.group.WORLD:
            del _MADE[everyone, members]
