"""Attention on one rank, in memory that grows with the sequence and not with its square.

Scores are found for a block of queries and a block of keys at a time. Of each query the greatest
score so far, the sum of the exponentials under it and what they weigh are kept; a greater one
scales them down. Blocks in which no query sees any key are left out. The gradient finds the
weights again from the logarithm of their sum.

PyTorch's own kernel does the forward pass of tensors.

Source: Rabe and Staats, Self-attention Does Not Need O(n^2) Memory, 2021.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np

from reshard.spmd.local.by_name import by_name
from reshard.spmd.local.library import Library
from reshard.spmd.local.local_work import Function, LocalWork

_BLOCK = 256
"""Places of a block of queries, and of a block of keys."""


@dataclass(frozen=True)
class SeenKeys:
    """Which keys a query sees, by their places in the sequences.

    Args:
        is_causal: none behind it.
        window: only those less than so many places before it (or behind it); all when None.
        query_start, key_start: the places of the first query and of the first key of a part.
    """

    is_causal: bool = False
    window: int | None = None
    query_start: int = 0
    key_start: int = 0

    def reaches(self, queries: tuple[int, int], keys: tuple[int, int]) -> tuple[bool, bool]:
        """Whether any query of a block sees any key of a block, and whether all see all.

        Blocks are `(start, stop)` in the part.

        >>> SeenKeys(is_causal=True).reaches((0, 4), (4, 8)), SeenKeys().reaches((0, 4), (4, 8))
        ((False, False), (True, True))
        """
        ahead = self.query_start - self.key_start
        # The least and the greatest number of places that a key of the one lies before a query of
        # the other.
        least = ahead + queries[0] - (keys[1] - 1)
        most = ahead + queries[1] - 1 - keys[0]
        low, high = self.limits
        return low <= most and least <= high, low <= least and most <= high

    @property
    def limits(self) -> tuple[float, float]:
        """The least and the greatest number of places that a key lies before a query."""
        reach = math.inf if self.window is None else self.window - 1
        return (0 if self.is_causal else -reach), reach

    def count_pairs(self, queries: tuple[int, int], keys: tuple[int, int]) -> int:
        """How many pairs of a query of a block and a key of a block see each other.

        >>> SeenKeys(is_causal=True).count_pairs((0, 4), (0, 4))
        10
        """
        ahead = self.query_start - self.key_start
        low, high = self.limits
        places = np.arange(*queries) + ahead
        # Of each query the first key that it sees, and the one behind the last.
        first = np.maximum(places - high, keys[0])
        stop = np.minimum(places - low + 1, keys[1])
        return int(np.maximum(stop - first, 0).sum())

    def most_pairs(self, queries: tuple[int, int], keys: tuple[int, int]) -> int:
        """The most pairs of parts of a sequence of queries and of one of keys, each cut evenly.

        Args:
            queries, keys: how many there are, and of how many a part is.

        >>> seen = SeenKeys(is_causal=True)
        >>> seen.most_pairs((8, 8), (8, 8)), seen.most_pairs((8, 4), (8, 8))
        (36, 26)
        """
        if 0 in (*queries, *keys):
            return 0
        if not self.is_causal and self.window is None:
            return queries[1] * keys[1]
        return _most_pairs(self, queries, keys)

    def mask(self, space: Any, queries: tuple[int, int], keys: tuple[int, int], beside: Any) -> Any:
        """Truth values `[queries, keys]` of blocks."""
        # NumPy's arrays have devices from version 2 on.
        device = {"device": beside.device} if type(beside).__module__ == "torch" else {}
        ahead = self.query_start - self.key_start
        rows = space.arange(queries[0], queries[1], **device)[:, None]
        columns = space.arange(keys[0], keys[1], **device)[None, :]
        before = rows - columns + ahead
        low, high = self.limits
        seen = before >= (low if math.isfinite(low) else before)
        return seen & (before <= high) if math.isfinite(high) else seen


@lru_cache(maxsize=4096)
def _most_pairs(seen: SeenKeys, queries: tuple[int, int], keys: tuple[int, int]) -> int:
    parts = [
        [(start, min(start + own, size)) for start in range(0, size, own)]
        for size, own in (queries, keys)
    ]
    return max(seen.count_pairs(one, other) for one, other in itertools.product(*parts))


def blocks(size: int) -> Iterator[tuple[int, int]]:
    """Where blocks of a sequence start and stop.

    >>> list(blocks(300))
    [(0, 256), (256, 300)]
    """
    # An empty part has one empty block, whose result is empty.
    for start in range(0, max(size, 1), _BLOCK):
        yield start, min(start + _BLOCK, size)


class Attention:
    """Attention of a library's arrays, block by block.

    Args:
        space: the library's namespace.
        scale: of the scores.
        seen: which keys the queries see.

    Queries are `[..., g, r, s, d]`: `g` groups of `r` heads. Keys are `[..., g, 1, t, d]`, values
    `[..., g, 1, t, e]`.
    """

    def __init__(self, space: Any, scale: float, seen: SeenKeys) -> None:
        self.space = space
        self.scale = scale
        self.seen = seen

    def _pairs(self, size: int, others: int, by_keys: bool) -> Iterator[tuple[Any, list[Any]]]:
        """Blocks of the one sequence with those of the other that they reach, and if wholly."""
        for one in blocks(size):
            found = []
            for other in blocks(others):
                queries, keys = (other, one) if by_keys else (one, other)
                is_any, is_all = self.seen.reaches(queries, keys)
                if is_any:
                    found.append((other, is_all))
            yield one, found

    def _scores(self, q: Any, k: Any, queries: Any, keys: Any, is_all: bool) -> Any:
        space = self.space
        rows, columns = q[..., queries[0] : queries[1], :], k[..., keys[0] : keys[1], :]
        scores = space.matmul(rows, space.matrix_transpose(columns)) * self.scale
        if is_all:
            return scores
        mask = self.seen.mask(space, queries, keys, q)
        return space.where(mask, scores, space.full_like(scores, -math.inf))

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """What is weighed, `[..., g, r, s, e]`, and the logarithms of the sums, `[..., g, r, s]`.

        A query that sees no key has zeros, and -inf.
        """
        space = self.space
        weighed, sums = [], []
        for queries, reached in self._pairs(q.shape[-2], k.shape[-2], by_keys=False):
            part = q[..., queries[0] : queries[1], :]
            most = space.full_like(part[..., :1], -math.inf)
            total = space.zeros_like(part[..., :1])
            shape = (*part.shape[:-1], v.shape[-1])
            found = space.zeros_like(space.broadcast_to(part[..., :1], shape))
            for keys, is_all in reached:
                scores = self._scores(q, k, queries, keys, is_all)
                greatest = space.maximum(most, space.max(scores, axis=-1, keepdims=True))
                # Where no key is seen yet, nothing is taken off.
                level = space.where(space.isfinite(greatest), greatest, space.zeros_like(greatest))
                weights = space.exp(scores - level)
                kept = space.exp(most - level)
                total = total * kept + space.sum(weights, axis=-1, keepdims=True)
                found = found * kept + space.matmul(weights, v[..., keys[0] : keys[1], :])
                most = greatest
            is_none = total == 0
            one = space.ones_like(total)
            weighed.append(found / space.where(is_none, one, total))
            level = space.where(space.isfinite(most), most, space.zeros_like(most))
            logs = level + space.log(space.where(is_none, one, total))
            sums.append(space.where(is_none, most, logs)[..., 0])
        return space.concat(weighed, axis=-2), space.concat(sums, axis=-1)

    def _weights(self, q: Any, k: Any, sums: Any, at: Any, is_all: bool) -> Any:
        queries, keys = at
        level = sums[..., queries[0] : queries[1], None]
        level = self.space.where(self.space.isfinite(level), level, self.space.zeros_like(level))
        return self.space.exp(self._scores(q, k, queries, keys, is_all) - level)

    def _slopes(self, weights: Any, v: Any, shift: Any, g: Any, at: Any) -> Any:
        """The cotangent of the scores of a block, scaled."""
        queries, keys = at
        space = self.space
        values = space.matrix_transpose(v[..., keys[0] : keys[1], :])
        agreed = space.matmul(g[..., queries[0] : queries[1], :], values)
        return weights * (agreed + shift[..., queries[0] : queries[1], None]) * self.scale

    def queries_back(self, q: Any, k: Any, v: Any, sums: Any, shift: Any, g: Any) -> Any:
        """The cotangent of the queries.

        Args:
            q, k, v: as of `forward`.
            sums: its second result, over all keys there are.
            shift: the cotangent of `sums` less the product of what is weighed and its cotangent.
            g: the cotangent of what is weighed.
        """
        space = self.space
        made = []
        for queries, reached in self._pairs(q.shape[-2], k.shape[-2], by_keys=False):
            found = space.zeros_like(q[..., queries[0] : queries[1], :])
            for keys, is_all in reached:
                at = queries, keys
                slopes = self._slopes(self._weights(q, k, sums, at, is_all), v, shift, g, at)
                found = found + space.matmul(slopes, k[..., keys[0] : keys[1], :])
            made.append(found)
        return space.concat(made, axis=-2)

    def keys_back(self, q: Any, k: Any, v: Any, sums: Any, shift: Any, g: Any) -> tuple[Any, Any]:
        """The cotangents of the keys and of the values, summed over a group's heads."""
        space = self.space
        of_keys, of_values = [], []
        for keys, reached in self._pairs(k.shape[-2], q.shape[-2], by_keys=True):
            for_keys = space.zeros_like(k[..., keys[0] : keys[1], :])
            for_values = space.zeros_like(v[..., keys[0] : keys[1], :])
            for queries, is_all in reached:
                at = queries, keys
                weights = self._weights(q, k, sums, at, is_all)
                slopes = self._slopes(weights, v, shift, g, at)
                rows = q[..., queries[0] : queries[1], :]
                cotangents = g[..., queries[0] : queries[1], :]
                for_keys = for_keys + _sum_heads(space, slopes, rows)
                for_values = for_values + _sum_heads(space, weights, cotangents)
            of_keys.append(for_keys)
            of_values.append(for_values)
        return space.concat(of_keys, axis=-2), space.concat(of_values, axis=-2)


