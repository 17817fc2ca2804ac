"""Attention on one rank, in memory that grows linearly with the sequence.

Scores are found for a block of queries and a block of keys at a time. Of each query the greatest
score so far, the sum of the exponentials under it and what they weigh are kept; a greater one
scales them down. Blocks in which no query sees any key are left out. The gradient finds the weights
of some queries again, over all keys that those see, and with them the cotangents of all three.

PyTorch's own kernels do both for tensors.

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

from reshard.spmd.core.backend import Library
from reshard.spmd.core.local_work import Function, LocalWork, by_name

_BLOCK = 256
"""Places of a block of queries, and of a block of keys."""
_LEAST = 32
"""Places of the smallest block of queries that sees all its keys at once."""


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


def blocks(size: int, length: int = _BLOCK) -> Iterator[tuple[int, int]]:
    """Where blocks of a sequence start and stop.

    >>> list(blocks(300))
    [(0, 256), (256, 300)]
    """
    # An empty part has one empty block, whose result is empty.
    for start in range(0, max(size, 1), length):
        yield start, min(start + length, size)


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
        for queries in blocks(q.shape[-2]):
            part = q[..., queries[0] : queries[1], :]
            most = space.full_like(part[..., :1], -math.inf)
            total = space.zeros_like(part[..., :1])
            shape = (*part.shape[:-1], v.shape[-1])
            found = space.zeros_like(space.broadcast_to(part[..., :1], shape))
            for keys in blocks(k.shape[-2]):
                is_any, is_all = self.seen.reaches(queries, keys)
                if not is_any:
                    continue
                scores = self._scores(q, k, queries, keys, is_all)
                greatest = space.maximum(most, space.max(scores, axis=-1, keepdims=True))
                level = self._level(greatest)
                weights = space.exp(scores - level)
                kept = space.exp(most - level)
                total = total * kept + space.sum(weights, axis=-1, keepdims=True)
                found = found * kept + space.matmul(weights, v[..., keys[0] : keys[1], :])
                most = greatest
            is_none = total == 0
            one = space.ones_like(total)
            weighed.append(found / space.where(is_none, one, total))
            logs = self._level(most) + space.log(space.where(is_none, one, total))
            sums.append(space.where(is_none, most, logs)[..., 0])
        return space.concat(weighed, axis=-2), space.concat(sums, axis=-1)

    def back(self, q: Any, k: Any, v: Any, g: Any, of_all: tuple[Any, Any] | None = None) -> Any:
        """The cotangents of queries, of keys and of values, those summed over a group's heads.

        Args:
            q, k, v: as of `forward`.
            g: the cotangent of what is weighed.
            of_all: where these are not all keys that the queries see: of all of them the second
                result of `forward`, and what is added to the weights' cotangents, minus the
                product of what is weighed and `g`.
        """
        space = self.space
        of_keys, of_values = space.zeros_like(k), space.zeros_like(v)
        of_queries = []
        for queries, keys in self._rows(q.shape[-2], k.shape[-2]):
            rows, cotangents = (x[..., queries[0] : queries[1], :] for x in (q, g))
            columns, values = (x[..., keys[0] : keys[1], :] for x in (k, v))
            is_all = self.seen.reaches(queries, keys)[1]
            scores = self._scores(q, k, queries, keys, is_all)
            agreed = space.matmul(cotangents, space.matrix_transpose(values))
            if of_all is None:
                weights = self._softmax(scores)
                shift = -space.sum(weights * agreed, axis=-1, keepdims=True)
            else:
                sums, shift = (x[..., queries[0] : queries[1], None] for x in of_all)
                weights = space.exp(scores - self._level(sums))
            slopes = weights * (agreed + shift) * self.scale
            of_queries.append(space.matmul(slopes, columns))
            for found, one, other in (
                (of_keys, slopes, rows),
                (of_values, weights, cotangents),
            ):
                found[..., keys[0] : keys[1], :] += _sum_heads(space, one, other)
        return space.concat(of_queries, axis=-2), of_keys, of_values

    def _rows(self, size: int, others: int) -> Iterator[tuple[Any, Any]]:
        """Blocks of queries, each with the stretch of all keys that one of them sees.

        The longer that is, the fewer queries a block has.
        """
        ahead = self.seen.query_start - self.seen.key_start
        low, high = self.seen.limits
        for start, stop in blocks(size, max(_BLOCK**2 // max(others, _BLOCK), _LEAST)):
            first = min(max(start + ahead - high, 0), others)
            last = max(min(stop - 1 + ahead - low + 1, others), first)
            yield (start, stop), (int(first), int(last))

    def _level(self, most: Any) -> Any:
        """What is taken off before exponentials: nothing where no key is seen."""
        return self.space.where(self.space.isfinite(most), most, self.space.zeros_like(most))

    def _softmax(self, scores: Any) -> Any:
        space = self.space
        if not scores.shape[-1]:
            return scores
        weights = space.exp(scores - self._level(space.max(scores, axis=-1, keepdims=True)))
        total = space.sum(weights, axis=-1, keepdims=True)
        return weights / space.where(total == 0, space.ones_like(total), total)


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
    weigh = _torch_kernel(kernel)

    def function(q: Any, k: Any, v: Any) -> Any:
        if 0 not in (*q.shape, *k.shape, *v.shape):
            return weigh(q, k, v)
        made = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        for one in (q, k, v):
            made = library.linked(made, one)
        return made

    return function


def _torch_kernel(kernel: Attention) -> Function:
    """PyTorch's kernel, of operands that are not empty."""
    compute = import_module("torch").nn.functional.scaled_dot_product_attention
    seen = kernel.seen

    def function(q: Any, k: Any, v: Any) -> Any:
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


def attention_gradient(work: LocalWork) -> list[Function]:
    """The cotangents of queries, keys and values."""
    make = _back_by_torch if work.library.name == "torch" else _back_by_blocks
    return [make(kernel) for kernel in _kernels(work)]


def _back_by_blocks(kernel: Attention) -> Function:
    def function(q: Any, k: Any, v: Any, g: Any) -> tuple[Any, ...]:
        groups = k.shape[-3]
        made = kernel.back(
            grouped(q, groups), k[..., None, :, :], v[..., None, :, :], grouped(g, groups)
        )
        return tuple(one.reshape(x.shape) for one, x in zip(made, (q, k, v), strict=True))

    return function


def _back_by_torch(kernel: Attention) -> Function:
    torch = import_module("torch")
    weigh, by_blocks = _torch_kernel(kernel), _back_by_blocks(kernel)

    def function(*operands: Any) -> Any:
        # What autograd does here has no gradient that autograd could go on with.
        is_watched = torch.is_grad_enabled() and any(one.requires_grad for one in operands)
        # The compiler follows blocks, and not autograd.
        is_watched = is_watched or torch.compiler.is_compiling()
        if is_watched or any(0 in one.shape for one in operands):
            return by_blocks(*operands)
        *arrays, g = operands
        with torch.enable_grad():
            watched = [one.detach().requires_grad_() for one in arrays]
            made = weigh(*watched)
        return torch.autograd.grad(made, watched, g)

    return function
