"""Memory of a model's tensors: where it is, and which of them lie in one place.

A source that is listed again, as for another engine, is what it was where its tensors are the same
objects, described alike, and their memory is where it was and as it was (`given_columns`).

A target must not lie where a source is, and no two targets may share memory, but for names of one
tensor that are declared tied. Sources may; of two that are one tensor it is enough to use one. By
their first and last bytes most are apart; where these reach into one another, as columns of one
matrix do, elements are compared.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from typing import Any

import numpy as np
import torch

from reshard.errors import RunError, ShardError
from reshard.runs import IntArray
from reshard.torch.endpoint import check_writable, find_addresses, list_locals
from reshard.torch.fully_sharded import find_groups, find_storage, list_gathered
from reshard.torch.loaders.strided_overlap import StridedRegion, find_overlaps
from reshard.torch.models.given_columns import GivenColumns, HeldMemory
from reshard.torch.models.naming import tied_root
from reshard.torch.models.rosters import Roster

_DTYPE = operator.attrgetter("dtype")
_IS_DENSE: Callable[[torch.Tensor], bool] = torch.Tensor.is_contiguous
_STRIDES: Callable[[torch.Tensor], tuple[int, ...]] = torch.Tensor.stride
# Of tensors' elements: types, numbers, whether they are dense, and the strides where they are not.
_Looks = tuple[list[torch.dtype], list[int], list[bool], list[tuple[int, ...]]]
# A tensor's device, first byte, the byte behind its last, and its name.
_Span = tuple[str, int, int, str]


@dataclass(eq=False)
class LocalTensors:
    """A rank's tensors by common name, and what it tells the others of them.

    `tensors` are the objects that the model has, `locals` their memory on this rank. `described`
    is all that the listing follows from, but for where memory lies; None where more does. `columns`
    are what was given, where it was listed by them.
    """

    roster: Roster
    tensors: dict[str, torch.Tensor]
    locals: dict[str, torch.Tensor]
    described: object = None
    columns: GivenColumns | None = None

    def __post_init__(self) -> None:
        held = list_locals(self.tensors.values())
        # What a DTensor has is asked anew; each run asks for all.
        self._own = held if all(map(operator.is_, held, self.tensors.values())) else None
        known = self.columns.addresses if self.columns is not None else None
        self._addresses = known or list(map(torch.Tensor.data_ptr, held))
        self._looks = _list_looks(held)

    @cached_property
    def own_memory(self) -> HeldMemory:
        """Where `locals` lie."""
        if self.columns is None:
            return HeldMemory.of(list(self.locals.values()))
        held = self.columns.held_memory
        if len(self.locals) == len(self.tensors):
            return held
        are_own = list(map(self.locals.__contains__, self.tensors))
        return HeldMemory(*(list(compress(column, are_own)) for column in held))

    def list_changes(self) -> Iterator[tuple[str, str]]:
        """Tensors whose memory is not what it was when they were listed, and how it differs."""
        held = list_locals(self.tensors.values()) if self._own is None else self._own
        now = list(map(torch.Tensor.data_ptr, held))
        # Of very many tensors none has changed, nearly always.
        if now != self._addresses:
            for name, address, found in zip(self.tensors, self._addresses, now, strict=True):
                if found != address:
                    yield name, f"is at another address than when it was prepared ({address:#x})"
        looks = _list_looks(held)
        if looks != self._looks:
            rows = zip(self.tensors, _list_rows(self._looks), _list_rows(looks), strict=True)
            for name, before, after in rows:
                if before != after:
                    yield name, f"has {_say(*after)}, and had {_say(*before)} when it was prepared"

    def is_still(
        self, tensors: Sequence[torch.Tensor], described: object, addresses: list[int]
    ) -> bool:
        """Whether these tensors, which are described so, would be listed as the same."""
        return (
            len(tensors) == len(self.tensors)
            and all(map(operator.is_, tensors, self.tensors.values()))
            and addresses == self._addresses
            and described == self.described
        )

    @cached_property
    def spans(self) -> list[_Span]:
        """Where tensors with elements lie: their device, first and last byte, and name."""
        return _list_spans(self.locals, self.own_memory)

    @cached_property
    def shard_groups(self) -> tuple[Any, ...]:
        """The groups of FSDP's parameters that have any of the tensors."""
        return find_groups(frozenset(map(find_storage, self.tensors.values())) - {0})

    @cached_property
    def devices(self) -> set[torch.device]:
        """Those of all locals."""
        return {one.device for one in self.own_memory.firsts([*self.locals.values()]).values()}

    def list_gaps(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The locals that are not dense."""
        numbers, listed = self.own_memory.numbers, list(self.locals.values())
        firsts = self.own_memory.firsts(listed)
        loose = {number for number, first in firsts.items() if not first.is_contiguous()}
        if loose:
            yield from compress(self.locals.items(), map(loose.__contains__, numbers))

    @cached_property
    def own_roster(self) -> Roster:
        """The roster, with which names are of one tensor."""
        entries = self.roster.columns.with_aliases(_find_aliases(self.locals, self.spans))
        return replace(self.roster, entries=entries)


class KnownTensors:
    """Listings that somebody has, to be taken for what is listed again and is the same."""

    def __init__(self) -> None:
        # By the first tensor, and by the first object that was given: a tuple may have a tensor.
        self._by_first: weakref.WeakValueDictionary[int, LocalTensors] = (
            weakref.WeakValueDictionary()
        )

    def keep(self, found: LocalTensors) -> None:
        """Know a listing, if what it follows from is."""
        first = next(iter(found.tensors.values()), None)
        if first is not None and found.described is not None:
            self._by_first[id(first)] = found
            if found.columns is not None:
                self._by_first[id(found.columns.values[0])] = found

    def read_columns(self, values: Sequence[Any]) -> GivenColumns | None:
        """The columns of what is given, which are known where that is as it was."""
        known = self._by_first.get(id(values[0])) if values else None
        columns = known.columns if known is not None else None
        if columns is not None and columns.is_still(values):
            return columns
        return GivenColumns.of(values)

    def find(
        self, tensors: Sequence[torch.Tensor], described: object, addresses: list[int]
    ) -> LocalTensors | None:
        """The listing of these tensors, which are described so; None where they have changed."""
        known = self._by_first.get(id(tensors[0])) if tensors else None
        is_known = known is not None and known.is_still(tensors, described, addresses)
        return known if is_known else None


def _list_looks(tensors: Sequence[torch.Tensor]) -> _Looks:
    """What of tensors `t.data = ...` and `t.resize_()` may change in place, in columns."""
    numbers, dense = list(map(torch.Tensor.numel, tensors)), list(map(_IS_DENSE, tensors))
    # Strides of dense tensors follow from the rest, and take longer to ask for than all of it.
    strides = [] if all(dense) else [_STRIDES(one) for one in tensors if not one.is_contiguous()]
    return list(map(_DTYPE, tensors)), numbers, dense, strides


def _list_rows(looks: _Looks) -> Iterator[tuple[torch.dtype, int, tuple[int, ...] | None]]:
    """The same of each tensor; no strides of those that are dense."""
    dtypes, numbers, dense, strides = looks
    loose = iter(strides)
    for dtype, number, is_dense in zip(dtypes, numbers, dense, strict=True):
        yield dtype, number, None if is_dense else next(loose)


def _say(dtype: torch.dtype, number: int, strides: tuple[int, ...] | None) -> str:
    return f"{number} {'dense ' * (strides is None)}elements of {dtype}" + (
        "" if strides is None else f" with strides {strides}"
    )


def check_memory(
    before: LocalTensors, after: LocalTensors, ties: Mapping[str, str]
) -> tuple[Roster, Roster]:
    """The rosters of both, with problems of a target's memory, and names that are of one tensor.

    A target must not lie where a source is. Targets that are one tensor must be declared tied;
    they are filled once. Others must not share memory.
    """
    problems: list[str] = []
    alias_of: dict[str, str] = {}
    at: dict[tuple[str, int], list[str]] = {}
    sources, targets = before.spans, after.spans
    problems += [
        f"{name} of the target: a copy that FSDP gathered of its shards, which is freed with what "
        "is written into it; give the module itself, or take its parameters after reshard()"
        for name in list_gathered(after.tensors)
    ]
    for name, local in after.list_gaps():
        try:
            check_writable(local, None)
        except ShardError as error:
            problems.append(f"{name}: {error}")
    # Mostly each target has memory of its own: then nothing else is to be found.
    if not problems and _are_apart(sources, targets):
        return before.own_roster, after.roster
    for device, begin, _, name in targets:
        # One tensor under two names is written once if these are tied, and refused otherwise.
        there = at.setdefault((device, begin), [])
        local = after.locals[name]
        other = next((one for one in there if _lie_alike(local, after.locals[one])), None)
        if other is None:
            there.append(name)
        elif tied_root(name, ties) == tied_root(other, ties):
            alias_of[name] = other
        else:
            problems.append(
                f"{name}: one tensor with {other} in the target; if it is to be, declare "
                f"ties={{{name!r}: {other!r}}}"
            )
    own = [span for span in targets if span[-1] not in alias_of]
    problems += _find_overlaps(after.locals, own)
    shared = _find_shared(sources, targets)
    if shared:
        problems.append(f"{shared} share memory; a target must not lie where a source is")
    roster = replace(
        after.roster,
        entries=after.roster.columns.with_aliases(alias_of),
        problems=(*after.roster.problems, *problems),
    )
    return before.own_roster, roster


def _find_aliases(tensors: Mapping[str, torch.Tensor], spans: Sequence[_Span]) -> dict[str, str]:
    """Names of tensors that are one with an earlier one, and that one's."""
    found: dict[str, str] = {}
    if len({span[:2] for span in spans}) == len(spans):
        return found
    at: dict[tuple[str, int], list[str]] = {}
    for device, begin, _, name in spans:
        there = at.setdefault((device, begin), [])
        local = tensors[name]
        for other in there:
            if local.dtype == tensors[other].dtype and _lie_alike(local, tensors[other]):
                found[name] = other
                break
        else:
            there.append(name)
    return found


def _are_apart(sources: Sequence[_Span], targets: Sequence[_Span]) -> bool:
    """Whether no target reaches into another or a source; only told of tensors on one device.

    >>> near, far = [("cpu", 0, 8, "a")], [("cpu", 8, 12, "b")]
    >>> _are_apart(near, far), _are_apart(near, [("cpu", 7, 12, "b")])
    (True, False)
    """
    if len({span[0] for span in (*sources, *targets)}) > 1:
        return False
    begin, end = _sort_ends(targets)
    if (end[:-1] > begin[1:]).any():
        return False
    # A source is apart from targets that begin before it where the last of them ends before it.
    low, high = _sort_ends(sources)
    following = np.searchsorted(begin, low)
    before = np.concatenate(([np.iinfo(np.int64).min], end))[following]
    behind = np.concatenate((begin, [np.iinfo(np.int64).max]))[following]
    return not ((before > low) | (behind < high)).any()


def _sort_ends(spans: Sequence[_Span]) -> tuple[IntArray, IntArray]:
    begin = np.array([span[1] for span in spans], dtype=np.int64)
    end = np.array([span[2] for span in spans], dtype=np.int64)
    order = np.argsort(begin, kind="stable")
    return begin[order], end[order]


def _lie_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors that begin at one place are one."""
    return tuple(one.shape) == tuple(other.shape) and one.stride() == other.stride()


def _find_shared(sources: Sequence[_Span], targets: Sequence[_Span]) -> str:
    """The first source and target that share memory; empty where none do."""
    # A sweep by address: for each side, how far what began so far reaches.
    spans = sorted(
        (device, begin, end, number, name)
        for number, side in enumerate((sources, targets))
        for device, begin, end, name in side
    )
    reach: list[tuple[str, int, str]] = [("", 0, "")] * 2
    for device, begin, end, number, name in spans:
        where, furthest, holder = reach[1 - number]
        if where == device and begin < furthest:
            return f"{name} and {holder}"
        if reach[number][:2] < (device, end):
            reach[number] = (device, end, name)
    return ""


def _list_spans(tensors: Mapping[str, torch.Tensor], held: HeldMemory) -> list[_Span]:
    """Where tensors with elements lie: their device, first and last byte, and name."""
    ends: dict[int, tuple[str, int]] = {}
    for number, first in held.firsts(list(tensors.values())).items():
        begin, end = find_addresses(first)
        ends[number] = str(first.device), end - begin
    return [
        (device, begin, begin + size_bytes, name)
        for name, begin, (device, size_bytes) in zip(
            tensors, held.addresses, map(ends.__getitem__, held.numbers), strict=True
        )
        if size_bytes
    ]


def _find_overlaps(tensors: Mapping[str, torch.Tensor], spans: Sequence[_Span]) -> Iterator[str]:
    """What is wrong with targets that share some of their memory."""
    reaching: list[_Span] = []
    for device, begin, end, name in sorted(spans):
        reaching = [one for one in reaching if one[0] == device and one[2] > begin]
        for *_, other in reaching:
            if _share_elements(tensors[name], tensors[other]):
                yield (
                    f"{name} and {other} of the target share some of their memory; give each "
                    "memory of its own"
                )
                break
        reaching.append((device, begin, end, name))


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
        return any(True for _ in find_overlaps(*regions))
    except RunError:
        # Too large to compare by elements, and of odd strides: their spans decide.
        return True