def _sum_heads(space: Any, weights: Any, rows: Any) -> Any:
    """What weights `[..., r, s, t]` make of rows `[..., r, s, d]`: `[..., 1, t, d]`."""
    found = space.matmul(space.matrix_transpose(weights), rows)
    return space.sum(found, axis=-3, keepdims=True)


def grouped(x: Any, groups: int) -> Any:
    """Heads `[..., h, s, d]` by groups: `[..., g, r, s, d]`."""
    lead, (heads, *rest) = x.shape[:-3], x.shape[-3:]
    return x.reshape((*lead, groups, heads // max(groups, 1), *rest))


def _kernels(work: LocalWork) -> list[Attention]:
    """The kernel of each rank here."""
    options = work.attributes
    rank = len(work.operand_shapes_here(0)[0])
    return [
        Attention(
            work.library.namespace,
            options["scale"],
            SeenKeys(options["is_causal"], options["window"], query_start, key_start),
        )
        for query_start, key_start in zip(
            work.starts_here(0, rank - 2), work.starts_here(1, rank - 2), strict=True
        )
    ]


def attention(work: LocalWork) -> Function | list[Function]:
    """Values weighed by how queries and keys agree."""
    if len(work.operands) != 3:
        return by_name(work)
    if work.library.name == "torch":
        return [_by_torch(kernel, work.library) for kernel in _kernels(work)]
    return [_by_blocks(kernel) for kernel in _kernels(work)]


def _by_blocks(kernel: Attention) -> Function:
    def function(q: Any, k: Any, v: Any) -> Any:
        made, _ = kernel.forward(grouped(q, k.shape[-3]), k[..., None, :, :], v[..., None, :, :])
        return made.reshape((*q.shape[:-1], v.shape[-1]))

    return function


def _by_torch(kernel: Attention, library: Library) -> Function:
    compute = import_module("torch").nn.functional.scaled_dot_product_attention
    seen = kernel.seen

    def function(q: Any, k: Any, v: Any) -> Any:
        if 0 in (*q.shape, *k.shape, *v.shape):
            made = q.new_zeros((*q.shape[:-1], v.shape[-1]))
            for one in (q, k, v):
                made = library.linked(made, one)
            return made
        options: dict[str, Any] = {"scale": kernel.scale, "enable_gqa": k.shape[-3] != q.shape[-3]}
        whole = (0, q.shape[-2]), (0, k.shape[-2])
        if not seen.reaches(*whole)[1]:
            is_plain = seen.window is None and seen.query_start == seen.key_start
            if is_plain:
                options["is_causal"] = True
            else:
                options["attn_mask"] = seen.mask(kernel.space, *whole, q)
        return compute(q, k, v, **options)

    return function


def attention_logsumexp(work: LocalWork) -> list[Function]:
    """The logarithm of the sum of each query's exponentials."""

    def make(kernel: Attention) -> Function:
        def function(q: Any, k: Any) -> Any:
            keys = k[..., None, :, :]
            # What is weighed is not wanted: no values.
            _, sums = kernel.forward(grouped(q, k.shape[-3]), keys, keys[..., :0])
            return sums.reshape(q.shape[:-1])

        return function

    return [make(kernel) for kernel in _kernels(work)]


def attention_queries_gradient(work: LocalWork) -> list[Function]:
    """The cotangent of the queries."""

    def make(kernel: Attention) -> Function:
        def function(*operands: Any) -> Any:
            return kernel.queries_back(*as_groups(*operands)).reshape(operands[0].shape)

        return function

    return [make(kernel) for kernel in _kernels(work)]


def attention_keys_gradient(work: LocalWork) -> list[Function]:
    """The cotangents of the keys and of the values."""

    def make(kernel: Attention) -> Function:
        def function(*operands: Any) -> Any:
            of_keys, of_values = kernel.keys_back(*as_groups(*operands))
            return of_keys.reshape(operands[1].shape), of_values.reshape(operands[2].shape)

        return function

    return [make(kernel) for kernel in _kernels(work)]


def as_groups(q: Any, k: Any, v: Any, sums: Any, shift: Any, g: Any) -> tuple[Any, ...]:
    """The operands of a gradient with heads by groups, as `Attention` takes them."""
    groups = k.shape[-3]
    numbers = (grouped(one[..., None], groups)[..., 0] for one in (sums, shift))
    return (
        grouped(q, groups),
        k[..., None, :, :],
        v[..., None, :, :],
        *numbers,
        grouped(g, groups),
    )
