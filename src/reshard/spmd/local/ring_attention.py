"""A turn of ring attention on one rank: its queries and the keys of one other part.

The sequences are cut in parts. In turn `j` the queries of part `p` see the keys of part `p + j`,
counted around. A rank has its queries and, for the turn, those keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from reshard.spmd.local.attention import Attention, SeenKeys, as_groups, grouped
from reshard.spmd.local.local_work import Function, LocalWork, Stretch


def seen_keys(options: Any, query_start: int = 0, key_start: int = 0) -> SeenKeys:
    """Which keys the queries of a part see, by an operation's attributes."""
    return SeenKeys(options["is_causal"], options["window"], query_start, key_start)


def is_reached(options: Any, queries: Stretch, keys: Stretch) -> bool:
    """Whether any query of a part of the sequence sees any key of another."""
    if queries[0] == queries[1] or keys[0] == keys[1]:
        return False
    return seen_keys(options).reaches(queries, keys)[0]


class _Turn:
    """One rank's part of a turn."""

    def __init__(self, work: LocalWork, query_start: int, key_stretches: Sequence[Stretch]) -> None:
        self.options = work.attributes
        self.space = work.library.namespace
        self.query_start = query_start
        # Of the sequence, in the order in which they lie here.
        self.key_stretches = key_stretches

    def meetings(self, q: Any, k: Any) -> Iterator[tuple[Stretch, Stretch, Attention]]:
        """Stretches of the queries here, the keys here that each sees, and what computes them."""
        options = self.options
        parts = options["query_parts"]
        for number, (start, stop) in enumerate(parts):
            rows = _overlap((start, stop), self.query_start, q.shape[-2])
            if rows is None:
                continue
            of_keys = options["key_parts"][(number + options["turn"]) % len(parts)]
            columns = (0, 0)
            if is_reached(options, (start, stop), of_keys):
                columns = self._find_columns(of_keys)
            seen = seen_keys(options, self.query_start + rows[0], of_keys[0])
            yield rows, columns, Attention(self.space, options["scale"], seen)

    def _find_columns(self, part: Stretch) -> Stretch:
        """Where a part of the keys lies among those that are here, which may be its own too."""
        before = 0
        for start, stop in self.key_stretches:
            if start <= part[0] and part[1] <= stop:
                return before + part[0] - start, before + part[1] - start
            before += stop - start
        # Arrays that only tell the results' element types have none of the sequence's places.
        return 0, 0


def _overlap(part: Stretch, start: int, length: int) -> Stretch | None:
    """What of a part lies in a stretch, counted from the stretch's start."""
    low, high = max(part[0], start), min(part[1], start + length)
    return (low - start, high - start) if low < high else None


def _list_turns(work: LocalWork) -> list[_Turn]:
    axis = len(work.operand_shapes_here(0)[0]) - 2
    pairs = zip(work.starts_here(0, axis), work.stretches_here(1, axis), strict=True)
    return [_Turn(work, *both) for both in pairs]


def attention_turn(work: LocalWork) -> list[Function]:
    """What is weighed, and the logarithms of the sums: zeros and -inf where no key is seen."""

    def make(turn: _Turn) -> Function:
        space = turn.space

        def function(q: Any, k: Any, v: Any) -> Any:
            groups = k.shape[-3]
            weighed, sums = [], []
            for rows, columns, kernel in turn.meetings(q, k):
                some = grouped(q[..., rows[0] : rows[1], :], groups)
                keys, values = (x[..., None, columns[0] : columns[1], :] for x in (k, v))
                if columns[0] == columns[1]:
                    made, logs = _make_unseen(space, some, v.shape[-1])
                else:
                    made, logs = kernel.forward(some, keys, values)
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
            of_queries = space.zeros_like(q)
            of_keys, of_values = (_zeros(space, x, length) for x in (k, v))
            for rows, columns, kernel in turn.meetings(q, k):
                if columns[0] == columns[1]:
                    continue
                of_rows = [x[..., rows[0] : rows[1], :] for x in (q, g)]
                numbers = [x[..., rows[0] : rows[1]] for x in (sums, shift)]
                keys, values = (x[..., columns[0] : columns[1], :] for x in (k, v))
                operands = as_groups(of_rows[0], keys, values, numbers[0], numbers[1], of_rows[1])
                made = kernel.queries_back(*operands)
                of_queries[..., rows[0] : rows[1], :] = made.reshape(of_rows[0].shape)
                pairs = zip((of_keys, of_values), kernel.keys_back(*operands), strict=True)
                for whole, part in pairs:
                    whole[..., columns[0] : columns[1], :] += part[..., 0, :, :]
            return of_queries, of_keys, of_values

        return function

    return [make(turn, length) for turn, length in zip(_list_turns(work), lengths, strict=True)]


def _zeros(space: Any, x: Any, length: int) -> Any:
    device = {"device": x.device} if type(x).__module__ == "torch" else {}
    return space.zeros((*x.shape[:-2], length, x.shape[-1]), dtype=x.dtype, **device)
