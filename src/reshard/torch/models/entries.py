"""Entries of a rank's roster: one for each tensor that it has, kept as columns.

Tensors of many layers are alike but for their names. So a rank's entries are columns: names, and
for each the number of its kind, which says all else and is there once::

    names     layers.0.up    layers.0.down    layers.1.up    layers.1.down
    kind_of   0              1                0              1
    kinds     0: bfloat16 [4, 8], cut by rows    1: bfloat16 [8, 4], cut by columns
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from reshard.layout import Layout
from reshard.megatron.parameters import LocalParameter
from reshard.recipes.naming import Fusion
from reshard.runs import IntArray
from reshard.sharding import ShardingSpec

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of one rank.

    Attributes:
        name: in both models.
        dtype: its element type; None where the rank has none of it and does not know.
        shape: the local one; None where this rank has none.
        layout: over global ranks, where the rank knows it.
        parameter: what Megatron says of it, by its own `local_name` in the model chunk `chunk`.
        fusion: how its members lie in it, where it is fused; by common names.
        own_name: what the model calls it, before names become common; of Megatron's over the
            whole model.
        spec: the sharding that the layout is of, where the rank knows it.
        alias_of: the name of another tensor, tied to this one, whose memory it is on this rank.
        sample: of the elements of a plain tensor, where ranks are to compare them.
    """

    name: str
    dtype: str | None
    shape: Shape | None
    layout: Layout | None = None
    parameter: LocalParameter | None = None
    local_name: str = ""
    chunk: int = 0
    fusion: Fusion | None = None
    own_name: str = ""
    spec: ShardingSpec | None = None
    alias_of: str = ""
    sample: str = ""

    @property
    def kind(self) -> EntryKind:
        """What it may have alike with others."""
        return EntryKind(
            self.dtype,
            self.shape,
            self.layout,
            self.parameter,
            self.chunk,
            self.fusion,
            self.spec,
            self.alias_of,
        )


class EntryKind(NamedTuple):
    """What many tensors of a rank have alike; the fields are those of `Entry`."""

    dtype: str | None
    shape: Shape | None
    layout: Layout | None = None
    parameter: LocalParameter | None = None
    chunk: int = 0
    fusion: Fusion | None = None
    spec: ShardingSpec | None = None
    alias_of: str = ""

    def entry(self, name: str, own_name: str, local_name: str, sample: str) -> Entry:
        """A tensor of this kind."""
        dtype, shape, layout, parameter, chunk, fusion, spec, alias_of = self
        others = (local_name, chunk, fusion, own_name, spec, alias_of, sample)
        return Entry(name, dtype, shape, layout, parameter, *others)


@dataclass(frozen=True, slots=True)
class NameColumns:
    """Names of a rank's tensors, in their order.

    Attributes:
        names: common to both models.
        own_names: what the model calls them; the same list where that is the same.
        local_names: what Megatron's ranks call them; empty for others.
    """

    names: Sequence[str] = ()
    own_names: Sequence[str] = ()
    local_names: Sequence[str] = ()

    @property
    def are_own(self) -> bool:
        """Whether the model calls every tensor by its common name."""
        return self.own_names is self.names or self.own_names == self.names


