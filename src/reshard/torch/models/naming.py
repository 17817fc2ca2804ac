"""Names of tensors in two models: which tensor of one is which of the other.

Two models are matched in names that both have in common:

1. each side's own names become common ones, by a table or a function; every rank applies its
   own to what it has, so ranks that count their layers from 0 may each say where they begin;
2. a fused parameter keeps its name, and its members have theirs (`reshard.recipes.naming`);
3. names that are declared tied mean one tensor: whichever of them the source has serves all;
4. a stacked tensor, such as the weights of all experts, has one name for each of its members::

       "layers.3.experts.up"  -->  "layers.3.experts.0.up", "layers.3.experts.1.up", ...
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from reshard.errors import UsageError
from reshard.recipes.naming import Fusion, Meaning, compile_pattern, find_by_pattern

Naming = Mapping[str, str] | Mapping[str, Meaning] | Callable[[str], Meaning]
Value = TypeVar("Value")


def renamed(name: str, naming: Naming | None) -> str:
    """What `name` is called in both models: see `meaning`. A fused parameter keeps its name.

    >>> table = {"lm_head.weight": "output.weight", "model.layers.*": "decoder.layers.*"}
    >>> [renamed(name, table) for name in ("lm_head.weight", "model.layers.3.norm", "bias")]
    ['output.weight', 'decoder.layers.3.norm', 'bias']
    """
    found = meaning(name, naming)
    return name if isinstance(found, Fusion) else found


def meaning(name: str, naming: Naming | None) -> Meaning:
    """What `name` is in names common to both models: a name, or a fusion of names.

    Args:
        name: one side's own.
        naming: a function; or a table, whose keys are names or patterns. What a `*` of a pattern
            stands for takes the place of the same `*` in the entry. The first that fits counts,
            a name that none fits stays as it is.

    Raises UsageError for a table or a function that gives neither, and for other kinds of naming.

    >>> meaning("layers.3.fc1", {"*.fc1": Fusion(("*.gate", "*.up"))}).members
    ('layers.3.gate', 'layers.3.up')
    """
    if naming is None:
        return name
    found: object = name
    if isinstance(naming, Mapping):
        found = naming[name] if name in naming else find_by_pattern(name, naming)
    elif callable(naming):
        found = naming(name)
    else:
        raise UsageError(f"names by {naming!r}; give a table or a function")
    if not isinstance(found, str | Fusion):
        raise UsageError(f"the name {name!r} became {found!r}; names are matched to names")
    return found


def member_pattern(name: str, stacks: Mapping[str, str] | None) -> str | None:
    """The names of a stacked tensor's members, with `{}` for their numbers; None for others.

    Args:
        name: of a tensor, common to both models.
        stacks: patterns of stacked tensors, and those of their members.

    Raises UsageError for members without a place for their numbers.

    >>> member_pattern("layers.3.experts.up", {"*.experts.up": "*.experts.{}.up"})
    'layers.3.experts.{}.up'
    """
    if not stacks:
        return None
    found = stacks[name] if name in stacks else find_by_pattern(name, stacks)
    if found == name:
        return None
    if not isinstance(found, str):
        raise UsageError(f"members {found!r} of the stacked tensor {name!r}; give their pattern")
    if found.count("{}") != 1:
        raise UsageError(
            f"members {found!r} of the stacked tensor {name!r}; write {{}} where their number is"
        )
    return found


def fitting(name: str, table: Mapping[str, Value]) -> Value | None:
    """The entry of a name: its own, or that of the first pattern that fits; None without any.

    >>> fitting("layers.3.up", {"bias": 1, "*.up": 2})
    2
    """
    if name in table:
        return table[name]
    patterns = (pattern for pattern in table if "*" in pattern)
    return next((table[one] for one in patterns if compile_pattern(one).fullmatch(name)), None)


def serving_name(name: str, available: Collection[str], ties: Mapping[str, str]) -> str | None:
    """The name among `available` that a tensor is filled from; None where there is none.

    Args:
        name: of a tensor to fill.
        available: names that the source has.
        ties: names that mean the same tensor as another name.

    Raises UsageError for ties that go round in a circle.

    >>> serving_name("lm_head", {"embedding"}, {"lm_head": "embedding"})
    'embedding'
    """
    if name in available:
        return name
    root = tied_root(name, ties)
    tied = [other for other in ties if tied_root(other, ties) == root]
    return next((other for other in (root, *tied) if other in available), None)


def tied_root(name: str, ties: Mapping[str, str]) -> str:
    """The name that a chain of ties ends in. Raises UsageError where it is a circle."""
    if name not in ties:
        return name
    seen = [name]
    while seen[-1] in ties:
        seen.append(ties[seen[-1]])
        if seen[-1] in seen[:-1]:
            raise UsageError(f"ties go round in a circle: {' -> '.join(seen)}")
    return seen[-1]
