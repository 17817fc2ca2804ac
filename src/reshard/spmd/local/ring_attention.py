"""A step of ring attention on one rank: its queries and the keys of one other part.

The sequences are cut in parts, each of one stretch or several. In turn `j` the queries of part `p`
see the keys of part `p + j`, counted around. A rank has its queries and, for the turn, those of
these keys that they see::

    parts of 4, in zigzag     0 . . . . . . 0   . 1 . . . . 1 .   . . 2 . . 2 . .   . . . 3 3 . . .
    causal, turn 1            0: the first 1    1: the first 2    2: the first 3    3: the whole 0
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from reshard.spmd.core.local_work import Function, LocalWork, Stretch
from reshard.spmd.local.attention import Attention, SeenKeys, grouped

Part = Sequence[Stretch]
"""What a rank has of a sequence."""


def seen_keys(options: Any, query_start: int = 0, key_start: int = 0) -> SeenKeys:
    """Which keys the queries of a part see, by an operation's attributes."""
    return SeenKeys(options["is_causal"], options["window"], query_start, key_start)


def is_reached(options: Any, queries: Part, keys: Part) -> bool:
    """Whether any query of a part of the sequence sees any key of another."""
    reaches = seen_keys(options).reaches
    return any(
        one[0] < one[1] and other[0] < other[1] and reaches(one, other)[0]
        for one in queries
        for other in keys
    )


def count_pairs(attributes: Any) -> int:
    """How many pairs of a query and a key meet on the busiest rank of a turn."""
    queries, keys = attributes["query_parts"], attributes["key_parts"]
    seen = seen_keys(attributes)
    return max(
        sum(seen.count_pairs(one, other) for one in part for other in keys[turned % len(keys)])
        for turned, part in enumerate(queries, attributes["turn"])
    )


class _Turn:
    """One rank's part of a turn: its stretches, in the order in which they lie here."""

    def __init__(
        self, work: LocalWork, queries: Sequence[Stretch], keys: Sequence[Stretch]
    ) -> None:
        self.options = work.attributes
        self.space = work.library.namespace
        self._queries = queries
        self._keys = keys

    def meetings(self, k: Any) -> Iterator[tuple[Stretch, list[tuple[Stretch, Attention]]]]:
        """Stretches of the queries, as they lie here, with the keys here that each sees.

        Beside the keys stands what computes them.
        """
        options = self.options
        parts = options["query_parts"]
        here = []
        for number, part in enumerate(parts):
            for stretch in part:
                rows = _find_place(self._queries, stretch)
                if rows is not None:
                    here.append((rows, stretch, number))
        # Parts in zigzag are not in the order of the sequence, which a rank may have whole.
        for rows, stretch, number in sorted(here):
            found = []
            for other in options["key_parts"][(number + options["turn"]) % len(parts)]:
                columns = _find_place(self._keys, other)
                # Arrays that only tell the results' element types have no such keys.
                is_here = columns is not None and columns[1] <= k.shape[-2]
                if columns is not None and is_here and is_reached(options, (stretch,), (other,)):
                    seen = seen_keys(options, stretch[0], other[0])
                    found.append((columns, Attention(self.space, options["scale"], seen)))
            yield rows, found


def _find_place(stretches: Sequence[Stretch], wanted: Stretch) -> Stretch | None:
    """Where a stretch of the sequence lies among those that are here; None where it does not."""
    before = 0
    for start, stop in stretches:
        if start <= wanted[0] and wanted[1] <= stop:
            return before + wanted[0] - start, before + wanted[1] - start
        before += stop - start
    return None


def _list_turns(work: LocalWork) -> list[_Turn]:
    axis = len(work.operand_shapes_here(0)[0]) - 2
    pairs = zip(work.stretches_here(0, axis), work.stretches_here(1, axis), strict=True)
    return [_Turn(work, *both) for both in pairs]


