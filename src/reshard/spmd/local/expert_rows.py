"""Rows of tokens by expert: how many each part sends to each other part, and their order.

Each part of the tokens has some rows for each expert, and each expert is on one of the parts that a
part can send to. A part sorts its rows by where they go, then by expert. What arrives lies by the
part that it comes from, and is sorted by expert::

    part 0 has rows for experts     2 0 3 0     sends   0 0 | 2 3
    part 1                          1 3 3 1             1 1 | 3 3
    experts 0 and 1 are on part 0               it gets 0 0   1 1
    experts 2 and 3 on part 1                           2 3   3 3, sorted 2 3 3 3

There each expert has a stretch of the rows, which may be empty, and rows meet the matrix of their
expert: on PyTorch's tensors in CPU memory by one kernel, elsewhere by a product for each expert
that has rows. No row is padded.
"""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np

from reshard.cut_rules import Joined, Sizes
from reshard.spmd.core.backend import Library, records_gradient

Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

_NARROW = ("float32", "float16", "bfloat16")
_ALIGNED_BYTES = 16


class ExpertRows:
    """The rows of all parts.

    Args:
        counts: `[parts, experts]`, rows that each part sends to each expert.
        owners: `[parts, experts]`, the part that has the expert to which a part sends.

    >>> rows = ExpertRows(np.array([[2, 0, 1, 1], [0, 2, 0, 2]]), np.array([[0, 0, 1, 1]] * 2))
    >>> rows.sent.sizes, [one.sizes for one in rows.sent.rules], rows.at_experts.sizes
    ((4, 4), [(2, 2), (2, 2)], (4, 4))
    >>> rows.sorted_at(1).tolist(), rows.counts_at(1).tolist()
    ([0, 1, 2, 3], [0, 0, 1, 3])
    """

    def __init__(self, counts: Integers, owners: Integers) -> None:
        self.counts = counts
        self.owners = owners
        self._sorted: dict[int, Integers] = {}

    @property
    def moved(self) -> int:
        """How many rows go to another part than they are on."""
        parts = np.arange(len(self.counts))
        return int(self.counts[self.owners != parts[:, None]].sum())

    @cached_property
    def _exchanged(self) -> Integers:
        """`[from, to]`."""
        found = np.zeros((len(self.counts),) * 2, np.int64)
        parts = np.repeat(np.arange(len(self.counts)), self.counts.shape[1])
        np.add.at(found, (parts, self.owners.ravel()), self.counts.ravel())
        return found

    @property
    def own(self) -> Sizes:
        """The cut of rows where their tokens are."""
        return Sizes(tuple(self._exchanged.sum(1).tolist()))

    @property
    def sent(self) -> Joined:
        """The cut of the same rows where their experts are."""
        some = [tuple(one) for one in self._exchanged.tolist() if sum(one)]
        return Joined(tuple(map(sum, some)), tuple(map(Sizes, some)))

    @property
    def at_experts(self) -> Sizes:
        """The cut of rows that are sorted where their experts are."""
        return Sizes(tuple(self._exchanged.sum(0).tolist()))

    def order_to_send(self, part: int, experts: Integers, capacity: Integers | None) -> Integers:
        """Which rows a part sends, in order.

        Args:
            part: of the tokens.
            experts: that its rows are for.
            capacity: how many each expert takes of this part, the first ones; all when None.
        """
        # By owner, then by expert: the places of experts in that order.
        place = np.argsort(np.argsort(self.owners[part], kind="stable"), kind="stable")
        order = np.argsort(place[experts], kind="stable")
        if capacity is None:
            return order
        of_sorted = experts[order]
        # Among rows of the same expert, how many come before.
        changes = np.flatnonzero(np.diff(of_sorted, prepend=-1))
        lengths = np.diff(np.append(changes, len(of_sorted)))
        before = np.arange(len(of_sorted)) - np.repeat(changes, lengths)
        return order[before < capacity[of_sorted]]

    def sorted_at(self, part: int) -> Integers:
        """Which of the rows that arrive at a part comes where, by expert and then by sender."""
        if part not in self._sorted:
            self._sorted[part] = self._sort_at(part)
        return self._sorted[part]

    def _sort_at(self, part: int) -> Integers:
        senders, experts = np.nonzero(self.owners == part)
        order = np.argsort(self.owners, axis=1, kind="stable")
        places = np.argsort(order, axis=1, kind="stable")
        # As they arrive: by sender, and as the sender had them.
        arriving = np.lexsort((places[senders, experts], senders))
        senders, experts = senders[arriving], experts[arriving]
        lengths = self.counts[senders, experts]
        starts = np.cumsum(lengths) - lengths
        wanted = np.lexsort((senders, experts))
        pieces = [np.arange(starts[n], starts[n] + lengths[n]) for n in wanted]
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)

    def counts_at(self, part: int) -> Integers:
        """How many rows a part has of each expert."""
        found: Integers = np.where(self.owners == part, self.counts, 0).sum(0)
        return found