class EntryColumns(Sequence[Entry]):
    """A rank's entries. `samples` is empty where there are none.

    >>> columns = EntryColumns.of([Entry("up", "int8", (4, 2)), Entry("down", "int8", (4, 2))])
    >>> columns.kind_of, len(columns.kinds), columns[1].name
    ([0, 0], 1, 'down')
    """

    __slots__ = ("columns", "kind_of", "kinds", "samples")

    def __init__(
        self,
        columns: NameColumns,
        kinds: Sequence[EntryKind],
        kind_of: Sequence[int],
        samples: Sequence[str] = (),
    ) -> None:
        self.columns = columns
        self.kinds = kinds
        self.kind_of = kind_of
        self.samples = samples

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> EntryColumns:
        """Entries as columns."""
        if isinstance(entries, EntryColumns):
            return entries
        kinds: dict[EntryKind, int] = {}
        listed = tuple(entries)
        return cls(
            NameColumns(
                [entry.name for entry in listed],
                [entry.own_name for entry in listed],
                [e.local_name for e in listed] if any(e.local_name for e in listed) else (),
            ),
            # Written before `kinds` is read, which it fills.
            kind_of=[kinds.setdefault(entry.kind, len(kinds)) for entry in listed],
            kinds=tuple(kinds),
            samples=[e.sample for e in listed] if any(e.sample for e in listed) else (),
        )

    @property
    def names(self) -> Sequence[str]:
        """Common to both models."""
        return self.columns.names

    def with_aliases(self, alias_of: Mapping[str, str]) -> EntryColumns:
        """The same, where tensors of these names are the memory of others."""
        if not alias_of:
            return self
        kinds = {kind: number for number, kind in enumerate(self.kinds)}
        kind_of = list(self.kind_of)
        for number, name in enumerate(self.names):
            if name in alias_of:
                kind = self.kinds[kind_of[number]]._replace(alias_of=alias_of[name])
                kind_of[number] = kinds.setdefault(kind, len(kinds))
        return EntryColumns(self.columns, tuple(kinds), kind_of, self.samples)

    def __len__(self) -> int:
        return len(self.columns.names)

    def __getitem__(self, number: int) -> Entry:  # type: ignore[override]
        names = self.columns
        return self.kinds[self.kind_of[number]].entry(
            names.names[number],
            names.own_names[number],
            names.local_names[number] if names.local_names else "",
            self.samples[number] if self.samples else "",
        )

    def __iter__(self) -> Iterator[Entry]:
        return (self[number] for number in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


class ListedEntries:
    """The entries of all ranks, by number: of their names, in the order of the first listing.

    `kind_of[i]` is one number for tensors that are of one kind on every rank alike.

    >>> up, down = Entry("up", "int8", (4, 2)), Entry("down", "int8", (4, 2))
    >>> listed = ListedEntries({0: EntryColumns.of([up, down]), 3: EntryColumns.of([down])})
    >>> listed.names, len(set(listed.kind_of)), list(listed.entries(1))
    (['up', 'down'], 2, [0, 3])
    """

    def __init__(self, ranks: Mapping[int, EntryColumns]) -> None:
        numbers: dict[str, int] = {}
        # Ranks that say the same have one object, and names are often the same where kinds are not.
        own_numbers: dict[int, list[int]] = {}
        self._ranks = ranks
        for columns in ranks.values():
            if id(columns.columns) not in own_numbers:
                found = [numbers.setdefault(name, len(numbers)) for name in columns.names]
                own_numbers[id(columns.columns)] = found
        self.names = list(numbers)
        self._own_numbers = own_numbers
        self._places = {
            key: _invert(np.array(of, dtype=np.int64), len(numbers))
            for key, of in own_numbers.items()
        }
        self.kind_of = self._number_kinds().tolist()
        told = {id(of.columns): of.columns for of in ranks.values() if len(of)}
        self.may_share_names = len(told) > 1 and not all(one.are_own for one in told.values())

    def _number_kinds(self) -> IntArray:
        kinds: dict[EntryKind, int] = {}
        found = np.zeros(len(self.names), dtype=np.int64)
        for columns in {id(of): of for of in self._ranks.values()}.values():
            # The last number is of what a rank does not list.
            of_kind = [kinds.setdefault(kind, len(kinds)) for kind in columns.kinds]
            place = self._places[id(columns.columns)]
            own = np.array([*of_kind, -1])[np.append(columns.kind_of, -1).astype(np.int64)[place]]
            # Numbered anew for each rank, so that they stay small.
            found = np.unique(found * (len(kinds) + 1) + own + 1, return_inverse=True)[1].reshape(
                -1
            )
        return found

    def entries(self, number: int) -> dict[int, Entry]:
        """A tensor's entries, by rank; the first of a rank that lists it twice."""
        found = {}
        for rank, columns in self._ranks.items():
            place = self._places[id(columns.columns)][number]
            if place >= 0:
                found[rank] = columns[place]
        return found

    @property
    def repeated(self) -> Iterator[tuple[int, Entry, Entry]]:
        """Entries of a name that a rank has listed already: the rank, the first, and this one."""
        for rank, columns in self._ranks.items():
            own = self._own_numbers[id(columns.columns)]
            if len(set(own)) == len(own):
                continue
            places = self._places[id(columns.columns)]
            for place, number in enumerate(own):
                if places[number] != place:
                    yield rank, columns[int(places[number])], columns[place]

    @property
    def have_samples(self) -> bool:
        """Whether any rank says some of what its tensors have."""
        return any(columns.samples for columns in self._ranks.values())


def _invert(numbers: IntArray, count: int) -> IntArray:
    """Where each number stands first; -1 for those that do not."""
    places = np.full(count, -1, dtype=np.int64)
    # Of several places the one written last counts.
    places[numbers[::-1]] = np.arange(len(numbers))[::-1]
    return places
