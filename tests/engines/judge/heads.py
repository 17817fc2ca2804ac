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
    shared: Sequence[str] = (),
) -> Callable[[RankModule], None]:
    """What a family's `prepare` does for the attention modules of a glob.

    Args:
        attention: the modules' names.
        rows: of an attention module, the linear layers whose rows are its heads.
        columns: the linear layer whose columns are; a leading `^.` is the module around it.
        blocks: how many times the heads lie in the rows of one layer (3 where query, key and
            value are one layer).
        shared: the linear layers whose rows are key/value heads that several queries share.
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
            if shared:
                key = rank.names[id(module.get_submodule(shared[0]).weight)]
                held, rest = divmod(len(rank.indices(key, 0)), size)
                if rest or not held or heads % held:
                    raise JudgeError(f"{held} heads of {key} for {heads} of {first}")
                module.num_key_value_heads = held
                module.num_key_value_groups = heads // held
                for row in shared:
                    _resize(module.get_submodule(row), 0, held * size)

    return prepare


def share_width(first: str, second: str) -> Callable[[RankModule], None]:
    """What `prepare` does for two layers whose width between them no key of the config says.

    Args:
        first: a glob of linear layers, of which a rank has rows.
        second: the name of the layer behind it, beside it in the same module.
    """

    def prepare(rank: RankModule) -> None:
        found = rank.modules(first)
        if not found:
            raise JudgeError(f"no module is called {first!r}")
        for name, module in found:
            width = len(rank.indices(f"{name}.weight", 0))
            _resize(module, 0, width)
            _resize(rank.model.get_submodule(f"{name.rpartition('.')[0]}.{second}"), 1, width)

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
