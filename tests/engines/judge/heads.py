"""Heads of a rank where a model's config has no key for their size.

Such a config has `hidden_size` and the number of heads, whose quotient is the size of a head: a
config with a rank's number of heads would have larger heads. So the module is built from the
config with all heads, and here its attention gets the rank's number of them and parameters of the
shapes that go with it; the shards must have these shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .modules import RankModule
from .shards import JudgeError

COUNTS = ("num_attention_heads", "num_heads", "n_heads")


def share_heads(
    attention: str,
    rows: Sequence[str],
    columns: str,
    blocks: int = 1,
    also: Callable[[Any, int], None] = lambda module, heads: None,
) -> Callable[[RankModule], None]:
    """What a family's `prepare` does for the attention modules of a glob.

    Args:
        attention: the modules' names.
        rows: of an attention module, the linear layers whose rows are its heads.
        columns: the linear layer whose columns are; a leading `^.` is the module around it.
        blocks: how many times the heads lie in the rows of one layer (3 where query, key and
            value are one layer).
        also: what else a module needs, told it and the rank's number of heads.
    """

    def prepare(rank: RankModule) -> None:
        found = rank.modules(attention)
        if not found:
            raise JudgeError(f"no module is called {attention!r}")
        for name, module in found:
            count = next((key for key in COUNTS if hasattr(module, key)), None)
            # Where a module does not count its heads, it counts on their size, and its config does.
            owner = module if count else rank.whole
            whole = getattr(owner, count or "num_attention_heads")
            first = rank.names[id(module.get_submodule(rows[0]).weight)]
            length = rank.cut.assignment.layouts[first].shape[0]
            size, rest = divmod(length, whole * blocks)
            held = len(rank.indices(first, 0))
            if rest or held % (size * blocks):
                raise JudgeError(f"{held} of {length} rows of {first} are no whole heads of {size}")
            heads = held // (size * blocks)
            if count:
                setattr(module, count, heads)
            for row in rows:
                _resize(module.get_submodule(row), 0, heads * size * blocks)
            outer, inner = name, columns
            while inner.startswith("^."):
                outer, inner = outer.rpartition(".")[0], inner[2:]
            _resize(rank.model.get_submodule(f"{outer}.{inner}"), 1, heads * size)
            also(module, heads)

    return prepare


def _resize(layer: Any, dimension: int, length: int) -> None:
    """Another number of rows or columns of a linear layer, whose values come later."""
    shape = list(layer.weight.shape)
    shape[dimension] = length
    layer.weight.data = layer.weight.new_full(shape, float("nan"))
    if dimension == 0 and layer.bias is not None:
        layer.bias.data = layer.bias.new_full((length,), float("nan"))


def in_turn(*steps: Callable[[RankModule], None]) -> Callable[[RankModule], None]:
    """Several of them, for a family with several kinds of attention."""

    def prepare(rank: RankModule) -> None:
        for step in steps:
            step(rank)

    return prepare