def attention_turn(work: LocalWork) -> list[Function]:
    """What is weighed, and the logarithms of the sums: zeros and -inf where no key is seen."""

    def make(turn: _Turn) -> Function:
        space = turn.space

        def function(q: Any, k: Any, v: Any) -> Any:
            groups = k.shape[-3]
            weighed, sums = [], []
            for rows, seen in turn.meetings(k):
                some = grouped(q[..., rows[0] : rows[1], :], groups)
                both = None
                for columns, kernel in seen:
                    keys, values = (x[..., None, columns[0] : columns[1], :] for x in (k, v))
                    one = kernel.forward(some, keys, values)
                    both = one if both is None else _join(space, both, one)
                made, logs = both or _make_unseen(space, some, v.shape[-1])
                weighed.append(made)
                sums.append(logs)
            if not weighed:
                made, logs = _make_unseen(space, grouped(q, groups), v.shape[-1])
                weighed, sums = [made], [logs]
            shape = q.shape[:-1]
            found = space.concat(weighed, axis=-2).reshape((*shape, v.shape[-1]))
            total = space.concat(sums, axis=-1).reshape(shape)
            # All ranks must record gradients alike, also those whose queries see no key.
            for one in (q, k, v):
                found, total = (work.library.linked(made, one) for made in (found, total))
            return found, total

        return function

    return [make(turn) for turn in _list_turns(work)]


def _join(space: Any, one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    """What is weighed, and the logarithms of the sums, of keys in two stretches together."""
    total = space.logaddexp(one[1], other[1])
    # Where nothing is seen yet, both are zeros.
    level = space.where(space.isfinite(total), total, space.zeros_like(total))
    parts = [weighed * space.exp(logs - level)[..., None] for weighed, logs in (one, other)]
    return parts[0] + parts[1], total


def _make_unseen(space: Any, q: Any, width: int) -> tuple[Any, Any]:
    rows = q[..., :1]
    found = space.zeros_like(space.broadcast_to(rows, (*q.shape[:-1], width)))
    return found, space.full_like(rows[..., 0], -math.inf)


def attention_turn_gradient(work: LocalWork) -> list[Function]:
    """The cotangents of the queries, and those of the turn's keys and values."""
    if work.result_layouts:
        lengths = [(work.result_layouts[1].local_shape(rank) or (0, 0))[-2] for rank in work.ranks]
    else:
        lengths = [shape[-2] for shape in work.operand_shapes_here(1)]

    def make(turn: _Turn, length: int) -> Function:
        space = turn.space

        def function(q: Any, k: Any, v: Any, sums: Any, shift: Any, g: Any) -> Any:
            groups = k.shape[-3]
            of_queries = space.zeros_like(q)
            of_keys, of_values = (_zeros(space, x, length) for x in (k, v))
            for rows, seen in turn.meetings(k):
                of_rows = [x[..., rows[0] : rows[1], :] for x in (q, g)]
                some, cotangents = (grouped(x, groups) for x in of_rows)
                numbers = (x[..., rows[0] : rows[1], None] for x in (sums, shift))
                of_all = tuple(grouped(x, groups)[..., 0] for x in numbers)
                for columns, kernel in seen:
                    keys, values = (x[..., None, columns[0] : columns[1], :] for x in (k, v))
                    one, *others = kernel.back(some, keys, values, cotangents, of_all)
                    of_queries[..., rows[0] : rows[1], :] += one.reshape(of_rows[0].shape)
                    for whole, part in zip((of_keys, of_values), others, strict=True):
                        whole[..., columns[0] : columns[1], :] += part[..., 0, :, :]
            return of_queries, of_keys, of_values

        return function

    return [make(turn, length) for turn, length in zip(_list_turns(work), lengths, strict=True)]


def _zeros(space: Any, x: Any, length: int) -> Any:
    device = {"device": x.device} if type(x).__module__ == "torch" else {}
    return space.zeros((*x.shape[:-2], length, x.shape[-1]), dtype=x.dtype, **device)
