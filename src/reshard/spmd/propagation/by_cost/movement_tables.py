"""Movement tables: times to move values between shardings, for all choices at once.

Values of one shape and element type share one square table, a row for each sharding that some
value or operation has of them and a column for the same as a target. The tables of a sum are cut
out of it: a value's candidates by what the ways of an operation read, or make::

    value's candidates   0   1   4            all shardings of the kind
    operation reads          1   1   0   7    (a column for each way)

Seconds begin as formulas or bounds, and become those of programs as movements are priced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from reshard.dtypes import DType
from reshard.spmd.propagation.axis_parts import Sharding, are_alike
from reshard.spmd.propagation.by_cost.cost_model import CostModel
from reshard.spmd.propagation.by_cost.cost_table import FloatArray

Move = tuple[int, int]
"""From a sharding to another, by their numbers."""


@dataclass(frozen=True, slots=True)
class MovementTable:
    """Seconds between the candidates of a value, its rows, and what the ways of an operation have.

    Args:
        own, others: shardings by their numbers.
        is_read: whether the value goes to the others, not from them.
        seconds_s: for each of both.
    """

    own: tuple[int, ...]
    others: tuple[int, ...]
    is_read: bool
    seconds_s: FloatArray
    _rows: dict[int, int]
    _columns: dict[int, list[int]]

    @classmethod
    def of(
        cls, own: tuple[int, ...], others: tuple[int, ...], is_read: bool, every_s: FloatArray
    ) -> MovementTable:
        """The part of a square table that some shardings need."""
        found = every_s if is_read else every_s.T
        seconds_s = found[np.array(own, dtype=np.int64)[:, None], np.array(others, dtype=np.int64)]
        columns: dict[int, list[int]] = {}
        for column, other in enumerate(others):
            columns.setdefault(other, []).append(column)
        rows = {number: row for row, number in enumerate(own)}
        return cls(own, others, is_read, seconds_s, rows, columns)

    def move(self, row: int, column: int) -> Move:
        """Which movement stands at a place."""
        one, other = self.own[row], self.others[column]
        return (one, other) if self.is_read else (other, one)

    def changed(self, moves_s: Mapping[Move, float]) -> MovementTable:
        """The table with the seconds of some movements wherever they stand.

        It is this one where none of them does: tables that are the same object are the same.
        """
        seconds_s: FloatArray | None = None
        for move, found_s in moves_s.items():
            one, other = move if self.is_read else move[::-1]
            row, columns = self._rows.get(one), self._columns.get(other)
            if row is not None and columns is not None:
                if seconds_s is None:
                    seconds_s = self.seconds_s.copy()
                seconds_s[row, columns] = found_s
        return self if seconds_s is None else replace(self, seconds_s=seconds_s)


@dataclass(slots=True)
class ValueMovements:
    """The movements of all values of one shape and element type.

    >>> from reshard import DeviceMesh, dtype, spec
    >>> from reshard.spmd.propagation.axis_parts import AxisTable
    >>> from reshard.spmd.propagation.by_cost.cost_model import Machine
    >>> mesh = DeviceMesh.of(x=4)
    >>> model = CostModel(AxisTable.of(mesh), Machine())
    >>> moves = ValueMovements(model, (1024,), dtype("float32"))
    >>> cut, whole = moves.numbers(model.table.encoded(spec(mesh, text)) for text in ("x", "-"))
    >>> moves.fill(bounds=False)
    >>> moves.price([(cut, whole)])
    True
    >>> moves.table((cut,), (whole, cut), True).seconds_s[0].tolist() == [
    ...     moves.priced[cut, whole], 0.0
    ... ]
    True
    """

    model: CostModel
    shape: tuple[int, ...]
    element: DType
    priced: dict[Move, float] = field(default_factory=dict)
    _shardings: dict[Sharding, int] = field(default_factory=dict)
    _every_s: FloatArray = field(default_factory=lambda: np.zeros((0, 0)))
    _tables: dict[object, MovementTable] = field(default_factory=dict)

    def numbers(self, shardings: Iterable[Sharding]) -> tuple[int, ...]:
        """The number of each sharding; shardings that are new get one."""
        known = self._shardings
        return tuple([known.setdefault(one, len(known)) for one in shardings])

    def fill(self, *, bounds: bool) -> None:
        """Find the seconds of all movements: by bounds or by formulas, or by programs if priced."""
        every = list(self._shardings)
        ask = self.model.bounds_s if bounds else self.model.movements_s
        self._every_s = ask(every, every, self.shape, self.element.itemsize_bytes)
        for move, seconds_s in self.priced.items():
            self._every_s[move] = seconds_s
        self._tables = {}

    def table(self, own: tuple[int, ...], others: tuple[int, ...], is_read: bool) -> MovementTable:
        """The seconds between some shardings, as they are priced by then."""
        found = self._tables.get((own, others, is_read))
        if found is None:
            found = MovementTable.of(own, others, is_read, self._every_s)
            self._tables[own, others, is_read] = found
        return found

    def price(self, moves: Iterable[Move]) -> bool:
        """Give movements the seconds of their programs. Whether any had not been given them."""
        every = list(self._shardings)
        new_s: dict[Move, float] = {}
        for move in moves:
            source, target = every[move[0]], every[move[1]]
            if move not in self.priced and not are_alike(source, target):
                seconds_s = self.model.program_s(source, target, self.shape, self.element)
                self.priced[move] = self._every_s[move] = new_s[move] = seconds_s
        if new_s:
            for key, table in self._tables.items():
                self._tables[key] = table.changed(new_s)
        return bool(new_s)


@dataclass(frozen=True, slots=True, eq=False)
class Between:
    """Movements of equal values around equal operations.

    Args:
        moves: of values like them.
        own: the shardings that such a value may have.
        others: in which the operation reads or makes it, or what was asked for.
        is_read: whether it goes to those, not from them.
    """

    moves: ValueMovements
    own: tuple[int, ...]
    others: tuple[int, ...]
    is_read: bool

    @property
    def seconds_s(self) -> FloatArray:
        """A row for each sharding of the value, a column for each of the others."""
        return self.moves.table(self.own, self.others, self.is_read).seconds_s

    def seconds_to(self, targets: tuple[int, ...]) -> FloatArray:
        """From each sharding that such a value may have, a row, to some."""
        return self.moves.table(self.own, targets, True).seconds_s

    def target(self, row: int, column: int) -> int | None:
        """The other end of the movement at a place; None where nothing moves."""
        other = self.others[column]
        return None if other == self.own[row] else other
