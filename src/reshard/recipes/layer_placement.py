"""The ranks of the N-th layer or expert of a model.

Names of tensors have numbers: `model.layers.17.mlp.experts.3.up_proj.weight` belongs to layer
17 and to expert 3 of it. A numbering defines the axis over which they are divided, how many there
are, and the cut rule::

    layer over pp=4, 10 layers, cut "balanced"      0 1 2 | 3 4 5 | 6 7 | 8 9
                                cut "sizes[1,3,3,3]"    0 | 1 2 3 | 4 5 6 | 7 8 9
                                cut "bytes"         stages of nearly equal bytes
    expert over ep=4, 6 experts, cut "ceil"         0 1 | 2 3 | 4 5 | none

1. The rule shards a dimension that has an index for each thing (`reshard.cut_rules`).
2. A thing is at every coordinate whose part has its index.
3. Tensors at an end of the model (embeddings, the last norm) belong to no layer; they are at the
   first or the last coordinate, or at both.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard._records import Record
from reshard.cut_rules import CutRule, Sizes, parse_rule
from reshard.errors import LayoutError, RecipeError
from reshard.recipes.expressions import parse_expression

BY_BYTES = "bytes"


class Numbering(Record):
    """The layers or experts counted by a number in names, and the axis over which they are divided.

    Args:
        axis: the recipe's axis.
        count: their number: an expression of config.json (`reshard.recipes.expressions`).
        cut: the text of a cut rule, or `bytes` for equal bytes at every coordinate.
        beyond_last: whether numbers from the count on are allowed, and placed with the last thing.
        behind: globs of names with numbers of their own, such as layers that predict further tokens
            (`mtp.layers.0`); all of these are placed with the last thing.

    Raises:
        RecipeError: a text that is not a cut rule, or a count that is not an expression.
    """

    axis: str
    count: str
    cut: str = "ceil"
    beyond_last: bool = False
    behind: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        parse_expression(self.count)
        if self.cut != BY_BYTES:
            check_cut(self.cut, "a cut rule such as balanced or sizes[5,6,5], or `bytes`")

    def is_beyond_last(self, name: str) -> bool:
        """Return whether a tensor's name has numbers of its own, after the last thing.

        >>> numbering = Numbering("pp", "num_hidden_layers", behind=("mtp.*",))
        >>> numbering.is_beyond_last("mtp.layers.0.norm")
        True
        """
        return any(fnmatch.fnmatchcase(name, glob) for glob in self.behind)


def check_cut(text: str, expected: str = "a cut rule such as ceil, pad128 or unit64") -> CutRule:
    """Parse the text of a cut rule. Raises RecipeError for other text."""
    try:
        return parse_rule(text)
    except LayoutError as error:
        raise RecipeError(f"the cut {text!r} is not {expected}: {error}") from error


class LayerPlacement(NamedTuple):
    """The coordinates of each thing along an axis of `parts` coordinates.

    `coordinates[n]` are those of thing number `n`.
    """

    parts: int
    coordinates: tuple[tuple[int, ...], ...]
    beyond_last: bool = False

    @classmethod
    def cut(
        cls, rule: CutRule, count: int, parts: int, beyond_last: bool = False
    ) -> LayerPlacement:
        """Divide `count` layers or experts among `parts` coordinates by a cut rule.

        Raises:
            RuleError: a rule that does not fit the count.

        >>> LayerPlacement.cut(parse_rule("ceil"), 6, 4).coordinates
        ((0,), (0,), (1,), (1,), (2,), (2,))
        """
        table = rule.table(count, parts)
        coordinates: list[list[int]] = [[] for _ in range(count)]
        for part in range(parts):
            for start, stop, _, _ in table.runs_of(part):
                for number in range(start, stop):
                    coordinates[number].append(part)
        return cls(parts, tuple(map(tuple, coordinates)), beyond_last)

    def of_number(self, number: int) -> tuple[int, ...]:
        """Return the coordinates of a thing. Raises RecipeError for a number beyond the last."""
        if number < len(self.coordinates):
            return self.coordinates[number]
        if self.beyond_last:
            return (self.parts - 1,)
        raise RecipeError(
            f"number {number} of a name, but the count in the model's config is "
            f"{len(self.coordinates)}; correct config.json"
        )

    def of_ends(self, ends: Sequence[str]) -> tuple[int, ...]:
        """Return the coordinates of tensors at ends of the model: `first`, `last`."""
        return tuple(sorted({0 if end == "first" else self.parts - 1 for end in ends}))


def balance_weights(
    weights: Sequence[float], parts: int, first: float = 0.0, last: float = 0.0
) -> Sizes:
    """Divide consecutive things into `parts` groups, minimizing the heaviest group.

    Among such divisions that with the most equal weights (least squares) is taken. `first` and
    `last` are added to the weights of the first and last group.

    Source: the linear partition problem, by dynamic programming over shape
    `(parts, things + 1)`.

    >>> balance_weights([1, 1, 1, 1, 1, 1], 3, last=2).sizes
    (2, 3, 1)
    >>> balance_weights([5, 1, 1, 1], 2).sizes
    (1, 3)
    """
    # Two passes: minimize the heaviest group, then the sum of squares under that limit.
    edges = np.concatenate(([0.0], np.cumsum(np.asarray(weights, dtype=np.float64))))
    heaviest, _ = _find_best_cut(edges, parts, first, last, np.inf, np.maximum, 1)
    _, stops = _find_best_cut(edges, parts, first, last, heaviest, np.add, 2)
    return Sizes(tuple(int(b - a) for a, b in zip((0, *stops), stops, strict=False)))


def _find_best_cut(
    edges: NDArray[np.float64],
    parts: int,
    first: float,
    last: float,
    limit: float,
    join: np.ufunc,
    power: int,
) -> tuple[float, list[int]]:
    """Return the minimum cost of cutting at `edges`, and the end of each group.

    A group costs its weight to the `power`, or infinity beyond `limit`; costs of groups are joined
    by `join`.
    """
    things = len(edges) - 1
    # `weight[a, b]` is the weight of things `a:b`; a group cannot stop before it starts.
    weight = edges[None, :] - edges[:, None]
    backwards = np.tri(things + 1, k=-1, dtype=bool)
    best = np.where(np.arange(things + 1) == 0, 0.0, np.inf)
    chosen = []
    for part in range(parts):
        extra = first * (part == 0) + last * (part == parts - 1)
        cost = np.where(backwards | (weight + extra > limit), np.inf, (weight + extra) ** power)
        # `total[a, b]`: this group is `a:b`, after the best cut of `0:a`.
        total = join(best[:, None], cost)
        start = total.argmin(axis=0)
        chosen.append(start)
        best = total[start, np.arange(things + 1)]
    # Backtrack from the end: each group starts where the previous group stops.
    stops = [things]
    for start in reversed(chosen[1:]):
        stops.append(int(start[stops[-1]]))
    return float(best[things]), stops[::-1]