def grouped_product(library: Library, rows: Any, matrices: Any, ends: Integers) -> Any:
    """Rows `[n, d]` by `[experts, d, e]`: `[n, e]`; `ends` is where the rows of each expert stop.

    >>> from reshard.spmd.core.backend import library
    >>> rows, matrices = np.ones((3, 2)), np.array([[[1.0], [1.0]], [[5.0], [5.0]]])
    >>> grouped_product(library("numpy"), rows, matrices, np.array([1, 3]))[:, 0].tolist()
    [2.0, 10.0, 10.0]
    """
    kernel = _find_kernel(library, rows, matrices, ends)
    if kernel is not None and _is_dense(matrices):
        return kernel(rows.contiguous(), matrices, offs=library.array(ends.astype(np.int32)))
    made = [
        _multiply(library, rows[a:b], matrices[number])
        for number, (a, b) in enumerate(_list_stretches(ends))
        if b > a
    ]
    none = library.filled((0, matrices.shape[-1]), 0, rows)
    whole = library.namespace.concat([none, *made], axis=0)
    # All ranks record gradients alike, also those that have no rows.
    return library.linked(library.linked(whole, rows), matrices)


def grouped_outer(library: Library, rows: Any, others: Any, ends: Integers) -> Any:
    """Of each expert the sum over its rows of `[n, d]` by `[n, e]`: `[experts, d, e]`."""
    space = library.namespace
    kernel = _find_kernel(library, rows, others, ends)
    if kernel is not None:
        turned = space.matrix_transpose(rows.contiguous())
        return kernel(turned, others.contiguous(), offs=library.array(ends.astype(np.int32)))
    made = [
        _multiply(library, space.matrix_transpose(rows[a:b]), others[a:b])
        for a, b in _list_stretches(ends)
    ]
    none = library.filled((0, rows.shape[-1], others.shape[-1]), 0, rows)
    return space.stack(made, axis=0) if made else none


def _find_kernel(library: Library, rows: Any, others: Any, ends: Integers) -> Any:
    """PyTorch's own, where it takes such operands; None elsewhere."""
    if library.name != "torch" or not len(ends) or not len(rows) or rows.device.type != "cpu":
        return None
    widths_bytes = [one.shape[-1] * one.itemsize for one in (rows, others)]
    if any(one % _ALIGNED_BYTES for one in widths_bytes):
        return None
    # Its gradient refuses cotangents that are broadcast, as that of a sum.
    if records_gradient(rows) or records_gradient(others):
        return None
    if str(rows.dtype).removeprefix("torch.") not in _NARROW:
        return None
    # Not in every version.
    return getattr(import_module("torch").nn.functional, "grouped_mm", None)


def _is_dense(matrices: Any) -> bool:
    """Whether each matrix lies row by row, or column by column."""
    return bool(matrices.is_contiguous() or matrices.transpose(-1, -2).is_contiguous())


def _list_stretches(ends: Integers) -> list[tuple[int, int]]:
    return list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)) if len(ends) else []


def _multiply(library: Library, one: Any, other: Any) -> Any:
    """A product of matrices, in float32 where NumPy has none of a narrow type."""
    if library.name == "numpy" and one.dtype.kind == "V":
        return (one.astype(np.float32) @ other.astype(np.float32)).astype(one.dtype)
    return library.namespace.matmul(one, other)
