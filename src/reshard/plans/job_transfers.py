"""The transfers of a job, by tensor.

The tensors of a tensor group are written out together, as columns for all; what belongs to one
tensor is cut out of the columns when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

import numpy as np

from reshard.geometry.transfers import Transfers
from reshard.plans.senders.message_identity import transfer_identities
from reshard.plans.senders.sender_transfers import GroupTransfers


class JobTransfers(Mapping[str, Transfers]):
    """Transfers by the names of their tensors, in the order of the job.

    Tensors of which nothing is copied are left out. `len` counts tensors, `count` transfers.
    """

    def __init__(self, names: tuple[str, ...], groups: Iterable[GroupTransfers]) -> None:
        self._names = names
        self.groups = tuple(groups)

    @cached_property
    def _places(self) -> dict[str, tuple[GroupTransfers, int, int]]:
        places = []
        for found in self.groups:
            bounds = found.begin.tolist()
            for place, item in enumerate(found.tensors.items.tolist()):
                if bounds[place] < bounds[place + 1]:
                    places.append((item, (found, bounds[place], bounds[place + 1])))
        places.sort(key=lambda entry: entry[0])
        return {self._names[item]: place for item, place in places}

    def __getitem__(self, name: str) -> Transfers:
        found, low, high = self._places[name]
        return found.transfers.take(slice(low, high))

    def shared(self) -> dict[str, Transfers]:
        """The transfers of every tensor; where those of two are equal, they are one object."""
        found: dict[str, Transfers] = {}
        for group in self.groups:
            # A rank may have no part in what moves of a group.
            if not len(group.transfers):
                continue
            columns = [column.reshape(len(column), -1) for column in group.transfers.columns]
            rows = np.ascontiguousarray(np.concatenate(columns, axis=1, dtype=np.int64))
            known: dict[bytes, Transfers] = {}
            bounds = group.begin.tolist()
            for place, item in enumerate(group.tensors.items.tolist()):
                low, high = bounds[place], bounds[place + 1]
                if low == high:
                    continue
                key = rows[low:high].tobytes()
                if key not in known:
                    known[key] = group.transfers.take(slice(low, high))
                found[self._names[item]] = known[key]
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def count(self) -> int:
        """How many transfers there are, of all tensors."""
        return sum(len(found.transfers) for found in self.groups)

    def identities(self, name: str) -> list[str]:
        """The identity of each transfer of a tensor, see `transfer_identities`."""
        found, low, high = self._places[name]
        rows = np.arange(low, high)
        return transfer_identities(name, found, rows)
